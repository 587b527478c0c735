"""Words, spans and regions in place of tokens."""

from typing import Literal

import torch
from torch import Tensor

from captum_vz.functional.rows import widen


def pool_groups(
    scores: Tensor,
    groups: Tensor,
    reduce: Literal["mean", "max"] = "mean",
    shared: bool = True,
) -> Tensor:
    r"""Collapses a map of tokens to a map of groups of tokens: words, spans, regions of an image.

    .. math:: P_{gh} = \operatorname*{reduce}_{i \in g}\; c_{ih}, \qquad
        c_{ih} = \begin{cases} C_{ij} \text{ for any } j \in h & \text{shared} \\
        \sum_{j \in h} C_{ij} & \text{otherwise} \end{cases}

    after `Mohebbi et al. 2023 <https://aclanthology.org/2023.emnlp-main.513>`_, who pool the frames of a spoken word.

    Args:
        scores: A map `(batch, tokens, tokens)`, or one row for each example `(batch, tokens)`.
        groups: Integers `(1 or batch, tokens)`: tokens of the same number are one group, as in Captum's `feature_mask`.
        reduce: A group's row is the "mean" or the "max" of its tokens' rows, rows of padding (all zero) left out. (A
            single row is not pooled.)
        shared: True: the tokens of a group all carry the group's score (padding carries 0), as they do where a
            `feature_mask` zeroed them together, and it counts once. False: each has a score of its own, and they are
            added up.

    Returns:
        `(batch, groups, groups)`, or `(batch, groups)` for rows, in at least float32; groups in the order of their
        numbers, with zeros where an example lacks a group that another has. Rows sum to what they did over groups
        (`shared`) or over tokens (not `shared`), but not for "max".

    Raises:
        AssertionError: Shapes that do not fit, numbers that are not integers, another `reduce`, or `shared` scores that
            differ within a group.

    >>> import torch
    >>> words = torch.tensor([[0, 0, 1]])  # the first two tokens are one word
    >>> pool_groups(torch.tensor([[0.25, 0.25, 0.75]]), words)
    tensor([[0.2500, 0.7500]])
    >>> pool_groups(torch.tensor([[[0.2, 0.2, 0.6], [0.4, 0.2, 0.4], [0.0, 0.5, 0.5]]]), words, shared=False)
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]])
    """
    assert reduce in ("mean", "max"), f"reduce is {reduce!r}: pass 'mean' or 'max'."
    _check_shapes(scores, groups)
    names, member = groups.unique(return_inverse=True)
    columns = _collapse(widen(scores), member, len(names), shared)
    if scores.ndim == 2:
        return columns
    if reduce == "max":
        return _scatter(columns.mT, member, len(names), "amax").mT.contiguous()
    total = _scatter(columns.mT, member, len(names), "sum").mT
    rows = _scatter(columns.any(-1).to(columns), member, len(names), "sum")  # padding has no row to take the mean of
    return (total / rows.clamp_min(1)[..., None]).contiguous()


def _collapse(scores: Tensor, member: Tensor, count: int, shared: bool) -> Tensor:
    """One column for each group."""
    if not shared:
        return _scatter(scores, member, count, "sum")
    highest = _scatter(scores, member, count, "amax")
    carried = highest.gather(-1, (member if scores.ndim == 2 else member[:, None]).expand_as(scores))
    assert torch.all((scores == 0) | scores.isclose(carried)), (
        "The tokens of a group carry different scores. With shared=True they must all carry the group's; "
        "pass shared=False to add them up."
    )
    return highest


def _scatter(scores: Tensor, member: Tensor, count: int, reduce: str) -> Tensor:
    """Reduces the last axis, (..., tokens), to (..., groups); a group without tokens gets 0."""
    index = (member if scores.ndim == 2 else member[:, None]).expand_as(scores)
    return scores.new_zeros(*scores.shape[:-1], count).scatter_reduce(-1, index, scores, reduce, include_self=False)


def _check_shapes(scores: Tensor, groups: Tensor) -> None:
    assert scores.ndim == 2 or (scores.ndim == 3 and scores.shape[1] == scores.shape[2]), (
        f"Expected a map (batch, tokens, tokens) or rows (batch, tokens), got {tuple(scores.shape)}."
    )
    batch, tokens = scores.shape[0], scores.shape[-1]
    assert groups.ndim == 2 and groups.shape[0] in (1, batch) and groups.shape[1] == tokens, (
        f"groups is {tuple(groups.shape)}, but scores {tuple(scores.shape)} need (1 or {batch}, {tokens}): "
        "one group number for each token."
    )
    assert not (groups.is_floating_point() or groups.is_complex()), f"groups must be integers, got {groups.dtype}."
