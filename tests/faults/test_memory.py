"""Where memory is short, fewer pairs are computed at a time, with one warning. It is not taken for a layer's fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from captum_vz import ValueZeroing, ValueZeroingEffect
from tests.engine.blocks import WIDTH, Block, block_of
from tests.engine.by_name import ByName
from tests.faults.test_calls import NO_MEMORY
from tests.reference import FAMILIES

TOKENS = 18  # more than the groups of which the definition runs first, in a layer of unknown code
ERRORS = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(NO_MEMORY), MemoryError()]
each_error = pytest.mark.parametrize("error", ERRORS, ids=["OutOfMemoryError", "RuntimeError", "MemoryError"])


class Small(nn.Module):
    """Has memory for so many positions only."""

    def __init__(self, most: int, error: BaseException) -> None:
        super().__init__()
        self.most = most
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() > self.most:
            raise self.error
        return torch.zeros_like(x)


def stack(most: int, error: BaseException, build: Callable[[], Block] = Block) -> nn.Sequential:
    """Two layers that hold so many positions at a time."""
    torch.manual_seed(0)
    layers = [build(), build()]
    for layer in layers:
        layer.after = Small(most, error)
    return nn.Sequential(*layers).double().eval().requires_grad_(False)


def attribute(model: nn.Sequential, method: Any = ValueZeroing, **keywords: Any) -> tuple[list[Tensor], list[str]]:
    """The scores, and the warnings."""
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = method(model, list(model)).attribute(x, **keywords)
    return [found] if isinstance(found, Tensor) else found, [str(one.message) for one in caught]


class Mixes(Block):
    """Mixes positions after its attention, so that the definition is replayed."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("build", "error"), [*((Block, error) for error in ERRORS), (lambda: block_of(ByName()), ERRORS[0])]
)
def test_chunks_are_halved(build: Callable[[], Block], error: BaseException) -> None:
    """324 pairs of each of two examples do not fit. The test of independence holds 60 positions."""
    expected, silent = attribute(stack(10**6, error, build))
    found, (warning,) = attribute(stack(120, error, build))
    assert not silent
    assert "memory was too short" in warning
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_chunks_of_values_that_are_zero_are_halved() -> None:
    model = stack(120, ERRORS[0])
    for block in model:
        nn.init.zeros_(block.attention.value.weight)
        nn.init.zeros_(block.attention.value.bias)
    found, (warning,) = attribute(model)
    assert "memory was too short" in warning
    assert not torch.stack(found).any()


def test_definition_takes_no_more_memory() -> None:
    """It runs the batch as it was, so that no chunk is halved, unlike with packed pairs."""
    expected, _ = attribute(stack(10**6, MemoryError(), Mixes))
    found, silent = attribute(stack(120, MemoryError(), Mixes))
    assert not silent
    assert all(map(torch.equal, found, expected))


class ShortOfMemory(TorchFunctionMode):
    """Has memory for linear layers of so many positions only, in any model."""

    def __init__(self, most: int, error: BaseException) -> None:
        super().__init__()
        self.most = most
        self.error = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and args[0].shape[:-1].numel() > self.most:
            raise self.error
        return func(*args, **(kwargs or {}))


@each_error
def test_copies_of_a_model_are_halved(error: BaseException) -> None:
    """Copies share a run in models of transformers only. BERT's three sentences have 21 positions."""
    case = FAMILIES["bert"].build()
    method = ValueZeroingEffect(case.model, case.layers)
    expected = method.attribute(case.inputs, (2, 3))
    with ShortOfMemory(3 * 21, error), pytest.warns(UserWarning, match="memory was too"):
        found = method.attribute(case.inputs, (2, 3))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
    short = ShortOfMemory(21, error)

    def use_up(module: nn.Module, args: Any, output: Any) -> None:
        short.most = 0 if module is case.model else short.most

    use_up.__module__ = "captum_vz.use_up"  # a hook of the user's is code from elsewhere
    with short, register_module_forward_hook(use_up), pytest.raises(type(error)) as raised:  # after the clean pass
        method.attribute(case.inputs, (2, 3))
    assert raised.value is error


def test_code_from_elsewhere_takes_no_more_memory() -> None:
    """One example at a time fits where the batch fits."""
    error = MemoryError()
    expected, _ = attribute(stack(10**6, error), ValueZeroingEffect, target=(0, 0))
    found, silent = attribute(stack(2 * TOKENS, error), ValueZeroingEffect, target=(0, 0))
    assert not silent
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_error
def test_too_little_for_anything(error: BaseException) -> None:
    """The error itself is raised, and no other cause is named."""
    with pytest.raises(type(error)) as raised:
        attribute(stack(2 * TOKENS, error))
    assert raised.value is error


def test_half_precision() -> None:
    """The layer's run in float32 is not taken for one that fails."""
    error = ERRORS[1]
    model = stack(10**6, error).bfloat16()
    model[1].after.register_forward_pre_hook(lambda module, args: set_most(module, args[0].dtype))
    with pytest.raises(type(error)):
        ValueZeroing(model, model[1]).attribute(torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16))


def set_most(module: Small, dtype: torch.dtype) -> None:
    module.most = 0 if dtype == torch.float32 else 10**6
