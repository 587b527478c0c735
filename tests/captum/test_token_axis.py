"""`target` names a token of the layer only if the axis that it indexes is the axis of the layer's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from captum_vz import AttentionRollout, LayerAttention, ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from tests.reference.case import randomize
from tests.reference.families import ENCODER_SIZE, SEQ2SEQ_SIZE, T5_SIZE, WHISPER_SIZE

TOKENS, WIDTH, WORDS = 6, 16, 30


def small(kind: str, **config: Any) -> Callable[[], nn.Module]:
    model_class = getattr(transformers, kind)
    return lambda: model_class(model_class.config_class(**config))


def two_berts() -> nn.Module:
    configs = (transformers.BertConfig(**ENCODER_SIZE) for _ in range(2))
    return transformers.EncoderDecoderModel(transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*configs))


ENCODER_DECODERS: dict[str, Callable[[], nn.Module]] = {
    "bart": small("BartForConditionalGeneration", **SEQ2SEQ_SIZE),
    "t5": small("T5ForConditionalGeneration", **T5_SIZE),
    "whisper": small("WhisperForConditionalGeneration", **{**WHISPER_SIZE, "max_source_positions": TOKENS}),
    "two berts": two_berts,
}
ONE_STACK: dict[str, Callable[[], nn.Module]] = {
    "gpt2": small("GPT2LMHeadModel", **ENCODER_SIZE),
    "llama": small("LlamaForCausalLM", **ENCODER_SIZE, num_key_value_heads=1),
    "bert": small("BertForTokenClassification", **ENCODER_SIZE),
    "albert": small("AlbertForMaskedLM", **ENCODER_SIZE, embedding_size=8),
}


def ids(batch: int = 1) -> Tensor:
    return torch.randint(4, WORDS, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def built(build: Callable[[], nn.Module]) -> nn.Module:
    model = build().eval()
    randomize(model)
    return model


def stack_of(model: nn.Module, side: str) -> list[nn.Module]:
    if isinstance(model, transformers.EncoderDecoderModel):
        return list(model.encoder.encoder.layer if side == "encoder" else model.decoder.bert.encoder.layer)
    return find_layers(model, side)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """As many tokens for the decoder as the encoder has."""
    if isinstance(model, transformers.WhisperForConditionalGeneration):
        sound = torch.randn(1, 8, 2 * TOKENS, generator=torch.Generator().manual_seed(1))
        return {"input_features": sound, "decoder_input_ids": ids()}
    return {"input_ids": ids(), "decoder_input_ids": ids().flip(1)}


def moves(forward: Callable[[], Tensor], last: nn.Module, token: int) -> list[int]:
    """The entries of axis 1 that have a gradient with respect to one token that the last layer of a stack returns."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> Any:
        kept.append((output if isinstance(output, Tensor) else output[0]).detach().requires_grad_())
        return kept[-1] if isinstance(output, Tensor) else (kept[-1], *output[1:])

    handle = last.register_forward_hook(keep)
    with torch.enable_grad():
        output = forward()
    handle.remove()
    weights = torch.randn(output.shape[2:], generator=torch.Generator().manual_seed(2))
    found = []
    for place in range(output.shape[1]):
        number = (output[0, place] * weights).sum()
        gradient = torch.autograd.grad(number, kept[-1], retain_graph=True, allow_unused=True)[0]
        if gradient is not None and gradient[0, token].any():
            found.append(place)
    return found


def assert_target_is_token(method: Any, inputs: Any, target: Any = (2, 1), token: Any = 2) -> None:
    by_target, by_token = method.attribute(inputs, target=target), method.attribute(inputs, token=token)
    torch.testing.assert_close(by_target, by_token, rtol=0, atol=0)


def assert_not_shown(
    forward: Any, layer: Any, inputs: Any = None, target: Any = (2, 1), kind: Any = ValueZeroing
) -> None:
    with pytest.raises(ArgumentError, match=r"not shown|no axis"):
        kind(forward, layer).attribute(vectors() if inputs is None else inputs, target=target)


