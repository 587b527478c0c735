"""Norm-based analysis, GlobEnc's encoder and ALTI in loops, from the vectors that tokens give to each other.

The code shares nothing with the package. It finds the projection, the residual and the norms by their names, and
computes the statistics of the norms from their inputs.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.reference.case import Case
from tests.reference.naive import Run, real_positions, record, run_of, site_of, values_of

# The norms after the residual connections of the attention and of the feed-forward.
BERT_NORMS = ("attention.output.LayerNorm", "output.LayerNorm")
BART_NORMS = ("self_attn_layer_norm", "final_layer_norm")
POST_NORMS = {
    "bert": BERT_NORMS,
    "roberta": BERT_NORMS,
    "electra": BERT_NORMS,
    "distilbert": ("sa_layer_norm", "output_layer_norm"),
    "albert": ("attention.LayerNorm", "full_layer_layer_norm"),
    "wav2vec2": ("layer_norm", "final_layer_norm"),
    "bart-encoder": BART_NORMS,
    "bart-decoder": BART_NORMS,
}
# Families whose layers add the attention's output to their input without a norm after the sum.
PRE_NORM = ["gpt2", "llama", "opt", "vit", "qwen3", "gpt-neox", "phi", "modernbert", "t5-encoder", "whisper-encoder"]


@dataclass(frozen=True)
class Naive:
    """The vectors of one run of a layer."""

    vectors: np.ndarray  # (batch, out, in, d), zero from and to padding
    rest: np.ndarray  # (batch, out, d), the terms that belong to no source: biases and the feed-forward
    whole: np.ndarray  # (batch, out, d), the tensor of the model that is the sum of vectors and rest
    real: np.ndarray  # (batch, out), whether a position is real (not padding)


def naive_vectors(case: Case, layer_index: int, include: str, attention: str = "self") -> Naive:
    """The vectors from each source to each output in the layer's last run."""
    return vectors_of_run(case, run_of(case, layer_index), include, attention)


@torch.no_grad()
def vectors_of_run(case: Case, number: int, include: str, attention: str = "self") -> Naive:
    """The vectors from each source to each output in any run.

    Args:
        include: "attention", "residual", "layer_norm" or "encoder".
        attention: "self" or "cross".
    """
    runs, output = record(case, output_attentions=True)
    run, site = runs[number], site_of(case, attention)
    real, sources = real_positions(case, run, attention)
    weights = output[site.weights][number].double().numpy()
    values = values_of(run, site).double().numpy()
    projection = run.layer.get_submodule(site.output)
    matrix = projection.weight.double().numpy()
    if isinstance(projection, nn.Linear):  # the weights of GPT-2's Conv1D are transposed
        matrix = matrix.T
    bias = np.zeros(matrix.shape[1]) if projection.bias is None else projection.bias.double().numpy()

    whole = seen(run, site.output)[1]
    vectors = np.zeros((*whole.shape[:2], values.shape[1], whole.shape[2]))
    for b, i in np.argwhere(real):
        for j in np.flatnonzero(sources[b]):
            for head in range(site.heads):
                value = values[b, j, site.columns(site.value_head(head))]
                vectors[b, i, j] += weights[b, head, i, j] * (value @ matrix[site.context(head)])
    rest = np.broadcast_to(bias, whole.shape).copy()
    if include == "attention":
        return Naive(vectors, rest, whole, real)

    layer_input = (run.args[0] if run.args else run.kwargs["hidden_states"]).double().numpy()
    whole = whole + layer_input
    for b, i in np.argwhere(real):
        vectors[b, i, i] += layer_input[b, i]
    if include == "residual":
        return Naive(vectors, rest, whole, real)

    first, last = POST_NORMS[case_name(case)]
    names = [first] if include == "layer_norm" else [first, last]
    for name in names:
        norm = run.layer.get_submodule(name)
        given, made = seen(run, name)
        rest = rest + (given - whole)  # the feed-forward, between the two norms
        for b, i in np.argwhere(real):
            rest[b, i] = linear_part(norm, rest[b, i], given[b, i]) + norm.bias.double().numpy()
            for j in range(vectors.shape[2]):
                vectors[b, i, j] = linear_part(norm, vectors[b, i, j], given[b, i])
        whole = made
    return Naive(vectors, rest, whole, real)


def case_name(case: Case) -> str:
    from tests.reference.families import FAMILIES

    return next(name for name, family in FAMILIES.items() if family is case.family)


