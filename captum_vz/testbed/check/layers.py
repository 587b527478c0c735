"""Grades for a rollout of the maps of all layers, and for the rows of a generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import Residual, add_residual, normalize_rows
from captum_vz.functional import rollout as multiply_maps
from captum_vz.testbed.check.verdict import Verdict, judge

TOO_LATE = (
    "the rows begin one too late, at [m:]. The token at position m was predicted at position m - 1: take [m - 1 :]."
)


def rollout(yours: Any, maps: Sequence[Tensor], *, residual: Residual = None, token: int | None = None) -> Verdict:
    """Grade a rollout, the product of the maps of all layers.

    It recognizes factors in the wrong order, a forgotten residual connection, a residual that was not asked for, a
    product of entries in place of matrices, a sum or mean of the maps, swapped rows and columns, and the map of the
    last layer alone.

    Args:
        yours: The rollout, `(out, in)` or `(1, out, in)`. Its row, `(in,)`, if `token` is given.
        maps: One map `(1, out, in)` or `(out, in)` for each layer, first layer first.
        residual: What each map gets before the product, see :func:`captum_vz.functional.add_residual`.
        token: The position of the output token whose row is graded. None: the whole rollout.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> maps = [torch.tensor([[0.5, 0.5], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])]
    >>> check.rollout(maps[1] @ maps[0], maps).passed
    True
    >>> check.rollout(maps[0] @ maps[1], maps)
    Not yet. rollout: the factors are in the wrong order. The map of the last layer stands first: S_2 @ S_1 @ S_0.
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
    return judge("rollout", yours, product(given)[0, rows], [(name, one[0, rows]) for name, one in wrong])


def generation_slice(yours: Any, maps: Sequence[Tensor], prompt_length: int) -> Verdict:
    """Grade the scores of a generated text, cut from the maps of one pass: `(n, m, layers)`.

    The pass reads the m tokens of the prompt and all generated tokens except the last. The token at position p + 1 is
    predicted at position p, so the row of the first generated token is m - 1. It recognizes `[m:]` in place of
    `[m - 1 :]`, rows of the prompt, columns of the generated tokens, layers at the wrong axis, and swapped axes.

    Args:
        yours: The scores, `(n, m, layers)`.
        maps: One map `(1, m + n - 1, m + n - 1)` for each layer.
        prompt_length: m, the number of tokens in the prompt.

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
    return judge("generation_slice", yours, right, mistakes)
