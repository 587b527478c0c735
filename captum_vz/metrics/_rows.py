"""Rows of scores, the input of all metrics: one row for each example, with the tokens that count."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError


def scores_and_tokens(scores: Tensor, keep: Tensor | None, name: str = "scores") -> tuple[Tensor, Tensor]:
    """Scores `(batch, tokens)` in float64 on the CPU, and which tokens count, `(batch, tokens)`; None: all."""
    if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.numel():
        raise ArgumentError(f"{name} is {describe(scores)}: pass a tensor (batch, tokens), one row for each example.")
    if keep is None:
        return scores.detach().double().cpu(), torch.ones(scores.shape, dtype=torch.bool)
    return scores.detach().double().cpu(), flags(keep, scores.shape, "keep")


def scores_of_ids(scores: Tensor, content: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the tokens of sentences with this content, `(batch, tokens)`, as :func:`scores_and_tokens`."""
    if not isinstance(scores, Tensor) or scores.shape != content.shape:
        raise ArgumentError(
            f"scores is {describe(scores)}, but the ids are {tuple(content.shape)}: pass one score for each token."
        )
    return scores_and_tokens(scores, content)


def flags(mask: Tensor, shape: torch.Size, name: str) -> Tensor:
    """A mask `(1 or batch, tokens)` of booleans or of 0 and 1, as booleans of the whole shape on the CPU."""
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[0] in (1, shape[0]) and mask.shape[1] == shape[1]
    if not fits or not ((mask == 0) | (mask == 1)).all():
        raise ArgumentError(
            f"{name} is {describe(mask)}: pass booleans (or 0 and 1) of shape {tuple(shape)}, one for each score."
        )
    return mask.detach().bool().cpu().expand(shape)


def undefined(scores: Tensor, keep: Tensor) -> Tensor:
    """Whether a row has no order, `(batch,)`: no score counts, all scores are equal, or a score is NaN."""
    lowest = scores.masked_fill(~keep, torch.inf).amin(-1)
    highest = scores.masked_fill(~keep, -torch.inf).amax(-1)
    return (scores.isnan() & keep).any(-1) | ~(lowest < highest)


def without_order(scores: Tensor, keep: Tensor) -> Tensor:
    """Whether a row has no order, as in :func:`undefined`, `(batch,)`. A single token is in order."""
    return (undefined(scores, keep) & (keep.sum(-1) != 1)) | (scores.isnan() & keep).any(-1)


def describe(value: object) -> str:
    """Shape and type of an argument, for an error."""
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
