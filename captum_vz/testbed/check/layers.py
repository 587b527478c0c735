"""Grades for numbers that are read from maps: a rollout, rows of generated text, shares of neighbors and paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import Residual, add_residual, normalize_rows
from captum_vz.functional import rollout as multiply_maps
from captum_vz.testbed.check.verdict import Verdict, judge, judge_function

TOO_LATE = (
    "the rows begin one too late, at [m:]. The token at position m was predicted at position m - 1: take [m - 1 :]."
)


def rollout(
    yours: Any, maps: Sequence[Tensor], *, residual: Residual = None, token: int | None = None, hint: bool = False
) -> Verdict:
    """Grade a rollout, the product of the maps of all layers.

    It recognizes factors in the wrong order, a forgotten residual connection, a residual that was not asked for, a
    product of entries in place of matrices, a sum or mean of the maps, swapped rows and columns, and the map of the
    last layer alone.

    Args:
        yours: The rollout, `(out, in)` or `(1, out, in)`. Its row, `(in,)`, if `token` is given.
        maps: One map `(1, out, in)` or `(out, in)` for each layer, first layer first.
        residual: What each map gets before the product, see :func:`captum_vz.functional.add_residual`.
        token: The position of the output token whose row is graded. None: the whole rollout.
        hint: Whether a wrong answer gets a second hint.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> maps = [torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])]
    >>> check.rollout(maps[1] @ maps[0], maps).passed
    True
    >>> check.rollout(maps[0] @ maps[1], maps)
    Not yet. rollout: the factors are in the wrong order. The map of the last layer stands first: S_2 @ S_1 @ S_0.
    You go on with the package's answer. This exercise counts as open.
    """
    steps = [torch.as_tensor(one).double() for one in maps]
    steps = [one[None] if one.dim() == 2 else one for one in steps]
    if not steps or any(one.dim() != 3 or len(one) != 1 for one in steps):
        raise ArgumentError("maps is not a list of maps of one example: pass one map (1, out, in) for each layer.")
    given = [add_residual(one, residual) for one in steps]

    def product(some: Sequence[Tensor], how: Residual = None) -> Tensor:
        return multiply_maps(some, how)[-1]

    wrong: list[tuple[str, Tensor]] = [
        (
            "the factors are in the wrong order. The map of the last layer stands first: S_2 @ S_1 @ S_0.",
            product(given[::-1]),
        ),
        ("rows and columns are swapped. Row i belongs to output token i.", product(given).mT),
        ("the entries are multiplied one by one. Use the matrix product, @.", torch.stack(given).prod(0)),
        (
            "the entries are multiplied one by one. Use the matrix product, @.",
            normalize_rows(torch.stack(given).prod(0)),
        ),
        ("this is the mean of the maps. A rollout is their product.", torch.stack(given).mean(0)),
        ("this is the sum of the maps. A rollout is their product.", torch.stack(given).sum(0)),
        ("this is the map of the last layer alone. Multiply the maps of all layers.", given[-1]),
        ("the last layer is missing in the product.", product(given[:-1]) if len(given) > 1 else given[-1].mT),
        ("the first layer is missing in the product.", product(given[1:]) if len(given) > 1 else given[-1].mT),
        ("rows and columns are swapped in each map.", product([one.mT for one in given])),
    ]
    if residual is None:
        wrong.append(("the maps got a residual that the exercise does not ask for.", product(steps, 0.5)))
    else:
        wrong += [
            ("the residual connection is forgotten. Each map gets it before the product.", product(steps)),
            ("the residual is added to the product. Add it to each map.", add_residual(product(steps), residual)),
        ]
        eye = torch.eye(steps[0].shape[-1], dtype=torch.float64)
        wrong.append(
            ("rows do not sum to 1: after the identity is added, divide by 2.", product([s + eye for s in steps]))
        )
        wrong.append(
            ("each map is halved, but the other half, the identity, is not added.", product([s / 2 for s in steps]))
        )
    rows = slice(None) if token is None else token
    return judge("rollout", yours, product(given)[0, rows], [(name, one[0, rows]) for name, one in wrong], hint=hint)


def generation_slice(yours: Any, maps: Sequence[Tensor], prompt_length: int, *, hint: bool = False) -> Verdict:
    """Grade the scores of a generated text, cut from the maps of one pass: `(n, m, layers)`.

    The pass reads the m tokens of the prompt and all generated tokens except the last. The token at position p + 1 is
    predicted at position p, so the row of the first generated token is m - 1. It recognizes `[m:]` in place of
    `[m - 1 :]`, rows of the prompt, columns of the generated tokens, layers at the wrong axis, and swapped axes.

    Args:
        yours: The scores, `(n, m, layers)`.
        maps: One map `(1, m + n - 1, m + n - 1)` for each layer.
        prompt_length: m, the number of tokens in the prompt.
        hint: Whether a wrong answer gets a second hint.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> maps = list(torch.rand(2, 1, 6, 6).tril())
    >>> stacked = torch.stack(maps, -1)[0]
    >>> check.generation_slice(stacked[3:, :4], maps, prompt_length=4).passed
    True
    >>> check.generation_slice(stacked[4:, :4], maps, prompt_length=4)
    Not yet. generation_slice: the rows begin one too late, at [m:]. ...
    """
    m = prompt_length
    whole = torch.stack([torch.as_tensor(one).reshape(one.shape[-2:]) for one in maps], -1)
    if not 0 < m <= len(whole):
        raise ArgumentError(f"prompt_length is {m}: pass a number from 1 to {len(whole)}, the rows of the maps.")
    right = whole[m - 1 :, :m]
    mistakes = [
        (TOO_LATE, whole[m:, :m]),
        (TOO_LATE, whole[m:, :m].movedim(-1, 0)),
        ("the rows begin one too early. The first generated token is predicted at position m - 1.", whole[m - 2 :, :m]),
        ("the last row is missing. The last position of the pass predicts the last token.", whole[m - 1 : -1, :m]),
        ("all columns are kept. The sources are the m tokens of the prompt: take [:m].", whole[m - 1 :]),
        ("a column is missing. The prompt has m tokens: take [:m].", whole[m - 1 :, : m - 1]),
        ("these are the rows of the prompt. The generated tokens are predicted at [m - 1 :].", whole[:m, :m]),
        ("layers stand first. The shape is (n, m, layers): stack the maps along the last axis.", right.movedim(-1, 0)),
        ("rows and columns are swapped. The first axis counts generated tokens.", right.transpose(0, 1)),
        ("rows and columns are swapped. The first axis counts generated tokens.", whole[:m, m - 1 :]),
    ]
    return judge("generation_slice", yours, right, mistakes, hint=hint)


def neighbor_share(yours: Any, maps: Sequence[Tensor], words: Sequence[int], *, hint: bool = False) -> Verdict:
    """Grade the mean share that words give to their two neighbors, one number for each layer.

    It recognizes a share that includes the word itself, only one of the neighbors, the mean over all tokens in place of
    the words, a mean over both neighbors in place of their sum, and columns in place of rows.

    Args:
        yours: One number for each layer.
        maps: One map `(1, out, in)` or `(out, in)` for each layer.
        words: The positions of the output tokens that count. Their neighbors may be any tokens.
        hint: Whether a wrong answer gets a second hint.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> maps = [torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.2, 0.3], [0.0, 0.4, 0.6]])]
    >>> check.neighbor_share([0.8], maps, words=[1]).passed
    True
    >>> check.neighbor_share([1.0], maps, words=[1])
    Not yet. neighbor_share: the share of the word itself is included. Neighbors are at a distance of 1.
    You go on with the package's answer. This exercise counts as open.
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
    return judge("neighbor_share", yours, shares(near), mistakes, hint=hint)


