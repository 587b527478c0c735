"""Value Zeroing in loops, as the paper defines it: zero one value, run the whole layer again, compare each position.

The code shares nothing with the package. There are two twins. One zeroes rows of the value projection's output, for all
heads. The other computes the context of the attention by hand, and can leave out chosen query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.reference.case import Attention, Case


@dataclass(frozen=True)
class Run:
    """One call of a layer in the clean pass: its arguments, and the hidden states that it returned."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor

    def again(self) -> Tensor:
        """The hidden states of the same call, run again with the hooks that are registered now."""
        return hidden_states(self.layer(*self.args, **self.kwargs))


def hidden_states(output: Any) -> Tensor:
    """The hidden states in the output of a layer: the output, or the first entry of a tuple that has three axes.

    Before transformers 5, DistilBERT returns its weights first.
    """
    return output if isinstance(output, Tensor) else next(one for one in output if one.dim() == 3)


@torch.no_grad()
def record(case: Case, **kwargs: Any) -> tuple[list[Run], Any]:
    """All calls of the layers in a forward pass, in order, and the model's output."""
    runs: list[Run] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        runs.append(Run(layer, args, dict(kwargs), hidden_states(output)))

    if hasattr(case.model.config, "use_cache"):
        kwargs["use_cache"] = False  # a layer that runs again would find its own keys in the cache
    with ExitStack() as hooks:
        for layer in case.layers:
            hooks.enter_context(layer.register_forward_hook(keep, with_kwargs=True))
        output = case.model(**case.inputs, **kwargs)
    return runs, output


def run_of(case: Case, layer_index: int) -> int:
    """The number of the last run of a layer. For a layer that runs several times, this run counts."""
    runs, _ = record(case)
    return max(number for number, run in enumerate(runs) if run.layer is case.layers[layer_index])


@torch.no_grad()
def values_of(run: Run, site: Attention) -> Tensor:
    """The output in this run of the projection that holds the values, ``(batch, in, features)``."""
    seen: list[Tensor] = []
    with run.layer.get_submodule(site.value).register_forward_hook(lambda module, args, output: seen.append(output)):
        run.again()
    (values,) = seen
    return values


def site_of(case: Case, attention: str) -> Attention:
    """The "self" or the "cross" attention of the case's layers."""
    return case.family.attention if attention == "self" else case.family.cross


def real_positions(case: Case, run: Run, attention: str) -> tuple[np.ndarray, np.ndarray]:
    """Whether targets and sources are real (not padding), ``(batch, out)`` and ``(batch, in)``."""
    source_mask = case.family.mask if attention == "self" else case.family.source_mask
    targets = case.mask(case.family.mask, run.hidden.shape[1])
    sources = case.mask(source_mask, values_of(run, site_of(case, attention)).shape[1])
    return targets.numpy(), sources.numpy()


@torch.no_grad()
def rerun_with_zeroed_rows(run: Run, site: Attention, zeroed: np.ndarray) -> Tensor:
    """The layer's hidden states after the values of ``zeroed[b, j]`` are set to zero in all heads."""

    def zero(module: nn.Module, args: tuple[Any, ...], values: Tensor) -> Tensor:
        values = values.clone()
        for b, j in np.argwhere(zeroed):
            for head in range(site.value_heads):
                values[b, j, site.columns(head)] = 0.0
        return values

    with run.layer.get_submodule(site.value).register_forward_hook(zero):
        return run.again()