def seen(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The input and the output of a submodule."""
    found: list[tuple[np.ndarray, np.ndarray]] = []

    def look(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        found.append((args[0].double().numpy().copy(), output.double().numpy().copy()))

    with ExitStack() as hooks:
        hooks.enter_context(run.layer.get_submodule(name).register_forward_hook(look))
        run.again()
    (both,) = found
    return both


def linear_part(norm: nn.LayerNorm, vector: np.ndarray, given: np.ndarray) -> np.ndarray:
    """The linear part of a layer norm, without its bias, with the statistics of its input `given`."""
    variance = sum((x - sum(given) / len(given)) ** 2 for x in given) / len(given)
    return norm.weight.double().numpy() * (vector - vector.mean()) / sqrt(variance + norm.eps)


def normalized(scores: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Rows divided by their sums, in which a group counts once."""
    result = np.zeros_like(scores)
    for b, i in np.ndindex(scores.shape[:2]):
        alone = [j for j in range(scores.shape[2]) if scores[b, i, j] and not same_before(scores, groups, b, i, j)]
        total = sum(scores[b, i, j] for j in alone)
        if total > 0:
            result[b, i] = scores[b, i] / total
    return result


def same_before(scores: np.ndarray, groups: np.ndarray, b: int, i: int, j: int) -> bool:
    """Whether a source before j with a score belongs to the same group."""
    return any(groups[b, k] == groups[b, j] and scores[b, i, k] for k in range(j))


def scored(naive: Naive, score: Any, groups: Tensor | None, normalize: bool, sources: np.ndarray) -> Tensor:
    """A map of ``score(vector, whole)``. Vectors are summed over groups, and all tokens of a group carry the score."""
    batch, out, count, _ = naive.vectors.shape
    group = np.broadcast_to(np.arange(count) if groups is None else groups.numpy(), (batch, count))
    result = np.zeros((batch, out, count))
    for b, i in np.argwhere(naive.real):
        for name in np.unique(group[b]):
            members = [j for j in range(count) if group[b, j] == name and sources[b, j]]
            if members:
                vector = sum(naive.vectors[b, i, j] for j in members)
                result[b, i, members] = score(vector, naive.whole[b, i])
    return torch.from_numpy(normalized(result, group) if normalize else result)


def naive_attention_norm(
    case: Case,
    layer_index: int,
    include: str,
    *,
    groups: Tensor | None = None,
    normalize: bool = True,
    attention: str = "self",
) -> Tensor:
    """The length of each vector, ``(batch, out, in)``."""
    naive = naive_vectors(case, layer_index, include, attention)
    sources = real_positions(case, record(case)[0][run_of(case, layer_index)], attention)[1]

    def length(vector: np.ndarray, whole: np.ndarray) -> float:
        return sqrt(sum(float(x) ** 2 for x in vector))

    return scored(naive, length, groups, normalize, sources)


def naive_mixing_ratio(case: Case, layer_index: int, include: str) -> Tensor:
    """The mixing ratio: the share of the vector from other tokens, ``(batch, out)``."""
    naive = naive_vectors(case, layer_index, include)
    ratios = np.zeros(naive.real.shape)
    for b, i in np.argwhere(naive.real):
        others = sum(naive.vectors[b, i, j] for j in range(naive.vectors.shape[2]) if j != i)
        lengths = np.linalg.norm(others), np.linalg.norm(naive.vectors[b, i, i])
        ratios[b, i] = lengths[0] / sum(lengths)
    return torch.from_numpy(ratios)


def naive_alti(
    case: Case,
    layer_index: int,
    *,
    norm: str = "l1",
    include: str | None = None,
    groups: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """How much nearer to the layer's `whole` each vector is than zero, ``(batch, out, in)``."""
    include = include or ("layer_norm" if case_name(case) in POST_NORMS else "residual")
    naive = naive_vectors(case, layer_index, include)
    sources = real_positions(case, record(case)[0][run_of(case, layer_index)], "self")[1]

    def length(vector: np.ndarray) -> float:
        return float(sum(abs(vector))) if norm == "l1" else sqrt(float(sum(vector**2)))

    def nearer(vector: np.ndarray, whole: np.ndarray) -> float:
        return max(0.0, length(whole) - length(whole - vector))

    return scored(naive, nearer, groups, normalize, sources)