def pair_share(yours: Any, maps: Sequence[Tensor], one: int, other: int, *, hint: bool = False) -> Verdict:
    """Grade how much two tokens draw on each other: the mean of the two entries, one number for each layer.

    It recognizes a single direction, the sum of both, and the shares that the tokens give to themselves.

    Args:
        yours: One number for each layer, or a function of the maps `(layers, out, in)`, `one` and `other` that returns
            them.
        maps: One map `(1, out, in)` or `(out, in)` for each layer.
        one: The position of a token.
        other: The position of the other token.
        hint: Whether a wrong answer gets a second hint.
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
    if not callable(yours):
        return judge("pair_share", yours, (there + back) / 2, mistakes, hint=hint)

    def right(maps: Tensor, one: int, other: int) -> Tensor:
        return (maps[:, one, other] + maps[:, other, one]) / 2

    return judge_function("pair_share", yours, right, [(stacked, one, other)], mistakes, hint=hint)


def path_share(
    yours: Any, maps: Sequence[Tensor], path: Sequence[int], *, residual: float | None = None, hint: bool = False
) -> Verdict:
    r"""Grade the share of one path through the layers, the product of its entries.

    .. math:: \prod_l S_l[t_{l+1}, t_l]

    The rollout is the sum of such products over all paths. It recognizes a path in the wrong direction, a sum in place
    of a product, and a forgotten residual.

    Args:
        yours: A number.
        maps: One map `(1, out, in)` or `(out, in)` for each layer, first layer first.
        path: The positions, from the input to the output: one more than there are layers.
        residual: 0.5 if each map gets half a residual first.
        hint: Whether a wrong answer gets a second hint.
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
    return judge("path_share", yours, steps(given).prod(), mistakes, hint=hint)


def _stacked(maps: Sequence[Tensor]) -> Tensor:
    """The maps of one example, `(layers, out, in)` in float64."""
    if not len(maps) or any(one.dim() not in (2, 3) or (one.dim() == 3 and len(one) != 1) for one in maps):
        raise ArgumentError("maps is not a list of maps of one example: pass one map (1, out, in) for each layer.")
    return torch.stack([one.reshape(one.shape[-2:]).double() for one in maps])
