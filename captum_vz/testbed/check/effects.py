"""Grades for cross-attention, for tokens that are zeroed together, and for effects on a decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.testbed.check.maps import ATTENTION, UNNORMALIZED
from captum_vz.testbed.check.verdict import LIKENESS, Verdict, judge, tensor_of

ONE_BY_ONE = "the tokens of a group were zeroed one at a time. Zero their values together."


def cross_map(yours: Any, model: Any, inputs: Any, *, layer: int | nn.Module = -1, hint: bool = False) -> Verdict:
    """Grade a map of cross-attention, `(target tokens, source tokens)`, by Value Zeroing.

    It recognizes swapped axes, the map of the decoder's self-attention, the map of the encoder, attention weights,
    distances that are not divided by their sums, and the map of another layer.

    Args:
        yours: The map, `(out, source)` or `(1, out, source)`.
        model: A model with encoder and decoder.
        inputs: One example, with `decoder_input_ids`.
        layer: A layer of the decoder, or its index.
        hint: Whether a wrong answer gets a second hint.
    """
    layers = find_layers(model, "decoder")
    one = layers[layer] if isinstance(layer, int) else layer

    def cross(which: nn.Module = one, **options: Any) -> Tensor:
        return ValueZeroing(model, which, attention="cross", **options).attribute(inputs)[0]

    right = cross()
    mistakes: dict[str, Any] = {
        "source and target tokens are swapped. A row belongs to a token of the decoder.": right.mT,
        "this is the decoder's self-attention. Pass attention='cross'.": lambda: ValueZeroing(model, one).attribute(
            inputs
        )[0],
        "this is a map of the encoder. Take a layer of the decoder, with attention='cross'.": lambda: ValueZeroing(
            model, find_layers(model, "encoder")[-1]
        ).attribute(inputs)[0],
        UNNORMALIZED: lambda: cross(normalize=False),
        ATTENTION: lambda: LayerAttention(model, one, attention="cross").attribute(inputs)[0],
    }
    for index, other in enumerate(layers):
        if other is not one:
            mistakes[f"this is the map of layer {index} of the decoder."] = lambda other=other: cross(other)
    return judge("cross_map", yours, right, mistakes, hint=hint)


def joint_row(
    yours: Any,
    inputs: Any,
    feature_mask: Any,
    *,
    model: Any,
    layer: int | nn.Module = -1,
    token: int,
    hint: bool = False,
) -> Verdict:
    """Grade a row in which the tokens of a group are zeroed together.

    The score of a group stands at each of its tokens, as :class:`~captum_vz.ValueZeroing` returns it with
    `feature_mask`, or once, in the order of the groups. It recognizes tokens that were zeroed one at a time, with and
    without the sum of the group, and scores of groups that are divided among their tokens.

    Args:
        yours: `(in,)`, or `(groups,)`.
        inputs: One example, as the model takes it.
        feature_mask: The number of each token's group, `(in,)` or `(1, in)`.
        model: The model.
        layer: The layer, or its index.
        token: The position of the output token.
        hint: Whether a wrong answer gets a second hint.
    """
    layer = find_layers(model)[layer] if isinstance(layer, int) else layer
    groups = torch.as_tensor(feature_mask).reshape(1, -1)
    method = ValueZeroing(model, layer)
    alone = method.attribute(inputs, token=token)[0]
    right = method.attribute(inputs, token=token, feature_mask=groups)[0]
    members = torch.bincount(groups[0])[groups[0]]
    summed = _summed(alone, groups[0])
    if (found := tensor_of(yours)) is not None and found.numel() == len(summed) != len(right):
        return judge("joint_row", yours, _summed(right / members, groups[0]), [(ONE_BY_ONE, summed)], hint=hint)
    mistakes = [
        (ONE_BY_ONE, alone),
        (ONE_BY_ONE, summed[groups[0]]),
        ("the score of a group is divided among its tokens. Each token has the score of its group.", right / members),
    ]
    return judge("joint_row", yours, right, mistakes, hint=hint)


def effect(
    yours: Any,
    inputs: Any,
    *,
    model: Any,
    target: Any,
    foil: Any = None,
    layers: Any = None,
    together: Sequence[int] = (),
    hint: bool = False,
) -> Verdict:
    """Grade the effect of zeroed values on a decision, as :class:`~captum_vz.ValueZeroingEffect` computes it.

    It recognizes the opposite sign, values that were zeroed in the last layer only, a row that is divided by its sum,
    absolute values, numbers that are not subtracted from the clean one, and tokens of a group that were zeroed one at a
    time.

    Args:
        yours: `(in,)` or `(1, in)`, signed.
        inputs: One example, as the model takes it.
        model: A model, or a function that returns the logits.
        target: The index of the number that is explained, see :meth:`captum_vz.ValueZeroingEffect.attribute`.
        foil: The index of the number that is subtracted.
        layers: The layers. None: all layers of the model, which must then be a model and no function.
        together: The positions of tokens that are zeroed together. Each of them has the effect of all.
        hint: Whether a wrong answer gets a second hint.
    """
    layers = find_layers(model) if layers is None else list(layers)

    def of(some: list[nn.Module], groups: Tensor | None = None) -> Tensor:
        method = ValueZeroingEffect(model, some)
        found: Tensor = method.attribute(inputs, target=target, foil=foil, feature_mask=groups)
        return found[0]

    alone = right = of(layers)
    if together:
        groups = torch.arange(len(alone))[None]
        groups[0, list(together)] = together[0]
        right = of(layers, groups)
    mistakes: list[tuple[str, Any]] = [
        ("the sign is wrong. The effect is the clean number minus the number without the value.", -right),
        ("the sign is lost. An effect below 0 says that the value speaks against the target.", right.abs()),
        (
            "the values were zeroed in the last layer only. Zero them in all layers.",
            lambda: of(layers[-1:]),
        ),
        ("the effects are divided by their sum. They are differences of logits.", right / right.sum()),
    ]
    if (found := tensor_of(yours)) is not None and found.numel() == right.numel():
        clean = (found.reshape(-1) + right).mean()  # if these are the numbers without each value
        if clean.abs() > LIKENESS * right.abs().max():
            mistakes.append(
                ("these are the numbers without each value. Subtract them from the clean number.", clean - right)
            )
    if together:
        summed = alone.clone()
        summed[list(together)] = alone[list(together)].sum()
        mistakes += [(ONE_BY_ONE, alone), (ONE_BY_ONE, summed)]
    return judge("effect", yours, right, mistakes, hint=hint)


def _summed(row: Tensor, groups: Tensor) -> Tensor:
    return row.new_zeros(int(groups.max()) + 1).scatter_add(0, groups, row)
