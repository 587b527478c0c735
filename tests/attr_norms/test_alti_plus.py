"""ALTIPlus against the naive twin that writes every vector of both stacks out, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from captum_vz import ALTI, ALTIPlus
from captum_vz.functional import encoder_decoder_rollout
from tests.captum.footprint import assert_same_numbers, footprint, numbers
from tests.engine.compare import assert_same
from tests.reference import FAMILIES
from tests.reference.alti_plus import ENCODER_DECODERS, POST_NORM, naive_alti_plus, stacks

each_model = pytest.mark.parametrize("name", ENCODER_DECODERS)
SOURCES, TOKENS = 7, 5


def method_of(name: str, **options: Any) -> ALTIPlus:
    encoder, decoder = stacks(name)
    return ALTIPlus(decoder.model, [*encoder.layers, *decoder.layers], **options)


def inputs_of(name: str) -> dict[str, Tensor]:
    return stacks(name)[1].inputs


@pytest.mark.parametrize("p", [1, 2])
@each_model
def test_every_layer_of_every_model(name: str, p: Any) -> None:
    found = method_of(name, p=p).attribute(inputs_of(name), all_layers=True)
    assert_same(found, naive_alti_plus(*stacks(name), name in POST_NORM, f"l{p}"))


@each_model
def test_padded_batch_equals_its_examples(name: str) -> None:
    case, method = stacks(name)[1], method_of(name)
    together = method.attribute(case.inputs)
    for index in range(case.batch):
        alone = method.attribute(case.example(index).inputs)[0]
        tokens = len(alone)
        source = alone.shape[1] - tokens
        assert_same(together[index, :tokens, :source], alone[:, :source])
        assert_same(together[index, :tokens, SOURCES : SOURCES + tokens], alone[:, source:])


def test_padding_on_the_left() -> None:
    """T5 knows positions by their distances only."""
    case, method = stacks("t5")[1], method_of("t5")
    one = case.example(1).inputs
    padded = {
        key: torch.cat([torch.zeros(1, 2 if key.startswith("decoder") else 3, dtype=torch.long), value], dim=1)
        for key, value in one.items()
    }
    alone, padded_scores = method.attribute(one), method.attribute(padded)
    source, prefix = padded_scores[:, 2:].split([8, 7], dim=-1)
    assert not padded_scores[:, :2].any()
    assert_same(torch.cat([source[..., 3:], prefix[..., 2:]], dim=-1), alone)
    assert not source[..., :3].any()
    assert not prefix[..., :2].any()


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_the_rows_of_targets(name: str) -> None:
    method, inputs = method_of(name), inputs_of(name)
    whole = method.attribute(inputs)
    assert_same(method.attribute(inputs, token=1), whole[:, 1])
    assert_same(method.attribute(inputs, token=[0, 2, 1]), whole[[0, 1, 2], [0, 2, 1]])
    assert_same(method.attribute(inputs, target=(2, 3)), whole[:, 2])  # of the last hidden state
    with pytest.warns(UserWarning, match="example is padding"):
        assert not method.attribute(inputs, token=4)[0].any()
    found = ALTIPlus(lambda *ids: method.forward_func(**dict(zip(inputs, ids, strict=True))), method.layer).attribute(
        tuple(inputs.values()), token=1
    )
    assert_same(torch.cat([one for one in found if one.any()], 1), whole[:, 1])  # masks have zeros


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_decoder_layers_without_the_encoder(name: str) -> None:
    encoder, decoder = stacks(name)
    scores = ALTIPlus(decoder.model, decoder.layers).attribute(decoder.inputs)
    rolled = ALTI(decoder.model, encoder.layers).attribute(decoder.inputs)
    whole = method_of(name).attribute(decoder.inputs)
    assert_same(scores[..., :SOURCES] @ rolled, whole[..., :SOURCES])
    assert_same(scores[..., SOURCES:], whole[..., SOURCES:])


def test_users_cache_stays() -> None:
    method, inputs = method_of("bart"), inputs_of("bart")
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    scores = method.attribute({**inputs, "past_key_values": cache, "use_cache": True})
    assert (cache.get_seq_length(), cache.cross_attention_cache.get_seq_length()) == (0, 0)
    assert_same(scores, method.attribute({**inputs, "use_cache": False}))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_model_is_unchanged(implementation: str) -> None:
    model = ENCODER_DECODERS["bart"][1].build(attn_implementation=implementation).model
    before, values = footprint(model), numbers(model)
    scores = ALTIPlus(model, [*model.encoder.layers, *model.decoder.layers]).attribute(inputs_of("bart"))
    assert footprint(model) == before
    assert_same_numbers(model, values)
    assert_same(scores, method_of("bart").attribute(inputs_of("bart")))


def test_known_rollouts() -> None:
    encoder = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    first = torch.tensor([[[0.2, 0.4, 0.4, 0.0], [0.0, 0.5, 0.25, 0.25]]])
    rolled = [[0.1, 0.5, 0.4, 0.0], [0.0, 0.5, 0.25, 0.25]]
    (one,) = encoder_decoder_rollout(encoder, [first])
    assert_same(one, torch.tensor([rolled]).double(), 1e-7)
    (alone,) = encoder_decoder_rollout(None, [first])
    assert_same(alone, first.double())
    second = torch.tensor([[[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    last = encoder_decoder_rollout(encoder, [first, second])[-1]
    assert_same(last, torch.tensor([[rolled[0], [0.5, 0.5, 0.0, 0.0]]]).double(), 1e-7)


def test_bad_arguments() -> None:
    encoder, decoder = stacks("bart")
    gpt2, right = FAMILIES["gpt2"].case, [*encoder.layers, *decoder.layers]
    for case, layers, options, message in (
        (decoder, encoder.layers, {}, "an encoder, then"),
        (gpt2, gpt2.layers, {}, "an encoder, then"),
        (decoder, right[3:] + right[:3], {}, "another order than"),
        (decoder, right, {"feature_mask": torch.zeros(1, 12, dtype=torch.long)}, "takes no feature"),
        (decoder, right, {"token": 5}, "5 is out of range"),
    ):
        with pytest.raises(AssertionError, match=message):
            ALTIPlus(case.model, layers).attribute(case.inputs, **options)
    with pytest.raises(AssertionError, match="p is 3: pass 1 or 2"):
        method_of("bart", p=3)
    with pytest.raises(AssertionError, match="layer of a decoder"):
        encoder_decoder_rollout(None, [])
    with pytest.raises(AssertionError, match="Map 0 is"):
        encoder_decoder_rollout(torch.eye(2)[None], [torch.ones(1, 2, 5)])


def test_unsupported_layer_is_refused() -> None:
    model = ENCODER_DECODERS["bart"][1].build().model

    class Gated(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor) -> Tensor:
            return self.inner(hidden) * hidden.sigmoid()

    model.decoder.layers[1].encoder_attn.out_proj = Gated(model.decoder.layers[1].encoder_attn.out_proj)
    with pytest.raises(AssertionError, match="context to a Gated"):
        ALTIPlus(model, [*model.encoder.layers, *model.decoder.layers]).attribute(inputs_of("bart"))
