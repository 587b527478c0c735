"""Grades for numbers that are read from the maps of all layers: rollouts, paths, neighbors, generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import add_residual, normalize_rows
from captum_vz.functional import rollout as multiply_maps
from captum_vz_lessons.check.verdict import Verdict, exercise, judge, judge_function

SWAPPED = "rows and columns are swapped. Row i belongs to output token i."
UNASKED = "the maps got a residual that the exercise does not ask for."
FORGOTTEN = "the residual connection is forgotten. Each map gets it before the product."
ENTRIES = "the entries are multiplied one by one. Use the matrix product, @."
ONE_WAY = "this is one direction only. Take the mean of both entries, (one, other) and (other, one)."
TOO_LATE = (
    "the rows begin one too late, at [m:]. The token at position m was predicted at position m - 1: take [m - 1 :]."
)


@exercise(
    "Give each map its residual first, if the exercise asks for one: `(map + identity) / 2`. Multiply the maps with"
    " `@`, the map of the last layer on the left."
)
def rollout(yours: Any, maps: Sequence[Tensor], *, residual: float | None = None, token: int | None = None) -> Verdict:
    """Grade a rollout, the product of the maps of all layers, or its row of the output token at position `token`.

    `maps` holds one map `(1, out, in)` or `(out, in)` for each layer, first layer first. `residual` is what each map
    gets before the product, see :func:`captum_vz.functional.add_residual`.

    >>> import torch
    >>> from captum_vz_lessons import check
    >>> maps = [torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])]
    >>> check.rollout(maps[0] @ maps[1], maps)
    Not yet. rollout: the factors are in the wrong order. The map of the last layer stands first: S_2 @ S_1 @ S_0.
    You go on with the package's answer. This exercise counts as open.
    """
    plain = list(_stacked(maps)[:, None])
    given = [add_residual(one, residual) for one in plain]
    right, eye = _product(given), torch.eye(plain[0].shape[-1]).double()
    order = "the factors are in the wrong order. The map of the last layer stands first: S_2 @ S_1 @ S_0."
    wrong: list[tuple[str, Tensor]] = [
        (order, _product(given[::-1])),
        (SWAPPED, right.mT),
        (ENTRIES, torch.stack(given).prod(0)),
        (ENTRIES, normalize_rows(torch.stack(given).prod(0))),
        ("this is the mean of the maps. A rollout is their product.", torch.stack(given).mean(0)),
        ("this is the sum of the maps. A rollout is their product.", torch.stack(given).sum(0)),
        ("this is the map of the last layer alone. Multiply the maps of all layers.", given[-1]),
        ("the last layer is missing in the product.", _product(given[:-1] or [given[-1].mT])),
        ("the first layer is missing in the product.", _product(given[1:] or [given[-1].mT])),
        ("rows and columns are swapped in each map.", _product([one.mT for one in given])),
    ]
    if residual is None:
        wrong.append((UNASKED, _product([add_residual(one, 0.5) for one in plain])))
    else:
        wrong += [
            (FORGOTTEN, _product(plain)),
            ("the residual is added to the product. Add it to each map.", add_residual(_product(plain), residual)),
            ("rows do not sum to 1: after the identity is added, divide by 2.", _product([s + eye for s in plain])),
            ("each map is halved, but the other half, the identity, is not added.", _product([s / 2 for s in plain])),
        ]
    rows = slice(None) if token is None else token
    return judge(yours, right[0, rows], [(name, one[0, rows]) for name, one in wrong])


def _product(maps: Sequence[Tensor]) -> Tensor:
    return multiply_maps(maps, None)[-1]


@exercise("In the map of layer l, take the entry [position after the layer, position before it]. Multiply the entries.")
def path_share(yours: Any, maps: Sequence[Tensor], path: Sequence[int], *, residual: float | None = None) -> Verdict:
    r"""Grade the share of one path through the layers, :math:`\prod_l S_l[t_{l+1}, t_l]`. A rollout sums up all paths.

    `path` holds its positions, from the input to the output: one more than there are layers.
    """
    plain = _stacked(maps)
    if len(path) != len(plain) + 1:
        raise ArgumentError(f"path has {len(path)} positions: pass {len(plain) + 1}, one more than there are maps.")
    given = add_residual(plain, residual)

    def steps(of: Tensor, order: Sequence[int] = path) -> Tensor:
        return torch.stack([one[after, before] for one, before, after in zip(of, order, order[1:], strict=False)])

    other = (UNASKED, steps(add_residual(plain, 0.5))) if residual is None else (FORGOTTEN, steps(plain))
    mistakes = [
        ("rows and columns are swapped: S[token after, token before].", steps(given.mT).prod()),
        ("the path begins at the input: the map of the first layer takes its first step.", steps(given.flip(0)).prod()),
        ("the path runs backwards. It begins at the input token.", steps(given, list(path)[::-1]).prod()),
        ("this is the sum of the steps. A path's share is their product.", steps(given).sum()),
        ("this is the mean of the steps. A path's share is their product.", steps(given).mean()),
        ("the first step is missing, from the input to the first layer's output.", steps(given)[1:].prod()),
        ("the last step is missing.", steps(given)[:-1].prod()),
        ("this is the whole rollout. Take the one path only.", _product(given[:, None])[0, path[-1], path[0]]),
        (other[0], other[1].prod()),
    ]
    return judge(yours, steps(given).prod(), mistakes)


@exercise(
    "The neighbors of token i stand at `[:, i, i - 1]` and `[:, i, i + 1]`. Add both up for each word, and take the"
    " mean over the words."
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
    mistakes = [
        ("the share of the word itself is included. Neighbors are at a distance of 1.", shares(distance.abs() <= 1)),
        ("only the neighbor before the word is counted.", shares(distance == 1)),
        ("only the neighbor after the word is counted.", shares(distance == -1)),
        ("this is the mean of the two neighbors. Add them up.", right / 2),
        ("all tokens are counted. Take the mean over the words.", shares(near, rows=slice(None))),
        ("this is the sum over the words. Take their mean.", right * len(rows)),
        ("divide by the number of words, and not by that of all tokens.", right * len(rows) / len(place)),
        ("this is the larger of the two neighbors. Add them up.", (stacked * near).amax(-1)[:, rows].mean(-1)),
        ("rows and columns are swapped. A row holds what an output token draws on.", shares(near, stacked.mT)),
    ]
    return judge(yours, right, mistakes)


@exercise("The tokens draw on each other at `[:, one, other]` and `[:, other, one]`. Take the mean of both.")
def pair_share(yours: Any, maps: Sequence[Tensor], one: int, other: int) -> Verdict:
    """Grade how much two tokens draw on each other: the mean of the two entries, one number for each layer.

    The answer may be a function of maps `(layers, out, in)`, `one` and `other`.
    """

    def right(maps: Tensor, one: int, other: int) -> Tensor:
        return (maps[:, one, other] + maps[:, other, one]) / 2

    stacked = _stacked(maps)
    there, back = stacked[:, one, other], stacked[:, other, one]
    mistakes = [
        (ONE_WAY, there),
        (ONE_WAY, back),
        ("this is the sum. Take the mean.", there + back),
        (
            "these are the shares that the tokens give to themselves.",
            (stacked[:, one, one] + stacked[:, other, other]) / 2,
        ),
        ("this is the product. Take the mean.", there * back),
        ("this is the larger of the two entries. Take their mean.", torch.maximum(there, back)),
    ]
    if callable(yours):
        return judge_function(yours, right, [(stacked, one, other)], mistakes)
    return judge(yours, right(stacked, one, other), mistakes)


@exercise(
    "Stack the maps along the last axis. The first generated token is predicted at the last token of the prompt. "
    "Which row is that? Which columns are tokens of the prompt?"
)
def generation_slice(yours: Any, maps: Sequence[Tensor], prompt_length: int) -> Verdict:
    """Grade the scores of a generated text, `(n, m, layers)`, cut from the maps of one pass.

    The pass reads the m tokens of the prompt and all generated tokens except the last. The token at position p + 1 is
    predicted at position p, so the row of the first generated token is m - 1.
    """
    m, whole = prompt_length, _stacked(maps).movedim(0, -1)
    if not 0 < m <= len(whole):
        raise ArgumentError(f"prompt_length is {m}: pass a number from 1 to {len(whole)}, the rows of the maps.")
    right = whole[m - 1 :, :m]
    swapped = "rows and columns are swapped. The first axis counts generated tokens."
    mistakes = [
        (TOO_LATE, whole[m:, :m]),
        (TOO_LATE, whole[m:, :m].movedim(-1, 0)),
        ("the rows begin one too early. The first generated token is predicted at position m - 1.", whole[m - 2 :, :m]),
        ("the last row is missing. The last position of the pass predicts the last token.", whole[m - 1 : -1, :m]),
        ("all columns are kept. The sources are the m tokens of the prompt: take [:m].", whole[m - 1 :]),
        ("a column is missing. The prompt has m tokens: take [:m].", whole[m - 1 :, : m - 1]),
        ("these are the rows of the prompt. The generated tokens are predicted at [m - 1 :].", whole[:m, :m]),
        ("layers stand first. The shape is (n, m, layers): stack the maps along the last axis.", right.movedim(-1, 0)),
        (swapped, right.transpose(0, 1)),
        (swapped, whole[:m, m - 1 :]),
    ]
    return judge(yours, right, mistakes)


@exercise("`scores[step, :, layer]` is the row. Add up its entries where the mask hides.")
def hidden_share(yours: Any, scores: Tensor, hidden: Any, *, step: int = 0, layer: int = -1) -> Verdict:
    """Grade the share of a generated token's row, `scores[step, :, layer]`, that a mask (bool) hides."""
    off = torch.as_tensor(hidden)
    row = scores[step, :, layer]
    counts = "these are numbers of tokens. Add up their scores."
    mistakes = [
        ("this is the share that the mask shows.", row[~off].sum()),
        (counts, off.double().mean()),
        (counts, off.sum()),
        ("this is the mean of the hidden scores. Add them up.", row[off].mean()),
        *((f"this is layer {one}.", scores[step, off, one].sum()) for one in range(scores.shape[2])),
        *((f"this is the row of generated token {one}.", scores[one, off, layer].sum()) for one in range(len(scores))),
    ]
    return judge(yours, row[off].sum(), mistakes)


def _stacked(maps: Sequence[Tensor]) -> Tensor:
    """The maps of one example, `(layers, out, in)` in float64."""
    steps = [torch.as_tensor(one).double() for one in maps]
    if not steps or any(one.dim() not in (2, 3) or (one.dim() == 3 and len(one) != 1) for one in steps):
        raise ArgumentError("maps is not a list of maps of one example: pass one map (1, out, in) for each layer.")
    return torch.stack([one.reshape(one.shape[-2:]) for one in steps])
