"""Errors that name their cause: hooks, patched forwards, compiled and sharded layers, caches, batches held back."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from tests.engine.blocks import Block, sequences
from tests.engine.compare import assert_same
from tests.reference.case import Case
from tests.reference.families import FAMILIES


def test_a_patched_forward_is_named() -> None:
    layer = Block()
    own = layer.forward

    def patched(x: Tensor) -> Tensor:
        return 2 * own(x).flip(1)

    layer.forward = patched  # type: ignore[method-assign]
    with pytest.raises(UnsupportedLayerError, match="patched in the"):
        ValueZeroing(layer, layer).attribute(sequences(2))


class Plain(nn.Module):
    """Attention by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(16, 48).double()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x)[:, None].chunk(3, -1)
        return x + nn.functional.scaled_dot_product_attention(query, key, value)[:, 0]


def in_model(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(16, 2).double())


JIT = "by torch.jit"
COMPILED: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "script": (lambda: (one := torch.jit.script(Plain()), one), JIT),
    "trace": (lambda: (one := torch.jit.trace(Plain(), sequences(2)), one), JIT),
    "a part": (lambda: (one := in_model(torch.jit.script(Plain())), one[0]), JIT),
    "below": (lambda: (one := in_model(torch.jit.script(Plain())), one), JIT),
    "export": (lambda: (one := torch.export.export(Plain(), (sequences(2),)).module(), one), "by torch.export"),
    "fx": (lambda: (one := torch.fx.symbolic_trace(Plain()), one), "by torch.export"),
    "layers of the original": (
        lambda: (torch.export.export(model := in_model(Plain()), (sequences(2),)).module(), model[0]),
        "did not run layer",
    ),
    "the program": (lambda: (one := torch.export.export(Plain(), (sequences(2),)), one), "ExportedProgram"),
}


@pytest.mark.parametrize(("build", "message"), COMPILED.values(), ids=COMPILED)
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers(build: Any, message: str) -> None:
    model, layer = build()
    for method in (ValueZeroing, LayerAttention, ValueZeroingEffect):
        with pytest.raises(RefusedError, match=message):
            method(model, layer).attribute(sequences(2))


def sharded(layer: nn.Module, mesh: Any) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this version of torch has no FSDP2")
    fsdp.fully_shard(layer, mesh=mesh)


def planned(layer: nn.Module, mesh: Any) -> None:
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    parallel.parallelize_module(layer, mesh, {"attention.value": parallel.ColwiseParallel()})


@pytest.mark.all_cases
@pytest.mark.parametrize(("spread", "message"), [(sharded, "sharded by FSDP"), (planned, "spread over")])
def test_layers_on_several_devices(spread: Callable[[nn.Module, Any], None], message: str) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = Block()
        spread(layer, torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        for method in (ValueZeroing, LayerAttention):
            with pytest.raises(UnsupportedLayerError, match=message):
                method(layer, layer).attribute(sequences(2))
    finally:
        torch.distributed.destroy_process_group()


class AddsMean(Block):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = super().__call__(*args, **kwargs)
        return output + output.mean(1, keepdim=True)


@pytest.mark.parametrize("method", [ValueZeroing, LayerAttention])
def test_call_around_forward(method: Any) -> None:
    """Hooks see what forward returns, and not what the layer returns."""
    layer = AddsMean()
    with pytest.raises(UnsupportedLayerError, match="has a __call__"):
        method(layer, layer).attribute(sequences(2))


def of_gpt2() -> tuple[Case, Tensor, Any]:
    case = FAMILIES["gpt2"].case.example(0)
    ids = case.inputs["input_ids"]
    with torch.no_grad():
        return case, ids[:, 3:], case.model(input_ids=ids[:, :3], use_cache=True).past_key_values


def test_rollouts_with_a_cache() -> None:
    case, ids, cache = of_gpt2()

    def forward(ids: Tensor) -> Any:
        return case.model(input_ids=ids, past_key_values=deepcopy(cache))

    with torch.no_grad(), pytest.raises(ArgumentError, match="sources than tokens"):
        ValueZeroingRollout(forward, case.layers).attribute(ids)


def test_effects_with_a_cache() -> None:
    case, ids, cache = of_gpt2()
    inputs = {"input_ids": ids, "past_key_values": cache}
    with pytest.raises(RefusedError, match=r"\(DynamicCache\)"):
        ValueZeroingEffect(case.model, case.layers).attribute(inputs, target=(0, 1))
    with pytest.raises(RefusedError, match="hold a key-value"):
        ValueZeroingEffect(lambda ids, past: case.model(ids, past_key_values=past), case.layers).attribute(
            ids, target=(0, 1), additional_forward_args=(cache,)
        )

    def forward(ids: Tensor) -> Any:
        with torch.no_grad():
            return case.model(input_ids=ids, past_key_values=deepcopy(cache))

    # The cache has no copies. One example needs none.
    with pytest.warns(UserWarning, match="and 7 sources"):
        found = ValueZeroingEffect(forward, case.layers[-1]).attribute(ids, lambda out: out.last_hidden_state[:, 0, 1])
    for token in range(3):
        changed = deepcopy(cache)
        changed.layers[len(case.layers) - 1].values[:, :, token] = 0
        with torch.no_grad():
            lost = case.model(input_ids=ids, past_key_values=changed).last_hidden_state[:, 0, 1]
        assert_same(found[:, token], forward(ids).last_hidden_state[:, 0, 1] - lost)
