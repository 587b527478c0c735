"""Stacks in which only some layers have attention: maps of these layers, and rollouts, which refuse such stacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    LayerAttention,
    ValueZeroing,
    ValueZeroingRollout,
    find_layers,
)
from captum_vz.errors import UnsupportedLayerError
from captum_vz.methods import METHODS, Question
from captum_vz.subjects import Subject
from tests.engine.blocks import (
    WIDTH,
    Ahead,
    Block,
    CausalMean,
    Convolution,
    Mean,
    SelfAttention,
    Stopping,
    block_of,
    sequences,
)
from tests.engine.compare import assert_same
from tests.engine.test_inline_layers import map_by_reruns, of
from tests.reference.case import BEFORE_5, built

SIZE = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 50}
ATTENDS, OTHER = "full_attention", "linear_attention"
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {"head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
DELTA |= {"num_experts_per_tok": 2}
JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4}

# name -> (fields of the config, indices of the layers with attention, name of the value module)
HYBRIDS: dict[str, tuple[dict[str, Any], list[int], str]] = {
    "Jamba": ({"num_hidden_layers": 4, "use_mamba_kernels": False, **JAMBA}, [1, 3], "self_attn.v_proj"),
    "GraniteMoeHybrid": (
        {"num_hidden_layers": 3, "layer_types": [ATTENDS, OTHER, ATTENDS], "shared_intermediate_size": 16, **MAMBA},
        [0, 2],
        "self_attn.v_proj",
    ),
    "RecurrentGemma": (
        {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"], "lru_width": 16},
        [2],
        "temporal_block.v_proj",
    ),
    "Lfm2": ({"num_hidden_layers": 3, "layer_types": ["conv", ATTENDS, "conv"]}, [1], "self_attn.v_proj"),
    "Qwen3Next": ({"num_hidden_layers": 3, "layer_types": [OTHER, ATTENDS, OTHER], **DELTA}, [1], "self_attn.v_proj"),
}


@cache
def model_of(name: str) -> Any:
    # Run the experts one by one, because torch has no grouped product in float64.
    experts = {} if BEFORE_5 else {"experts_implementation": "eager"}
    return built(f"{name}Model", "eager", **SIZE, num_key_value_heads=2, **HYBRIDS[name][0], **experts)


IDS = torch.tensor([[5, 9, 3, 7, 8]])


def all_layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("layers"))


@pytest.mark.parametrize("name", HYBRIDS)
def test_only_attention_layers_have_maps(name: str) -> None:
    _, attending, value = HYBRIDS[name]
    model = model_of(name)
    layers = [all_layers(model)[number] for number in attending]
    assert find_layers(model) == layers
    maps = ValueZeroing(model, layers).attribute(IDS)
    for layer, one in zip(layers, maps, strict=True):
        expected = map_by_reruns(model, layer, {"input_ids": IDS, "use_cache": False}, of(value))
        assert_same(one, expected / expected.sum(-1, keepdim=True))


class Stack(nn.Module):
    """A stack of blocks, and of other mixers."""

    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(members)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Recurrent(nn.Module):
    """A layer that mixes its tokens without attention."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(x)


