"""Maps of words, spans and regions, from maps of tokens."""

from typing import Literal

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional.rows import widen


def pool_groups(
    scores: Tensor,
    groups: Tensor,
    reduce: Literal["mean", "max"] = "mean",
    shared: bool = True,
) -> Tensor:
    r"""Reduces a map of tokens to a map of groups of tokens: words, spans, regions of an image.

    .. math:: P_{gh} = \operatorname*{reduce}_{i \in g}\; c_{ih}, \qquad
        c_{ih} = \begin{cases} C_{ij} \text{ for any } j \in h & \text{shared} \\
        \sum_{j \in h} C_{ij} & \text{otherwise} \end{cases}

    This follows `Mohebbi et al. 2023 <https://aclanthology.org/2023.emnlp-main.513>`_, who pool the frames of a spoken
    word.

    Args:
        scores: A map `(batch, tokens, tokens)`, or one row for each example, `(batch, tokens)`.
        groups: Integers `(1 or batch, tokens)`. Tokens with the same number are one group, as in Captum's
            `feature_mask`.
        reduce: A group's row is the "mean" or the "max" of its tokens' rows. Rows of padding (all zero) are left out.
            Single rows `(batch, tokens)` are not pooled.
        shared: True: all tokens of a group carry the group's score, as after zeroing them together with a
            `feature_mask`, and this score counts once. Padding carries 0. False: each token has a score of its own, and
            the scores of a group are added up.

    Returns:
        `(batch, groups, groups)`, or `(batch, groups)` for rows, in at least float32. Groups are sorted by number. The
        rows and columns of a group that an example lacks are zero. If each row of `scores` sums to 1
        (over groups if `shared`, over tokens otherwise), each row of the result does too, except for "max".

    Raises:
        ArgumentError: Shapes do not fit, `groups` are not integers, `reduce` is unknown, or `shared` scores differ
            within a group.

    >>> import torch
    >>> words = torch.tensor([[0, 0, 1]])  # the first two tokens are one word
    >>> pool_groups(torch.tensor([[0.25, 0.25, 0.75]]), words)
    tensor([[0.2500, 0.7500]])
    >>> pool_groups(torch.tensor([[[0.2, 0.2, 0.6], [0.4, 0.2, 0.4], [0.0, 0.5, 0.5]]]), words, shared=False)
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]])
    """
    if reduce not in ("mean", "max"):
        raise ArgumentError(f"reduce is {reduce!r}: pass 'mean' or 'max'.")
    _check_shapes(scores, groups)
    names, member = groups.unique(return_inverse=True)
    columns = _collapse(widen(scores), member, len(names), shared)
    if scores.ndim == 2:
        return columns
    if reduce == "max":
        return _scatter(columns.mT, member, len(names), "amax").mT.contiguous()
    total = _scatter(columns.mT, member, len(names), "sum").mT
    rows = _scatter(columns.any(-1).to(columns), member, len(names), "sum")  # without padding
    return (total / rows.clamp_min(1)[..., None]).contiguous()


def _collapse(scores: Tensor, member: Tensor, count: int, shared: bool) -> Tensor:
    """One column for each group."""
    if not shared:
        return _scatter(scores, member, count, "sum")
    highest = _scatter(scores, member, count, "amax")
    carried = highest.gather(-1, (member if scores.ndim == 2 else member[:, None]).expand_as(scores))
    if not torch.all((scores == 0) | scores.isclose(carried)):
        raise ArgumentError(
            "The tokens of a group carry different scores. With shared=True all of them must carry the group's score; "
            "pass shared=False to add them up."
        )
    return highest


def _scatter(scores: Tensor, member: Tensor, count: int, reduce: str) -> Tensor:
    """Reduces the last axis, (..., tokens), to (..., groups); a group without tokens gets 0."""
    index = (member if scores.ndim == 2 else member[:, None]).expand_as(scores)
    return scores.new_zeros(*scores.shape[:-1], count).scatter_reduce(-1, index, scores, reduce, include_self=False)


def _check_shapes(scores: Tensor, groups: Tensor) -> None:
    if scores.ndim != 2 and (scores.ndim != 3 or scores.shape[1] != scores.shape[2]):
        raise ArgumentError(
            f"Expected a map (batch, tokens, tokens) or rows (batch, tokens), got {tuple(scores.shape)}."
        )
    batch, tokens = scores.shape[0], scores.shape[-1]
    if groups.ndim != 2 or groups.shape[0] not in (1, batch) or groups.shape[1] != tokens:
        raise ArgumentError(
            f"groups is {tuple(groups.shape)}, but scores {tuple(scores.shape)} need (1 or {batch}, {tokens}): "
            "one group number for each token."
        )
    if groups.is_floating_point() or groups.is_complex():
        raise ArgumentError(f"groups must be integers, got {groups.dtype}.")
