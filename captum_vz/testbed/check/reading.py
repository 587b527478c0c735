"""Grades for numbers that are read from maps: shares of neighbors, of a pair, of a path through the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.testbed.check.verdict import Verdict, judge


def neighbor_share(yours: Any, maps: Sequence[Tensor], words: Sequence[int]) -> Verdict:
    """Grade the mean share that words give to their two neighbors, one number for each layer.

    It recognizes a share that includes the word itself, only one of the neighbors, the mean over all tokens in place of
    the words, a mean over both neighbors in place of their sum, and columns in place of rows.

    Args:
        yours: One number for each layer.
        maps: One map `(1, out, in)` or `(out, in)` for each layer.
        words: The positions of the output tokens that count. Their neighbors may be any tokens.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> maps = [torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.2, 0.3], [0.0, 0.4, 0.6]])]
    >>> check.neighbor_share([0.8], maps, words=[1]).passed
    True
    >>> check.neighbor_share([1.0], maps, words=[1])
    Not yet. neighbor_share: the share of the word itself is included. Neighbors are at a distance of 1.
    """
    stacked = _stacked(maps)
    place = torch.arange(stacked.shape[-1])
    distance = place[:, None] - place  # out - in
    rows = list(words)

    def shares(where: Tensor, of: Tensor = stacked, rows: Any = rows) -> Tensor:
        return (of * where).sum(-1)[:, rows].mean(-1)

    near = distance.abs() == 1
    mistakes = [
        ("the share of the word itself is included. Neighbors are at a distance of 1.", shares(distance.abs() <= 1)),
        ("only the neighbor before the word is counted.", shares(distance == 1)),
        ("only the neighbor after the word is counted.", shares(distance == -1)),
        ("this is the mean of the two neighbors. Add them up.", shares(near) / 2),
        ("all tokens are counted. Take the mean over the words.", shares(near, rows=slice(None))),
        ("this is the sum over the words. Take their mean.", shares(near) * len(rows)),
        ("divide by the number of words, and not by that of all tokens.", shares(near) * len(rows) / len(place)),
        ("this is the larger of the two neighbors. Add them up.", (stacked * near).amax(-1)[:, rows].mean(-1)),
        ("rows and columns are swapped. A row holds what an output token draws on.", shares(near, stacked.mT)),
    ]
    return judge("neighbor_share", yours, shares(near), mistakes)


def pair_share(yours: Any, maps: Sequence[Tensor], one: int, other: int) -> Verdict:
    """Grade how much two tokens draw on each other: the mean of the two entries, one number for each layer.

    It recognizes a single direction, the sum of both, and the shares that the tokens give to themselves.

    Args:
        yours: One number for each layer.
        maps: One map `(1, out, in)` or `(out, in)` for each layer.
        one: The position of a token.
        other: The position of the other token.
    """
    stacked = _stacked(maps)
    there, back = stacked[:, one, other], stacked[:, other, one]
    own = (stacked[:, one, one] + stacked[:, other, other]) / 2
    mistakes = [
        ("this is one direction only. Take the mean of both entries, (one, other) and (other, one).", there),
        ("this is one direction only. Take the mean of both entries, (one, other) and (other, one).", back),
        ("this is the sum. Take the mean.", there + back),
        ("these are the shares that the tokens give to themselves.", own),
        ("this is the product. Take the mean.", there * back),
        ("this is the larger of the two entries. Take their mean.", torch.maximum(there, back)),
    ]
    return judge("pair_share", yours, (there + back) / 2, mistakes)


def path_share(yours: Any, maps: Sequence[Tensor], path: Sequence[int], *, residual: float | None = None) -> Verdict:
    r"""Grade the share of one path through the layers, the product of its entries.

    .. math:: \prod_l S_l[t_{l+1}, t_l]

    The rollout is the sum of such products over all paths. It recognizes a path in the wrong direction, a sum in place
    of a product, and a forgotten residual.

    Args:
        yours: A number.
        maps: One map `(1, out, in)` or `(out, in)` for each layer, first layer first.
        path: The positions, from the input to the output: one more than there are layers.
        residual: 0.5 if each map gets half a residual first.
    """
    stacked = _stacked(maps)
    if len(path) != len(stacked) + 1:
        raise ArgumentError(f"path has {len(path)} positions: pass {len(stacked) + 1}, one more than there are maps.")
    eye = torch.eye(stacked.shape[-1], dtype=torch.float64)
    given = stacked if residual is None else (1 - residual) * stacked + residual * eye

    def steps(of: Tensor, order: Sequence[int] = path) -> Tensor:
        return torch.stack([of[layer, order[layer + 1], order[layer]] for layer in range(len(of))])

    mistakes = [
        ("rows and columns are swapped: S[token after, token before].", steps(given.mT).prod()),
        ("the path begins at the input: the map of the first layer takes its first step.", steps(given.flip(0)).prod()),
        ("the path runs backwards. It begins at the input token.", steps(given, list(path)[::-1]).prod()),
        ("this is the sum of the steps. A path's share is their product.", steps(given).sum()),
        ("this is the mean of the steps. A path's share is their product.", steps(given).mean()),
        ("the first step is missing, from the input to the first layer's output.", steps(given)[1:].prod()),
        ("the last step is missing.", steps(given)[:-1].prod()),
        (
            "this is the whole rollout. Take the one path only.",
            torch.linalg.multi_dot([*given.flip(0), eye])[path[-1], path[0]],
        ),
    ]
    if residual is None:
        mixed = (stacked + eye) / 2
        mistakes.append(("the maps got a residual that the exercise does not ask for.", steps(mixed).prod()))
    else:
        mistakes.append(("the residual is forgotten. Each map gets it first.", steps(stacked).prod()))
    return judge("path_share", yours, steps(given).prod(), mistakes)


def _stacked(maps: Sequence[Tensor]) -> Tensor:
    """The maps of one example, `(layers, out, in)` in float64."""
    if not len(maps) or any(one.dim() not in (2, 3) or (one.dim() == 3 and len(one) != 1) for one in maps):
        raise ArgumentError("maps is not a list of maps of one example: pass one map (1, out, in) for each layer.")
    return torch.stack([one.reshape(one.shape[-2:]).double() for one in maps])