class InPlace(Recurrent):
    """The same layer, which writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.mixer(x).clone()
        return x


def hybrid(other: type[Recurrent] = Recurrent) -> Stack:
    torch.manual_seed(0)
    return Stack(Block(), other(CausalMean()), Block(), Block(), other(Mean()))


def test_modules_for_each_token_between_layers() -> None:
    linear, norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    for between in ([nn.RMSNorm(WIDTH)], [linear, norm]):
        model = Stack(Block(), *between, Block())
        blocks = [model.layers[0], model.layers[-1]]
        found = ValueZeroingRollout(model, blocks).attribute(sequences(2))
        assert_same(found, ValueZeroingRollout(model, blocks, other_mixing="ignore").attribute(sequences(2)))


@pytest.mark.parametrize("index", [0, 1])
def test_steering_hook_may_mix(index: int) -> None:
    model, x = Stack(Block(), Block()), sequences(2)
    plain = LayerAttention(model, find_layers(model)).attribute(x)[0]
    model.layers[index].register_forward_hook(lambda module, inputs, output: output + output.mean(1, keepdim=True))
    maps = LayerAttention(model, find_layers(model)).attribute(x)
    assert_same(maps[0], plain)
    with pytest.raises(UnsupportedLayerError, match="mix their tokens"):
        AttentionRollout(model, find_layers(model)).attribute(x)
    rollout = AttentionRollout(model, find_layers(model), residual=None, other_mixing="ignore")
    assert_same(rollout.attribute(x), maps[1] @ maps[0])


def test_hook_between_layers_is_named() -> None:
    model, x = Stack(Block(), Block()), sequences(2)
    model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] + inputs[0].mean(1, keepdim=True),))
    with pytest.raises(UnsupportedLayerError, match="<lambda>, runs"):
        AttentionRollout(model, find_layers(model)).attribute(x)
    maps = LayerAttention(model, find_layers(model)).attribute(x)
    rollout = AttentionRollout(model, find_layers(model), residual=None, other_mixing="ignore")
    assert_same(rollout.attribute(x), maps[1] @ maps[0])


@pytest.mark.parametrize("method", [ValueZeroingRollout, AttentionRollout, AttentionFlow, ALTI])
@pytest.mark.parametrize("other", [Recurrent, InPlace])
def test_mixing_between_layers_is_refused(method: Any, other: type[Recurrent]) -> None:
    model, x = hybrid(other), sequences(2)
    layers = find_layers(model)
    assert layers == [model.layers[number] for number in (0, 2, 3)]
    with pytest.raises(AssertionError, match="runs between the"):
        method(model, layers).attribute(x)
    # With "ignore", the rollout multiplies the maps. Modules after the last layer are not tested.
    assert method(model, layers, other_mixing="ignore").attribute(x).shape == (2, 6, 6)
    assert method(model, layers[1:]).attribute(x).shape == (2, 6, 6)


@pytest.mark.parametrize("mixer", [Convolution, Stopping, CausalMean])
@pytest.mark.parametrize("method", [ValueZeroingRollout, AttentionRollout])
def test_mixing_inside_a_layer_is_refused(method: Any, mixer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Stack(Block(), Block(after=mixer())), sequences(2)
    layers = find_layers(model)
    with pytest.raises(AssertionError, match="mix their tokens in"):
        method(model, layers).attribute(x)
    assert method(model, layers, other_mixing="ignore").attribute(x).shape == (2, 6, 6)
    assert method(model, layers[:1]).attribute(x).shape == (2, 6, 6)


class FromNeighbours(SelfAttention):
    """Makes queries, or its values, of each token and the one before it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        getattr(self, name).register_forward_pre_hook(lambda module, inputs: inputs[0] + inputs[0].roll(1, 1))


@pytest.mark.parametrize("method", [ValueZeroingRollout, AttentionRollout])
def test_values_of_several_tokens_refused(method: Any) -> None:
    model, x = Stack(Block(), block_of(FromNeighbours("value"))), sequences(2)
    with pytest.raises(AssertionError, match="mix their tokens in"):
        method(model, list(model.layers)).attribute(x)
    model = Stack(Block(), block_of(FromNeighbours("query")))  # the weights tell all of these
    assert method(model, list(model.layers)).attribute(x).shape == (2, 6, 6)


