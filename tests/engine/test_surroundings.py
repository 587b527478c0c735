"""Models that are compiled, offloaded, quantised, adapted or in training give the same maps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from captum_vz import LayerAttention, LayerAttentionGradient, ValueZeroing, find_layers
from captum_vz._engine.capture.layer_runner import in_float32
from captum_vz.errors import UnsupportedLayerError
from tests.engine.blocks import Block, sequences, zeroed_in_its_batch, zeroed_one_by_one
from tests.engine.parameters import quick
from tests.engine.test_inline_layers import map_by_reruns, of
from tests.reference import FAMILIES


def llama() -> nn.Module:
    return FAMILIES["llama"].build(torch.float32).model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return FAMILIES["llama"].case.inputs["input_ids"]


@pytest.fixture(scope="module")
def plain(ids: Tensor) -> list[Tensor]:
    return maps_of(llama(), ids)


def maps_of(model: nn.Module, ids: Tensor) -> list[Tensor]:
    return ValueZeroing(model, find_layers(model)).attribute(ids)


def assert_same(maps: list[Tensor], expected: list[Tensor], atol: float = 1e-6) -> None:
    assert len(maps) == len(expected) > 0
    for one, other in zip(maps, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def test_compiled_model(ids: Tensor, plain: list[Tensor]) -> None:
    model = llama()
    compiled = torch.compile(model, backend="eager")
    assert_same(ValueZeroing(compiled, find_layers(compiled)).attribute(ids), plain)
    assert_same(ValueZeroing(compiled, find_layers(model)).attribute(ids), plain)


@pytest.mark.parametrize("wrapped", quick([True, False], True))
def test_compiled_layers(ids: Tensor, plain: list[Tensor], wrapped: bool) -> None:
    model = llama()
    for index, layer in enumerate(model.layers):
        if wrapped:
            model.layers[index] = torch.compile(layer, backend="eager")
        else:
            layer.compile(backend="eager")
    assert_same(ValueZeroing(model, list(model.layers)).attribute(ids), plain)


def sharper(module: nn.Module, query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
    return sdpa_attention_forward(module, query * 3, *args, **kwargs)


def unlike(module: nn.Module, *args: Tensor, **kwargs: object) -> tuple[Tensor, None]:
    """A gate for each feature, by which no weights give the context."""
    context = sdpa_attention_forward(module, *args, **kwargs)[0]
    return context * torch.linspace(0.5, 1.5, context.shape[-1], dtype=context.dtype), None


def forward_looking(module: nn.Module, *parts: Tensor, **kwargs: object) -> tuple[Tensor, None]:
    """Sees all tokens, whatever the mask says."""
    context = functional.scaled_dot_product_attention(*parts[:3], enable_gqa=True)
    return context.transpose(1, 2).contiguous(), None


def of_tokens(module: nn.Module, *parts: Any, **kwargs: Any) -> Any:
    """Takes a mask of tokens, `(batch, in)`."""
    mask = None if parts[3] is None else parts[3][:, None, None].bool()
    return sdpa_attention_forward(module, *parts[:3], mask, **kwargs)


def plainly(*args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(*args, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    functions = (sharper, unlike, forward_looking, of_tokens, plainly)
    for function in functions:
        AttentionInterface.register(function.__name__, function)
    AttentionInterface.register("masked", plainly)
    for name in ("masked", "forward_looking"):
        AttentionMaskInterface.register(name, sdpa_mask)
    AttentionMaskInterface.register("of_tokens", lambda *args, attention_mask=None, **kwargs: attention_mask)
    yield
    for name in ("masked", *(function.__name__ for function in functions)):
        del AttentionInterface._global_mapping[name]
        AttentionMaskInterface._global_mapping.pop(name, None)


def twin_of(model: nn.Module, layer: nn.Module, ids: Tensor) -> Tensor:
    value = "self_attn.v_proj" if hasattr(layer, "self_attn") else "attention.self.value"
    scores = map_by_reruns(model, layer, {"input_ids": ids, "use_cache": False}, of(value))
    return scores / scores.sum(-1, keepdim=True)


@pytest.mark.parametrize("function", ["plainly", "sharper", "forward_looking"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_registered_attention(family: str, function: str) -> None:
    """Value Zeroing and the weights are those of the user's function, which runs in the twin."""
    case = FAMILIES[family].build()
    model, layer, ids = case.model, case.layers[1], case.inputs["input_ids"]
    model.set_attn_implementation(function)
    found = ValueZeroing(model, layer).attribute(ids)
    assert model.config._attn_implementation == function
    torch.testing.assert_close(found, twin_of(model, layer, ids))
    weights = LayerAttention(model, layer).attribute(ids)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    causal = family == "llama" and function != "forward_looking"
    assert bool(weights.triu(1).any()) is not causal
    if function == "plainly":
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, ValueZeroing(model, layer).attribute(ids))


