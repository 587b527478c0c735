"""ALTI+ in loops: the vectors of each attention of an encoder and its decoder, then the rollout.

The code shares nothing with the package. It finds projections, residual connections and norms by their names.
"""

from __future__ import annotations

from functools import cache
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from tests.reference.case import Case, Family
from tests.reference.families import BART_ATTENTION, BART_CROSS, FAMILIES, SEQ2SEQ_SIZE, decoder_of, encoder_of
from tests.reference.naive import Run, real_positions, record
from tests.reference.norms import linear_part, seen, vectors_of_run


def bart(model: str) -> tuple[Family, Family]:
    """A model whose code is derived from BART's."""
    return (
        encoder_of(model, SEQ2SEQ_SIZE, "encoder.layers", BART_ATTENTION),
        decoder_of(model, SEQ2SEQ_SIZE, "decoder.layers", BART_ATTENTION, BART_CROSS),
    )


# The encoder and the decoder of each model.
ENCODER_DECODERS = {
    "bart": (FAMILIES["bart-encoder"], FAMILIES["bart-decoder"]),
    "marian": bart("MarianModel"),
    "mbart": bart("MBartModel"),
    "pegasus": bart("PegasusModel"),
    "t5": (FAMILIES["t5-encoder"], FAMILIES["t5-decoder"]),
    "whisper": (FAMILIES["whisper-encoder"], FAMILIES["whisper-decoder"]),
}
# Models whose layers apply a norm after the residual connection of each attention.
POST_NORM = ("bart", "marian")
SELF_NORM, CROSS_NORM = "self_attn_layer_norm", "encoder_attn_layer_norm"


@cache
def stacks(name: str) -> tuple[Case, Case]:
    """The encoder and the decoder of one model, with the same inputs."""
    of_encoder, of_decoder = ENCODER_DECODERS[name]
    decoder = of_decoder.case
    return Case(of_encoder, decoder.model, decoder.inputs), decoder


def naive_alti_plus(encoder: Case, decoder: Case, post_norm: bool, norm: str = "l1") -> list[Tensor]:
    """The rollout after each layer of the decoder, ``(batch, out, source + out)``."""
    rolled: np.ndarray | None = None
    for number in range(len(encoder.layers)):
        factor = self_map(encoder, number, post_norm, norm)
        rolled = factor if rolled is None else np.stack([a @ b for a, b in zip(factor, rolled, strict=True)])
    assert rolled is not None
    results: list[np.ndarray] = []
    for number in range(len(decoder.layers)):
        own, cross = self_map(decoder, number, post_norm, norm), cross_map(decoder, number, post_norm, norm)
        batch, out, _ = own.shape
        source = rolled.shape[1]
        result = np.zeros((batch, out, source + out))
        for b, i in np.ndindex(batch, out):
            for j in range(source):  # through the encoder
                result[b, i, :source] += cross[b, i, j] * rolled[b, j]
            for k in range(out):  # through the layer's own inputs
                before = results[-1][b, k] if results else np.eye(source + out)[source + k]
                result[b, i] += cross[b, i, source] * own[b, i, k] * before
        results.append(result)
    return [torch.from_numpy(result) for result in results]


@torch.no_grad()
def self_map(case: Case, number: int, post_norm: bool, norm: str) -> np.ndarray:
    """ALTI's map of a layer's self-attention. Rows sum to 1."""
    run = record(case)[0][number]
    naive = vectors_of_run(case, number, "residual")
    vectors, whole = naive.vectors, naive.whole
    if post_norm:
        given, whole = seen(run, SELF_NORM)
        vectors = through_norm(run, SELF_NORM, vectors, given)
    return contributions(vectors, whole, naive.real, norm)


@torch.no_grad()
def cross_map(case: Case, number: int, post_norm: bool, norm: str) -> np.ndarray:
    """The same for cross-attention, ``(batch, out, source + 1)``. The last column is the residual connection."""
    run = record(case)[0][number]
    naive = vectors_of_run(case, number, "attention", "cross")
    if post_norm:
        residual = seen(run, SELF_NORM)[1]
    else:
        layer_input = (run.args[0] if run.args else run.kwargs["hidden_states"]).double().numpy()
        residual = layer_input + seen(run, case.family.attention.output)[1]
    vectors, whole = np.concatenate([naive.vectors, residual[:, :, None]], axis=2), naive.whole + residual
    if post_norm:
        given, whole = seen(run, CROSS_NORM)
        vectors = through_norm(run, CROSS_NORM, vectors, given)
    return contributions(vectors, whole, real_positions(case, run, "cross")[0], norm)


def through_norm(run: Run, name: str, vectors: np.ndarray, given: np.ndarray) -> np.ndarray:
    result = np.zeros_like(vectors)
    for b, i, j in np.ndindex(vectors.shape[:3]):
        result[b, i, j] = linear_part(run.layer.get_submodule(name), vectors[b, i, j], given[b, i])
    return result


def contributions(vectors: np.ndarray, whole: np.ndarray, real: np.ndarray, norm: str) -> np.ndarray:
    def length(vector: np.ndarray) -> float:
        return float(sum(abs(vector))) if norm == "l1" else sqrt(float(sum(vector**2)))

    result = np.zeros(vectors.shape[:3])
    for b, i in np.argwhere(real):
        for j in range(vectors.shape[2]):
            result[b, i, j] = max(0.0, length(whole[b, i]) - length(whole[b, i] - vectors[b, i, j]))
        result[b, i] /= sum(result[b, i])
    return result