class Wary(nn.Module):
    """Raises an error for NaN."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise self.error
        return x


def test_layer_that_fails_on_nan() -> None:
    for error in (KeyError("nan"), AssertionError("nan"), StopIteration()):
        model, x = Stack(Block(), Block(after=Wary(error))), sequences(2)
        of = AttentionRollout(model, find_layers(model))
        found = of.attribute(x)
        of.other_mixing = "ignore"
        assert_same(found, of.attribute(x))
    model = Stack(Block(), Block(after=Wary(torch.OutOfMemoryError("Tried to allocate 20.00 GiB"))))
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        AttentionRollout(model, find_layers(model)).attribute(sequences(2))


def test_ignored_mixing_multiplies_maps() -> None:
    model, x = hybrid(), sequences(2)
    layers = find_layers(model)
    maps = ValueZeroing(model, layers).attribute(x)
    joined = ValueZeroingRollout(model, layers, other_mixing="ignore").attribute(x, all_layers=True)
    assert_same(joined, [maps[0], maps[1] @ maps[0], maps[2] @ maps[1] @ maps[0]])
    row = ValueZeroingRollout(model, layers, other_mixing="ignore").attribute(x, token=3)
    assert_same(row, joined[-1][:, 3])


def test_recurrent_mixer_of_a_real_layer() -> None:
    torch.manual_seed(0)
    sizes = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8, "head_dim": 8}
    config = transformers.FalconH1Config(**SIZE, num_hidden_layers=2, num_key_value_heads=2, **sizes)
    model = transformers.FalconH1Model._from_config(config, attn_implementation="eager").double().eval()
    with pytest.raises(AssertionError, match="FalconH1Decoder"):
        ValueZeroingRollout(model, find_layers(model)).attribute(IDS)


# What is alike in code and in all settings but one: the first mixes no tokens, the second does.
AFTER = [
    (nn.LayerNorm(16), nn.LayerNorm((6, 16))),
    (nn.Softmax(dim=-1), nn.Softmax(dim=1)),
    (nn.AvgPool2d((1, 3), 1, (0, 1)), nn.AvgPool2d((3, 1), 1, (1, 0))),
]


@pytest.mark.parametrize("after", AFTER)
def test_layers_that_differ_in_one_setting(after: tuple[nn.Module, nn.Module]) -> None:
    layers = [nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), one) for one in after]
    for order in (layers, layers[::-1]):
        model = nn.Sequential(*order).eval()
        with pytest.raises(UnsupportedLayerError, match="mix their tokens"):
            AttentionRollout(model, list(model)).attribute(torch.randn(2, 6, 16))


def test_comparison_refuses_mixing() -> None:
    model = model_of("Jamba")
    subject = Subject(model, model, find_layers(model), None)
    with pytest.raises(AssertionError, match="runs between the"):
        METHODS["value-zeroing-rollout"].scores(subject, Question({"input_ids": IDS}, [2]))


class Reading(nn.Module):
    """Adds what a function makes of all tokens."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return x + self.read(x)


def of_every_fourth(x: Tensor) -> Tensor:
    return x[:, 3::4].mean(1, keepdim=True).expand_as(x)


@pytest.mark.parametrize("read", [lambda x: x[:, -1:], of_every_fourth, lambda x: Ahead()(x) * (x > 2)])
def test_mixing_of_some_tokens_is_refused(read: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Stack(Block(), Block(after=Reading(read))), sequences(2, 12)
    with pytest.raises(AssertionError, match="mix their tokens in"):
        ValueZeroingRollout(model, find_layers(model)).attribute(x)


class Wincing(Convolution):
    """A convolution that raises an error for large numbers, and for NaN."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.abs().max() < 20:
            raise ValueError("large numbers")
        return super().forward(x)


def test_untestable_layer_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Stack(Block(), Block(after=Wincing())), sequences(2)
    with pytest.raises(AssertionError, match="run on changed"):
        AttentionRollout(model, find_layers(model)).attribute(x)
    assert AttentionRollout(model, find_layers(model), other_mixing="ignore").attribute(x).shape == (2, 6, 6)


class TwoTerms(SelfAttention):
    """Attention as the difference of two calls, without other mixing."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x) - super().forward(x.flip(-1)) / 2


@pytest.mark.parametrize("after", [None, Convolution])
def test_attention_in_parts_is_tested(after: Any) -> None:
    torch.manual_seed(0)
    block, x = Block(after=after and after()), sequences(2)
    block.attention = TwoTerms().double()
    of = ValueZeroingRollout(block, block)
    if after is None:
        assert of.attribute(x).shape == (2, 6, 6)
    else:
        with pytest.raises(AssertionError, match="mix their tokens in"):
            of.attribute(x)
