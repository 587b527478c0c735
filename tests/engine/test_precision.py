"""Half precision: a layer is replayed in float32 on its half-precision input, and no float32 copy is kept.

The twin replays in float64, so its own rounding does not matter.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from captum_vz import LayerAttention, ValueZeroing
from tests.engine.blocks import Block, sequences, zeroed_one_by_one
from tests.engine.parameters import quick
from tests.reference import FAMILIES, Case, naive_value_zeroing
from tests.reference.naive import Run, cosine, real_positions, record, rerun_with_zeroed_rows

HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
VARIED = ["bert", "gpt2", "llama", "albert", "gpt-neox", "vit", "bart-decoder"]
each_varied = pytest.mark.parametrize("name", quick(VARIED, "bert", "albert"))


def in_float64(run: Run) -> Run:
    def widen(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = tree_map(widen, (run.args, run.kwargs))
    return Run(copy.deepcopy(run.layer).double(), args, kwargs, run.hidden)


def twin(case: Case, run: Run) -> Tensor:
    """The map of one run in float64, with one value zeroed at a time."""
    exact = in_float64(run)
    targets, sources = real_positions(case, exact, "self")
    clean = rerun_with_zeroed_rows(exact, case.family.attention, np.zeros_like(sources)).numpy()
    scores = np.zeros((*targets.shape, sources.shape[1]))
    for source in range(sources.shape[1]):
        zeroed = sources & (np.arange(sources.shape[1]) == source)
        changed = rerun_with_zeroed_rows(exact, case.family.attention, zeroed).numpy()
        for b, i in np.argwhere(targets & zeroed.any(1)[:, None]):
            scores[b, i, source] = cosine(changed[b, i], clean[b, i])
    return torch.from_numpy(scores / np.where(targets, scores.sum(-1), 1)[..., None])


def last_runs(case: Case) -> list[Run]:
    runs, _ = record(case)
    return [[one for one in runs if one.layer is layer][-1] for layer in case.layers]


@each_half
@each_varied
def test_half_precision_equals_the_twin(name: str, dtype: torch.dtype) -> None:
    case = FAMILIES[name].build(dtype)
    maps = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    for layer_map, run in zip(maps, last_runs(case), strict=True):
        assert layer_map.dtype == torch.float32
        torch.testing.assert_close(layer_map.double(), twin(case, run), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside", [True, False])
@each_varied
def test_autocast_equals_the_twin(name: str, inside: bool) -> None:
    case = FAMILIES[name].build(torch.float32)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast:
        runs = last_runs(case)
    if inside:
        maps = ValueZeroing(autocast(case.model), case.layers).attribute(case.inputs)
    else:
        with autocast:
            maps = ValueZeroing(case.model, case.layers).attribute(case.inputs)
            assert torch.is_autocast_enabled("cpu")
    for layer_map, run in zip(maps, runs, strict=True):
        torch.testing.assert_close(layer_map.double(), twin(case, run), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "llama", "bart-decoder", "vit"])
def test_float32_keeps_its_digits(name: str) -> None:
    """Raw distances are exact down to a millionth of a row's sum."""
    exact, single = FAMILIES[name].case, FAMILIES[name].build(torch.float32)
    maps = ValueZeroing(single.model, single.layers, normalize=False).attribute(single.inputs)
    for index, layer_map in enumerate(maps):
        expected = naive_value_zeroing(exact, index, normalize=False)
        assert layer_map.dtype == torch.float32
        torch.testing.assert_close(layer_map.double(), expected, rtol=1e-3, atol=1e-9)


@each_half
@each_varied
def test_padding_in_half_precision(name: str, dtype: torch.dtype) -> None:
    case = FAMILIES[name].build(dtype)
    for method in (ValueZeroing, LayerAttention):
        for layer_map in method(case.model, case.layers).attribute(case.inputs):
            real = case.mask(case.family.mask, layer_map.shape[1])
            torch.testing.assert_close(layer_map.sum(-1), real.float(), rtol=0, atol=5e-3)
            assert not layer_map[~real].any()
            assert not layer_map.mT[~real].any()


def test_final_norm_in_half_precision() -> None:
    case = FAMILIES["gpt2"].build(torch.bfloat16)
    norm = case.final_norm
    assert isinstance(norm, nn.Module)
    exact = copy.deepcopy(norm).float()
    with_half, with_float = (
        ValueZeroing(case.model, case.layers[-1], final_norm=one).attribute(case.inputs) for one in (norm, exact)
    )
    assert torch.equal(with_half, with_float)
    assert norm.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "widest"), [("bert", "output.dense"), ("gpt2", "mlp.c_proj")])
def test_overflowing_layer_is_named(name: str, widest: str) -> None:
    case = FAMILIES[name].build(torch.float16)
    with torch.no_grad():
        case.layers[1].get_submodule(widest).weight.mul_(60000)
    before, *overflowed = case.layers
    assert ValueZeroing(case.model, before).attribute(case.inputs).isfinite().all()
    for layer in overflowed:
        with pytest.raises(AssertionError, match="that are not finite"):
            ValueZeroing(case.model, layer).attribute(case.inputs)


def add_to_last(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.cat([output[:, :-1], output[:, -1:] + torch.linspace(-1, 1, output.shape[-1]).to(output)], 1)


def loud(dtype: torch.dtype) -> Tensor:
    """Sequences whose first token is a thousand times as loud as the others."""
    x = sequences(2)
    return torch.cat([1000 * x[:, :1], x[:, 1:]], 1).to(dtype)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_steering_hook_and_a_large_token(dtype: torch.dtype, on_input: bool, inside: bool) -> None:
    """Hooks run again in float32. A forward_pre_hook counts as input, wherever it is registered."""
    block, x = Block().to(dtype), loud(dtype)

    def steer() -> Any:
        if on_input:
            return block.register_forward_pre_hook(lambda module, args: add_to_last(module, (), *args))
        return block.register_forward_hook(add_to_last)

    def forward(x: Tensor) -> None:
        with steer():
            block(x)

    if inside:
        found = ValueZeroing(forward, block).attribute(x)
    else:
        with steer():
            found = ValueZeroing(block, block).attribute(x)
    assert not block._forward_hooks and not block._forward_pre_hooks
    given = add_to_last(block, (), x).double() if on_input else x.double()
    with nullcontext() if on_input else steer():
        expected = zeroed_one_by_one(block.double(), given)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-10 if dtype == torch.float64 else 1e-3)


class CastsInside(Block):
    """A block that computes in bfloat16, whatever the dtype of its weights."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_autocast_in_the_layer_is_refused() -> None:
    block = CastsInside().float()
    with pytest.raises(AssertionError, match="computes in half"):
        ValueZeroing(block, block).attribute(sequences(2).float())


class CastsBack(Block):
    """A block that runs in bfloat16 only."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x + self.feed_forward(super().forward(x).bfloat16())


def test_layer_that_fails_in_float32() -> None:
    block = CastsBack().bfloat16()
    with pytest.raises(AssertionError, match="CastsBack is in"):
        ValueZeroing(block, block).attribute(sequences(2).bfloat16())
