"""Scores of the tokens of several inputs, with one tensor for each input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz.attr._call.arguments import Inputs
from captum_vz.errors import ArgumentError


def by_input(scores: Sequence[Tensor], inputs: Inputs, run: int | None = None, stacks: Sequence[int] = ()) -> list[Any]:
    """Scores in the form of Captum's input methods: a tuple with one tensor for each input, if `inputs` is a tuple.

    The input that is as long as the scores has all of them. The scores of other inputs are 0. Masks, and inputs with
    one number for each example, own no scores.

    Args:
        scores: Results `(batch, ..., in)` of the same sources.
        inputs: The inputs of `attribute`.
        run: The argument `run` of `attribute`. With it, inputs have to be in the order in which the layers run on them.
        stacks: The numbers of sources of several stacks, if these follow each other. Empty: there is one stack.

    Returns:
        The scores as they are, unless `inputs` is a tuple. Otherwise, each is a tuple.

    Raises:
        ArgumentError: The shapes of the inputs do not show which of them the tokens come from.
    """
    if not isinstance(inputs, tuple):
        return list(scores)
    if len(inputs) == 1:
        return [(one,) for one in scores]
    counts = list(stacks) or [scores[0].shape[-1]]
    texts = [k for k, x in enumerate(inputs) if not _has_no_tokens(x, counts)]
    owners = texts * len(counts) if len(texts) == 1 else [_owner(inputs, texts, count, run) for count in counts]

    def share(one: Tensor, k: int) -> Tensor:
        own = [part for part, owner in zip(one.split(counts, -1), owners, strict=True) if owner == k]
        return torch.cat(own, -1) if own else one.new_zeros(*one.shape[:-1], _tokens(inputs[k]) or 0)

    return [tuple(share(one, k) for k in range(len(inputs))) for one in scores]


def _owner(inputs: tuple[Tensor, ...], texts: list[int], count: int, run: int | None) -> int:
    """The number of the input that `count` tokens come from."""
    lengths = {k: _tokens(inputs[k]) for k in texts}
    known = [] if None in lengths.values() else [k for k in texts if lengths[k] == count]
    chosen = known if run is None else [k for k in known if k in (texts[run : run + 1] or texts[run:])]
    if len(chosen) != 1:
        raise ArgumentError(
            f"inputs holds {len(inputs)} tensors, and their shapes do not show which of them the {count} tokens come "
            "from. Pass the inputs as a mapping, which returns one tensor for all tokens."
        )
    return chosen[0]


def _tokens(x: Tensor) -> int | None:
    """The number of tokens of ids or vectors. None: it is not known, as for an image."""
    return x.shape[1] if x.dim() == (3 if x.is_floating_point() else 2) else None


def _has_no_tokens(x: Tensor, counts: Sequence[int]) -> bool:
    """Whether an input is a mask, or one number for each example. A mask `(batch, 1, out, in)` is added to scores."""
    if x.dim() == 4 and x.is_floating_point():
        return x.shape[1] == 1 and x.shape[-1] in counts
    may_be_mask = x.dim() == 2 or not x.is_floating_point()
    return x.dim() < 2 or (may_be_mask and bool(((x == 0) | (x == 1)).all()))