def first_token(output: Any) -> Tensor:
    return output[0][:, 0].sum(-1)  # type: ignore[no-any-return]


def test_registered_attention_with_gradients() -> None:
    case = FAMILIES["bert"].build()
    model, layer, ids = case.model, case.layers[1], case.inputs["input_ids"]
    method = LayerAttentionGradient(model, layer)
    expected = method.attribute(ids, first_token)
    model.set_attn_implementation("plainly")
    torch.testing.assert_close(method.attribute(ids, first_token), expected)


def test_registered_attention_and_mask() -> None:
    """Without a mask function of its name, transformers gives the function no mask, and padding is seen."""
    case = FAMILIES["bert"].build()
    expected = ValueZeroing(case.model, case.layers).attribute(case.inputs)
    case.model.set_attn_implementation("masked")
    torch.testing.assert_close(ValueZeroing(case.model, case.layers).attribute(case.inputs), expected)
    case.model.set_attn_implementation("of_tokens")
    found, real = ValueZeroing(case.model, case.layers).attribute(case.inputs), case.inputs["attention_mask"].bool()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[real], other[real])
    for name in ("plainly", "forward_looking"):
        case.model.set_attn_implementation(name)
        without = {"input_ids": case.inputs["input_ids"]}
        found = [ValueZeroing(case.model, case.layers).attribute(inputs) for inputs in (case.inputs, without)]
        torch.testing.assert_close(*found)


def test_registered_attention_that_sums_no_values(ids: Tensor) -> None:
    model = llama().double()
    layer = model.layers[1]
    model.set_attn_implementation("unlike")
    with pytest.raises(UnsupportedLayerError, match="sums of its values"):
        ValueZeroing(model, layer).attribute(ids)
    named = ValueZeroing(model, layer, values=layer.self_attn.v_proj).attribute(ids)
    torch.testing.assert_close(named, twin_of(model, layer, ids))


def test_parametrized_attention() -> None:
    """torch makes a class of its own for a module whose parameter it computes. The config is found all the same."""
    case = FAMILIES["bert"].case
    model, layer = copy.deepcopy((case.model, case.layers[0]))
    expected = ValueZeroing(model, layer).attribute(case.inputs["input_ids"])
    attention = layer.attention.self
    attention.extra = nn.Parameter(torch.ones(2))
    register_parametrization(attention, "extra", nn.Identity())
    assert type(attention).__module__.startswith("torch.")
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert_same(ValueZeroing(model, layer).attribute(case.inputs["input_ids"]), expected)
    model.set_attn_implementation("unlike")
    with pytest.raises(UnsupportedLayerError, match="sums of its values"):
        ValueZeroing(model, layer).attribute(case.inputs["input_ids"])


def test_offloaded_weights(ids: Tensor, plain: list[Tensor], tmp_path: Path) -> None:
    assert_same(maps_of(cpu_offload(llama(), execution_device=torch.device("cpu")), ids), plain)
    model = llama()
    places = {name: "cpu" for name, _ in model.named_children()} | {
        "layers.0": "cpu",
        "layers.1": "disk",
        "layers.2": "disk",
    }
    del places["layers"]
    dispatched = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    assert any(parameter.is_meta for parameter in dispatched.parameters())
    assert_same(maps_of(dispatched, ids), plain)


