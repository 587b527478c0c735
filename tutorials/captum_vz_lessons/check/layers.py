"""Grades for numbers that are read from the maps of all layers: rollouts, paths, neighbors, pairs, products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from captum_vz.functional import add_residual, deciding_layer, normalize_rows
from captum_vz_lessons.check.verdict import Verdict, exercise, judge, judge_function


@exercise(
    "Give each map its residual first, if the exercise asks for one: `(map + identity) / 2`. Multiply the maps with"
    " `@`, the map of the last layer on the left."
)
def rollout(yours: Any, maps: Sequence[Tensor], *, residual: float | None = None, token: int | None = None) -> Verdict:
    """Grade a rollout, the product of the maps of all layers, or its row of the output token at position `token`.

    `maps` holds a map `(1, out, in)` or `(out, in)` for each layer, first layer first. `residual` is what each map gets
    before the product, see :func:`captum_vz.functional.add_residual`.
    """
    plain = _stacked(maps)
    given, eye = add_residual(plain, residual), torch.eye(plain.shape[-1], dtype=plain.dtype)
    right = _product(given)
    mistakes = {
        "the factors are in the wrong order. The map of the last layer comes first: S_2 @ S_1 @ S_0.": (
            _product(given.flip(0))
        ),
        "rows and columns are swapped. Row i belongs to output token i.": right.mT,
        "the entries are multiplied one by one. Use the matrix product, @.": given.prod(0),
        "the entries are multiplied one by one, and rows divided. Use @.": normalize_rows(given.prod(0)),
        "this is the mean of the maps. A rollout is their product.": given.mean(0),
        "this is the sum of the maps. A rollout is their product.": given.sum(0),
        "this is the map of the last layer alone. Multiply the maps of all layers.": given[-1],
        "the last layer is missing in the product.": _product(given[:-1]),
        "the first layer is missing in the product.": _product(given[1:]),
        "rows and columns are swapped in each map.": _product(given.mT),
        "the maps got a residual that the exercise does not ask for.": _product(add_residual(plain, 0.5)),
        "the residual connection is forgotten. Each map gets it before the product.": _product(plain),
        "the residual is added to the product. Add it to each map.": add_residual(_product(plain)[None], residual)[0],
        "rows do not sum to 1: after the identity is added, divide by 2.": _product(plain + eye),
        "each map is halved, but the other half, the identity, is not added.": _product(plain / 2),
    }
    rows = slice(None) if token is None else token
    return judge(yours, right[rows], {name: one[rows] for name, one in mistakes.items()})


def _product(maps: Tensor) -> Tensor:
    return reduce(lambda joined, one: one @ joined, maps)


@exercise("In the map of layer l, take the entry [position after the layer, position before it]. Multiply the entries.")
def path_share(yours: Any, maps: Sequence[Tensor], path: Sequence[int]) -> Verdict:
    r"""Grade the share of one path through the layers, :math:`\prod_l S_l[t_{l+1}, t_l]`. A rollout sums up all paths.

    `path` holds its positions, from the input to the output: one more than there are layers.
    """
    given = _stacked(maps)

    def steps(of: Tensor, order: Sequence[int] = path) -> Tensor:
        return of[torch.arange(len(of)), list(order[1:]), list(order[:-1])]

    entries = steps(given)
    mistakes = {
        "rows and columns are swapped: S[token after, token before].": steps(given.mT).prod(),
        "the path begins at the input: the map of the first layer takes its first step.": steps(given.flip(0)).prod(),
        "the path runs backwards. It begins at the input token.": steps(given, path[::-1]).prod(),
        "this is the sum of the steps. A path's share is their product.": entries.sum(),
        "this is the mean of the steps. A path's share is their product.": entries.mean(),
        "the first step is missing, from the input to the first layer's output.": entries[1:].prod(),
        "the last step is missing.": entries[:-1].prod(),
        "this is the whole rollout. Take the one path only.": _product(given)[path[-1], path[0]],
        "the maps got a residual that the exercise does not ask for.": steps(add_residual(given, 0.5)).prod(),
    }
    return judge(yours, entries.prod(), mistakes)


@exercise(
    "The neighbors of token i are at `[:, i, i - 1]` and `[:, i, i + 1]`. Add both up for each word, and take the mean"
    " over the words."
)
def neighbor_share(yours: Any, maps: Sequence[Tensor], words: Sequence[int]) -> Verdict:
    """Grade the mean share that the tokens at `words` give to both neighbors, one number for each layer."""
    stacked, rows = _stacked(maps), list(words)
    place = torch.arange(stacked.shape[-1])
    distance = place[:, None] - place  # out - in
    near = distance.abs() == 1

    def shares(where: Tensor, of: Tensor = stacked, rows: Any = rows) -> Tensor:
        return (of * where).sum(-1)[:, rows].mean(-1)

    right = shares(near)
    mistakes = {
        "the share of the word itself is included. Neighbors are at a distance of 1.": shares(distance.abs() <= 1),
        "only the neighbor before the word is counted.": shares(distance == 1),
        "only the neighbor after the word is counted.": shares(distance == -1),
        "this is the mean of the two neighbors. Add them up.": right / 2,
        "all tokens are counted. Take the mean over the words.": shares(near, rows=slice(None)),
        "this is the sum over the words. Take their mean.": right * len(rows),
        "divide by the number of words, and not by that of all tokens.": right * len(rows) / len(place),
        "this is the larger of the two neighbors. Add them up.": (stacked * near).amax(-1)[:, rows].mean(-1),
        "rows and columns are swapped. A row holds what an output token draws on.": shares(near, stacked.mT),
    }
    return judge(yours, right, mistakes)


@exercise("The tokens draw on each other at `[:, one, other]` and `[:, other, one]`. Take the mean of both.")
def pair_share(yours: Callable[[Tensor, int, int], Any], maps: Sequence[Tensor], one: int, other: int) -> Verdict:
    """Grade a function of maps `(layers, out, in)`, `one` and `other`: how much two tokens draw on each other.

    This is the mean of the two entries, one number for each layer.
    """

    def of(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, int, int], Tensor]:
        return lambda maps, one, other: join(maps[:, one, other], maps[:, other, one])

    direction = "this is one direction only. Take the mean of both entries, (one, other) and (other, one)."
    mistakes = {
        direction: (of(lambda there, back: there), of(lambda there, back: back)),
        "this is the sum. Take the mean.": of(torch.add),
        "this is the product. Take the mean.": of(torch.mul),
        "this is the larger of the two entries. Take their mean.": of(torch.maximum),
        "these are the shares that the tokens give to themselves.": (
            lambda maps, one, other: (maps[:, one, one] + maps[:, other, other]) / 2
        ),
    }
    right = of(lambda there, back: (there + back) / 2)
    return judge_function(yours, right, [(_stacked(maps), one, other)], mistakes)


@exercise(
    "Begin with `relevance.clamp_min(0)`. Set the first entry and the entry of the explained token to 0, and divide by"
    " the sum. Then take `rows @ relevance`."
)
def layer_products(yours: Any, rows: Tensor, relevance: Tensor) -> Verdict:
    """Grade how far the last token's row in each layer agrees with what the decision rests on, `(layers,)`.

    `rows` is `(layers, tokens)`, `relevance` `(tokens,)`, see :func:`captum_vz.functional.deciding_layer`.
    """
    rows, right = rows.double(), deciding_layer(rows.double(), relevance)[1]

    def products(amounts: Tensor, *apart: int) -> Tensor:
        amounts = amounts.double().clone()
        amounts[list(apart)] = 0
        return rows @ (amounts / amounts.sum())

    positive = relevance.clamp_min(0)
    mistakes = {
        "the first token counts. Set its relevance to 0.": products(positive, -1),
        "the explained token counts. Set its relevance to 0.": products(positive, 0),
        "the first and the explained token count. Set their relevance to 0.": products(positive),
        "negative relevances count. Keep the positive ones only.": products(relevance, 0, -1),
        "negative relevances count with their size. Keep the positive ones only.": products(relevance.abs(), 0, -1),
        "divide the relevances by their sum.": right * float(positive[1:-1].sum()),
        "this is the share of one token. Add up over all tokens.": rows[:, positive[1:-1].argmax() + 1],
    }
    return judge(yours, right, mistakes)


def _stacked(maps: Sequence[Tensor]) -> Tensor:
    """The maps of one example, `(layers, out, in)` in float64."""
    return torch.stack([torch.as_tensor(one).double().reshape(one.shape[-2:]) for one in maps])