@torch.no_grad()
def rerun_with_zeroed_heads(
    run: Run, site: Attention, weights: Tensor, zeroed: np.ndarray, heads: Sequence[int]
) -> Tensor:
    """The same, with the values set to zero only in some query heads, and the context summed by hand."""
    values = values_of(run, site)

    def give_context(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        return (context_by_hand(args[0], weights, values, site, zeroed, heads),)

    with run.layer.get_submodule(site.output).register_forward_pre_hook(give_context):
        return run.again()


def context_by_hand(
    clean: Tensor, weights: Tensor, values: Tensor, site: Attention, zeroed: np.ndarray, heads: Sequence[int]
) -> Tensor:
    """The sum over sources of weight times value for each head, without the zeroed values of the chosen heads."""
    context = np.zeros(clean.shape)
    batch, _, out, sources = weights.shape
    for b in range(batch):
        for head in range(site.heads):
            head_weights = weights[b, head].double().numpy()
            head_values = values[b, :, site.columns(site.value_head(head))].double().numpy()
            for i in range(out):
                for j in range(sources):
                    if not (zeroed[b, j] and head in heads):
                        context[b, i, site.context(head)] += head_weights[i, j] * head_values[j]
    return torch.from_numpy(context).to(clean)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """One minus the cosine. Equal vectors give exactly zero, which rounding would not."""
    if np.array_equal(a, b):
        return 0.0
    return 1.0 - float(a @ b) / (sqrt(float(a @ a)) * sqrt(float(b @ b)))


def euclidean(a: np.ndarray, b: np.ndarray) -> float:
    return sqrt(float(((a - b) ** 2).sum()))


def l1(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum())


DISTANCES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"cosine": cosine, "euclidean": euclidean, "l1": l1}


def naive_value_zeroing(case: Case, layer_index: int, **options: Any) -> Tensor:
    """The map of one layer, ``(batch, out, in)`` in float64. See `value_zeroing_of_run` for the options."""
    return value_zeroing_of_run(case, run_of(case, layer_index), **options)


def naive_value_zeroing_maps(case: Case, **options: Any) -> list[Tensor]:
    """The maps of all runs of all layers, in order: the factors of a rollout."""
    runs, _ = record(case)
    return [value_zeroing_of_run(case, number, **options) for number in range(len(runs))]


@torch.no_grad()
def value_zeroing_of_run(
    case: Case,
    number: int,
    *,
    distance: str = "cosine",
    groups: Sequence[Sequence[int]] | Tensor | None = None,
    heads: Sequence[int] | None = None,
    normalize: bool = True,
    final_norm: nn.Module | None = None,
    attention: str = "self",
) -> Tensor:
    """The map of one run of a layer.

    Args:
        distance: "cosine", "euclidean" or "l1".
        groups: ``(1 or batch, in)`` integers. Sources with the same number are zeroed together and carry one score.
        heads: the query heads in which values are zeroed. None: all heads.
        normalize: whether to divide each row by its sum, in which a group counts once.
        final_norm: applied to both outputs before they are compared.
        attention: "self" or "cross".
    """
    runs, output = record(case, **({} if heads is None else {"output_attentions": True}))
    run = runs[number]
    site = site_of(case, attention)
    targets, sources = real_positions(case, run, attention)
    if groups is None:
        groups = [range(sources.shape[1])]
    groups = np.broadcast_to(np.array([list(row) for row in groups]), sources.shape)
    view = final_norm or nn.Identity()

    def rerun(zeroed: np.ndarray) -> np.ndarray:
        if heads is None:
            hidden = rerun_with_zeroed_rows(run, site, zeroed)
        else:
            hidden = rerun_with_zeroed_heads(run, site, output[site.weights][number], zeroed, heads)
        return view(hidden).double().numpy()

    clean = rerun(np.zeros_like(sources))

    result = np.zeros((len(sources), targets.shape[1], sources.shape[1]))
    totals = np.zeros(result.shape[:2])
    for group in np.unique(groups):
        zeroed = (groups == group) & sources
        changed = rerun(zeroed)
        for b in range(len(result)):
            for i in range(result.shape[1]):
                if targets[b, i] and zeroed[b].any():
                    score = DISTANCES[distance](clean[b, i], changed[b, i])
                    totals[b, i] += score
                    for j in np.flatnonzero(zeroed[b]):
                        result[b, i, j] = score
    if normalize:
        for b, i in np.argwhere(totals > 0):
            result[b, i] /= totals[b, i]
    return torch.from_numpy(result)