def test_offloaded_half_precision(ids: Tensor) -> None:
    expected = maps_of(llama().bfloat16(), ids)
    offloaded = cpu_offload(llama().bfloat16(), execution_device=torch.device("cpu"))
    assert_same(maps_of(offloaded, ids), expected)
    # The float32 copy of one layer does not copy the weights of all layers.
    projection, copied = (layer.self_attn.q_proj for layer in (offloaded.layers[0], in_float32(offloaded.layers[0])))
    assert copied._hf_hook.weights_map is projection._hf_hook.weights_map


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing(ids: Tensor, plain: list[Tensor]) -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(maps_of(model, ids), plain)
    assert model.training


class Int8Linear(nn.Module):
    """A linear layer with integer weights and one scale a row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", linear.weight.abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype) * self.scale.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantized(x.dtype), self.bias)


def test_quantised_weights_equal_their_values(ids: Tensor) -> None:
    quantised, rounded = llama(), llama()
    for layer, other in zip(quantised.layers, rounded.layers, strict=True):
        for parent, name in [(layer.self_attn, "v_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "up_proj")]:
            linear = Int8Linear(getattr(parent, name))
            setattr(parent, name, linear)
            place = next(n for n, module in layer.named_modules() if module is linear)
            other.get_submodule(place).weight.data = linear.dequantized(torch.float32)
    assert_same(maps_of(quantised, ids), maps_of(rounded, ids))
    assert quantised.layers[0].mlp.up_proj.weight.dtype == torch.int8


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("tokens", [6, 24])
def test_dynamically_quantised_inputs(tokens: int) -> None:
    """A zeroed value may change how all other values are rounded. NaN is not rounded."""
    case = FAMILIES["bert"].build(torch.float32)
    model = torch.ao.quantization.quantize_dynamic(case.model, {nn.Linear})
    ids = torch.randint(1, 29, (1, tokens))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ValueZeroing(model, find_layers(model)).attribute(ids)
    assert not [one for one in caught if "deprecated" not in str(one.message)]
    for layer, one in zip(find_layers(model), found, strict=True):
        expected = zeroed_one_by_one(layer, hidden_states(model, layer, ids), value="attention.self.value")
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_dynamically_quantised_batch() -> None:
    model = torch.ao.quantization.quantize_dynamic(Block().float(), {nn.Linear})
    x = sequences(2).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ValueZeroing(model, model).attribute(x)
    (message,) = [str(one.message) for one in caught if "deprecated" not in str(one.message)]
    assert "Block is quantised, and activations of a batch share one scale: pass one sentence at a time" in message
    torch.testing.assert_close(found, zeroed_in_its_batch(model, x), rtol=0, atol=1e-6)


def hidden_states(model: nn.Module, layer: nn.Module, ids: Tensor) -> Tensor:
    given: list[Tensor] = []
    with layer.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0])):
        model(ids)
    return given[0]


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_sentences_packed_into_one_row(family: str) -> None:
    """Two sentences in one row, separated by a mask: the map is block-diagonal, one block for each sentence."""
    case = FAMILIES[family].build()
    lengths, device_ids = (4, 3), case.inputs["input_ids"][:1]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    block = torch.block_diag(
        *(torch.ones(length, length).tril() if case.causal else torch.ones(length, length) for length in lengths)
    )
    mask = (1 - block.double())[None, None] * torch.finfo(torch.float32).min
    for method in (ValueZeroing, LayerAttention):
        explain = method(case.model, case.layers)
        packed = explain.attribute({"input_ids": device_ids, "attention_mask": mask, "position_ids": positions})
        first = explain.attribute({"input_ids": device_ids[:, :4]})
        second = explain.attribute({"input_ids": device_ids[:, 4:]})
        for one, a, b in zip(packed, first, second, strict=True):
            torch.testing.assert_close(one[0], torch.block_diag(a[0], b[0]), rtol=0, atol=1e-10)