@pytest.mark.parametrize("as_function", [False, True], ids=["model", "function"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_tokens_of_the_encoder_are_refused(name: str, as_function: bool) -> None:
    model = built(ENCODER_DECODERS[name])
    inputs = inputs_of(model)
    layers = stack_of(model, "encoder")
    assert moves(lambda: model(**inputs).logits, layers[-1], 2) != [2]
    forward = (lambda **given: model(**given).logits) if as_function else model
    for layer in (layers[0], layers[-1], layers):
        assert_not_shown(forward, layer, inputs, (2, 5))
    assert_not_shown(forward, layers, inputs, [(2, 5)], AttentionRollout)


@pytest.mark.parametrize("as_function", [False, True], ids=["model", "function"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_tokens_of_the_decoder_are_named(name: str, as_function: bool) -> None:
    model = built(ENCODER_DECODERS[name])
    inputs = inputs_of(model)
    layers = stack_of(model, "decoder")
    assert moves(lambda: model(**inputs).logits, layers[-1], 2) == [2]
    forward = (lambda **given: model(**given).logits) if as_function else model
    for attention in ("self", "cross"):
        assert_target_is_token(ValueZeroing(forward, layers, attention=attention), inputs, (2, 5), 2)


@pytest.mark.parametrize("as_function", [False, True], ids=["model", "function"])
@pytest.mark.parametrize("name", ONE_STACK)
def test_a_function_is_called_once_more(name: str, as_function: bool) -> None:
    """The structure of a library model is enough."""
    model = built(ONE_STACK[name])
    layers = find_layers(model)
    assert moves(lambda: model(ids()).logits, layers[-1], 2) == [2]
    calls: list[Any] = []
    model.register_forward_hook(lambda *given: calls.append(1))
    method, states = ValueZeroing((lambda x: model(x).logits) if as_function else model, layers), torch.get_rng_state()
    method.attribute(ids(3), target=[(2, 1), (0, 1), (5, 1)])
    assert calls == [1] * (1 + as_function)
    assert torch.equal(torch.get_rng_state(), states)
    assert_target_is_token(method, ids(3), [(2, 1), (0, 1), (5, 1)], [2, 0, 5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_axis_is_shown_in_any_precision(dtype: torch.dtype) -> None:
    model = built(ONE_STACK["llama"]).to(dtype)
    assert_target_is_token(LayerAttention(lambda x: model(x).logits, find_layers(model)[0]), ids())
    model = built(ENCODER_DECODERS["bart"]).to(dtype)
    assert_not_shown(model, find_layers(model, "encoder")[0], ids(), (2, 5), LayerAttention)


def test_start_logits_have_the_tokens_axis() -> None:
    model = built(small("BertForQuestionAnswering", **ENCODER_SIZE))
    layer = find_layers(model)[0]
    assert_target_is_token(ValueZeroing(lambda x: model(x).start_logits, layer), ids(2), 3, 3)
    with pytest.raises(ArgumentError, match="without logits"):
        ValueZeroing(model, layer).attribute(ids(2), target=3)


class Block(nn.Module):
    """A Transformer layer that may also read other states, as a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.cross = (nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        if read is not None:
            x = x + self.cross(x, read, read, need_weights=False)[0]
        return x + self.linear(self.norm(x)).relu()


class Model(nn.Module):
    """Blocks, and a function that makes logits of what they return. `rest` is a function of the model and the vectors.

    Args:
        rest: It runs the blocks, and returns logits whose axis 1 is as long as the tokens of the blocks.
    """

    def __init__(self, rest: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head, self.mix = nn.Linear(WIDTH, WORDS), nn.Linear(TOKENS, TOKENS)
        self.rest = rest

    def run(self, x: Tensor, start: int = 0, stop: int = 4, read: Tensor | None = None) -> Tensor:
        for block in self.blocks[start:stop]:
            x = block(x, read)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self, x)


def with_class_token(model: Model, x: Tensor) -> Tensor:
    return model.head(model.run(torch.cat([x[:, :1] * 0, x], 1)))


def with_places_between(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x + torch.arange(TOKENS)[None, :, None].clamp_max(2) // 2)
    return model.head(x)


LOWEST = torch.finfo(torch.float32).min
SAME_TOKENS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "head": lambda model, x: model.head(model.run(x)),
    "log probabilities": lambda model, x: model.head(model.run(x)).log_softmax(-1),
    "several numbers": lambda model, x: model.head(model.run(x)).unflatten(-1, (5, 6)),
    "class token": with_class_token,
    "added between": with_places_between,
    "hidden classes": lambda model, x: model.head(model.run(x)).index_fill(2, torch.tensor([3]), -torch.inf),
    "lowest number": lambda model, x: model.head(model.run(x)).index_fill(2, torch.tensor([3]), LOWEST),
    "padding is zero": lambda model, x: model.head(model.run(x)).index_fill(1, torch.tensor([5]), 0.0),
}
OTHER_TOKENS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "last tokens, in a window": lambda model, x: model.head(model.run(torch.cat([x, x], 1)))[:, TOKENS:],
    "pooled to this length": lambda model, x: model.head(model.mix(model.run(x).mT).mT),
    "reversed": lambda model, x: model.head(model.run(x)).flip(1),
    "moved by one": lambda model, x: model.head(model.run(x)).roll(1, 1),
    "a decoder in the same list": lambda model, x: model.head(model.run(x.flip(1), 2, 4, model.run(x, 0, 2))),
    "classes": lambda model, x: model.head(model.run(x).mean(1))[:, :TOKENS],
    "classes of each": lambda model, x: model.head(model.run(x).mean(1)).unflatten(-1, (TOKENS, 5)),
    "constant": lambda model, x: 0 * model.head(model.run(x)),
}


def vectors() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", SAME_TOKENS)
def test_tokens_of_unknown_models_are_named(kind: str) -> None:
    model = built(lambda: Model(SAME_TOKENS[kind]))
    for place in (0, 3):
        assert_target_is_token(ValueZeroing(model, model.blocks[place]), vectors(), [(2, 1), (4, 1)], [2, 4])


@pytest.mark.parametrize("make", [lambda x: (9 * x).long(), lambda x: x > 0], ids=["integers", "signs"])
def test_an_output_without_fractions(make: Callable[[Tensor], Tensor]) -> None:
    model = built(lambda: Model(lambda model, x: make(model.head(model.run(x)))))
    assert_target_is_token(ValueZeroing(model, model.blocks[1]), vectors())
    assert_not_shown(lambda x: model(x).flip(1), model.blocks[1])


def test_layers_below_the_output() -> None:
    model = built(lambda: Model(lambda model, x: (model.run(x, 0, 2), model.run(x, 2, 4))[0]))
    layers = list(model.blocks[:2])
    assert_target_is_token(ValueZeroing(model, layers[1]), vectors())
    for other in (layers[0], layers, model.blocks[3]):
        assert_not_shown(model, other)


@pytest.mark.parametrize("kind", OTHER_TOKENS)
def test_other_axes_of_this_length_are_refused(kind: str) -> None:
    model = built(lambda: Model(OTHER_TOKENS[kind]))
    for layer in model.blocks[:2]:
        assert_not_shown(model, layer, target=[1, 4] if kind == "classes" else [(1, 1), (4, 1)])


def test_layers_without_a_list() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lower, self.upper, self.head = Block(), Block(), nn.Linear(WIDTH, 9)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.upper(self.lower(x)))

    model = built(Two)
    assert_target_is_token(ValueZeroing(model, model.upper), vectors())
    assert_not_shown(model, model.lower)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 9)).eval()
    for layer in model[1:3]:
        assert_target_is_token(ValueZeroing(model, layer), vectors())


def test_layers_with_the_tokens_first() -> None:
    def layers() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    encoder, head = built(layers), nn.Linear(WIDTH, 9)
    forward = lambda x: head(encoder(x.transpose(0, 1))).transpose(0, 1)  # noqa: E731 - as a user writes it
    assert_target_is_token(ValueZeroing(forward, encoder.layers[0]), vectors())


def test_a_model_with_two_towers() -> None:
    def forward(x: Tensor) -> Tensor:
        one.run(x)
        return other(x)

    one, other = (built(lambda: Model(SAME_TOKENS["head"])) for _ in range(2))
    assert_target_is_token(ValueZeroing(forward, other.blocks[-1]), vectors())
    assert_not_shown(forward, one.blocks[-1])


def test_a_filled_cache_is_not_filled_twice() -> None:
    model = built(ONE_STACK["llama"])
    cache = model(ids(), use_cache=True).past_key_values
    forward = lambda x: model(x, past_key_values=cache).logits  # noqa: E731 - as a user writes it
    assert_not_shown(forward, find_layers(model)[1], ids()[:, :2], (1, 5), LayerAttention)
    assert cache.get_seq_length() == TOKENS + 2
    cache.crop(-2)
    found = LayerAttention(model, find_layers(model)[1]).attribute(
        {"input_ids": ids()[:, :2], "past_key_values": cache}, target=(1, 5)
    )
    assert cache.get_seq_length() == TOKENS
    assert found.shape == (1, TOKENS + 2)


def test_channels_of_an_image_are_no_tokens() -> None:
    config = {"depths": [1, 1], "hidden_sizes": [8, 4], "num_attention_heads": [1, 1], "num_encoder_blocks": 2}
    config |= {"patch_sizes": [2, 2], "strides": [2, 2], "sr_ratios": [1, 1], "mlp_ratios": [1, 1], "image_size": 4}
    model = built(small("PvtV2Model", **config))
    picture = torch.randn(1, 3, 4, 4)
    assert model(picture).last_hidden_state.shape[1] == 4
    for layer in find_layers(model):
        assert_not_shown(model, layer, picture, (2, 0))
