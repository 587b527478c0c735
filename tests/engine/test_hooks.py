"""The user's hooks, and what transformers collects, see the user's pass only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import LayerAttention, LayerAttentionNorm, ValueZeroing
from captum_vz.errors import UnsupportedLayerError
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference import FAMILIES, naive_attention, naive_value_zeroing

METHODS = {ValueZeroing: naive_value_zeroing, LayerAttention: naive_attention}
each_method = pytest.mark.parametrize("method", METHODS)


NAMES = ["bert", "gpt2", "albert", "vit", "bart-decoder", "t5-decoder", "whisper-decoder"]


@pytest.mark.parametrize("name", quick(NAMES, "bert", "bart-decoder"))
@each_method
def test_collected_outputs_hold_one_pass(name: str, method: Any) -> None:
    case = FAMILIES[name].case
    wanted = {"output_hidden_states": True, "output_attentions": True}
    seen: list[Any] = []

    def forward(**inputs: Any) -> None:
        seen.append(case.model(**inputs, **wanted))

    maps = method(forward, case.layers).attribute(case.inputs)
    for index, layer_map in enumerate(maps):
        assert_same(layer_map, METHODS[method](case, index))
    (output,) = seen
    clean = case.model(**case.inputs, **wanted)
    assert output.keys() == clean.keys()
    for key, value in clean.items():
        if isinstance(value, (Tensor, tuple)) and key != "past_key_values":
            assert_same(output[key], value)


@pytest.mark.parametrize("place", ["attention.output.dense", "attention.self", "attention", "intermediate", "output"])
@pytest.mark.parametrize("kind", ["before", "after"])
def test_submodule_hook_is_replayed(place: str, kind: str) -> None:
    """Steering: the map is the map of the layer with the user's hook."""
    case = FAMILIES["bert"].build()
    module = case.layers[1].get_submodule(place)

    def scaled(value: Any) -> Any:
        return (scaled(value[0]), *value[1:]) if isinstance(value, tuple) else 1.5 * value + 0.5

    if kind == "before":
        module.register_forward_pre_hook(lambda module, args: scaled(args))
    else:
        module.register_forward_hook(lambda module, args, output: scaled(output))
    plain = FAMILIES["bert"].case
    steered = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    for index, layer_map in enumerate(steered):
        assert_same(layer_map, naive_value_zeroing(case, index))
    assert not torch.allclose(steered[1], naive_value_zeroing(plain, 1), atol=1e-4)


def through_autoencoder(x: Tensor) -> Tensor:
    """What a sparse autoencoder with random weights makes of each token."""
    generator = torch.Generator().manual_seed(0)
    encoder = torch.randn(x.shape[-1], 40, generator=generator).to(x) / 4
    return (x @ encoder - 0.1).relu() @ encoder.mT


def patched(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 2] = torch.linspace(-1, 1, x.shape[-1]).to(x)
    return x


def patched_in_place(x: Tensor) -> None:
    x[:, 1] = x[:, 0]


EDITS: dict[str, Any] = {
    "steering": lambda x: 1.5 * x + torch.linspace(-1, 1, x.shape[-1]).to(x),
    "autoencoder": through_autoencoder,
    "patch": patched,
    "patch in place": patched_in_place,
    "tokens mixed": lambda x: x + x.mean(1, keepdim=True),
}


def editing(edit: Any, with_kwargs: bool = False) -> Any:
    def hook(module: nn.Module, *rest: Any) -> Any:
        assert len(rest) == 2 + with_kwargs
        output = rest[-1]
        if isinstance(output, tuple):
            edited = edit(output[0])
            return None if edited is None else (edited, *output[1:])
        return edit(output)

    return hook


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_layer_hook_on_the_output(edit: str, inference: bool, name: str) -> None:
    """The map is the map of the layer with the user's hooks."""
    case, calls = FAMILIES[name].build(), list[Any]()
    case.layers[0].register_forward_hook(lambda module, args, output: calls.append(output))
    with_kwargs = edit == "patch"
    case.layers[1].register_forward_hook(editing(EDITS[edit], with_kwargs), with_kwargs=with_kwargs)
    case.layers[2].register_forward_hook(editing(EDITS["steering"]))
    case.layers[2].register_forward_hook(editing(EDITS[edit]))
    with torch.inference_mode(inference):
        maps = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    assert len(calls) == 1
    for index, layer_map in enumerate(maps):
        assert_same(layer_map.clone(), naive_value_zeroing(case, index))


def test_layer_hook_that_clamps() -> None:
    """The hook changes nothing in the plain run, and much where a value is zeroed."""
    case, bounds = FAMILIES["bert"].build(), []

    def clamp(x: Tensor) -> Tensor:
        bounds.append((x.amin(1, keepdim=True), x.amax(1, keepdim=True)))
        return x.clamp(*bounds[0])

    hook = case.layers[1].register_forward_hook(editing(clamp))
    found = ValueZeroing(case.model, case.layers[1]).attribute(case.inputs)
    assert_same(found, naive_value_zeroing(case, 1))
    hook.remove()
    assert not torch.allclose(found, naive_value_zeroing(case, 1), atol=1e-3)


def test_layer_hook_that_counts_is_named() -> None:
    case, runs = FAMILIES["bert"].build(), []

    def counting(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        runs.append(0)
        return output * len(runs)

    case.layers[1].register_forward_hook(counting)
    with pytest.raises(UnsupportedLayerError, match="goes through the"):
        ValueZeroing(case.model, case.layers[1]).attribute(case.inputs)


def test_layer_hook_and_decompositions() -> None:
    case = FAMILIES["bert"].build()
    case.layers[1].register_forward_hook(editing(EDITS["steering"]))
    with pytest.raises(UnsupportedLayerError, match="hook on the layer"):
        LayerAttentionNorm(case.model, case.layers[1]).attribute(case.inputs)


def test_pass_inside_a_pass() -> None:
    case = FAMILIES["bert"].case
    inner: list[Tensor] = []

    def forward(**inputs: Any) -> None:
        case.model(**inputs)
        inner.extend(ValueZeroing(case.model, case.layers).attribute(case.example(1).inputs))

    maps = ValueZeroing(forward, case.layers).attribute(case.inputs)
    assert_same(maps, ValueZeroing(case.model, case.layers).attribute(case.inputs))
    assert_same(inner, ValueZeroing(case.model, case.layers).attribute(case.example(1).inputs))
