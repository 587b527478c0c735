"""One adapter for each example, as PEFT runs them: by hooks that stay on the model when its forward fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueGates, ValueZeroing, ValueZeroingEffect
from captum_vz.errors import RefusedError
from tests.engine.blocks import WIDTH, Block
from tests.faults.state import differences, state_of

SCALES = {"x": 1.0, "y": 2.0}


class Adapted(nn.Module):
    """Scales the values of each example as its adapter says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, adapter_names: list[str]) -> Tensor:
        scale = torch.tensor([SCALES[name] for name in adapter_names]).double()[:, None, None]
        values = [block.attention.value for block in self.blocks]
        hooks = [one.register_forward_hook(lambda module, args, output: output * scale) for one in values]
        if len(adapter_names) != len(x):
            raise ValueError("Length of `adapter_names` should be the same as the number of inputs.")
        for block in self.blocks:
            x = block(x)
        for hook in hooks:
            hook.remove()
        return x.mean(1)


X = torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
NAMES = ["x", "y"]
CALLS: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "effect": lambda run, blocks, x: ValueZeroingEffect(run, blocks).attribute(x, target=3),
    "gates": lambda run, blocks, x: ValueGates(run, blocks)(torch.full((len(X), 4), 0.5), x),
    "map": lambda run, blocks, x: ValueZeroing(run, blocks[0]).attribute(x),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_example_has_its_adapter(name: str) -> None:
    model, call = Adapted(), CALLS[name]
    before, blocks = state_of(model), list(model.blocks)
    found = call(model, blocks, {"x": X, "adapter_names": NAMES})
    assert not differences(before, state_of(model))
    for example, adapter in enumerate(NAMES):
        some = slice(example, example + 1)
        alone = call(lambda x, adapter=adapter: model(x, [adapter] * len(x)), blocks, X[some])[:1]
        torch.testing.assert_close(found[some], alone)


@pytest.mark.parametrize("name", ["effect", "gates"])
def test_refused_call_leaves_no_hooks(name: str) -> None:
    """A function holds the names, so one example alone is run with two of them."""
    model = Adapted()
    before = state_of(model)
    with pytest.raises(RefusedError, match="one example alone"):
        CALLS[name](lambda x: model(x, NAMES), list(model.blocks), X)
    assert not differences(before, state_of(model))


def test_failing_model_leaves_no_hooks() -> None:
    model = Adapted()
    before = state_of(model)
    with pytest.raises(ValueError, match="adapter_names"):
        ValueZeroing(model, list(model.blocks)).attribute({"x": X, "adapter_names": NAMES[:1]})
    assert not differences(before, state_of(model))
