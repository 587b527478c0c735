"""Padding on the left moves the tokens of models that count positions from the first token: a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers, verify
from tests.reference.case import randomize

WORDS = {"vocab_size": 60, "pad_token_id": 0}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, **WORDS}
BERT |= {"max_position_embeddings": 32}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, **WORDS}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, **WORDS}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16, **WORDS}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32}
OPT = {"ffn_dim": 32, "word_embed_proj_dim": 16, **BERT}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt-neo": ("GPTNeoForCausalLM", {**BERT, "attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 2}),
    "ctrl": ("CTRLLMHeadModel", {**GPT2, "dff": 32}),
    "bert": ("BertForMaskedLM", BERT),
    "distilbert": ("DistilBertForMaskedLM", {**WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}),
    "bart": ("BartModel", BART),
    "roberta": ("RobertaForMaskedLM", BERT),
    "opt": ("OPTForCausalLM", OPT),
    "llama": ("LlamaForCausalLM", BERT),
    "mpt": ("MptForCausalLM", {"d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32, "vocab_size": 60}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 2, "vocab_size": 60}),
    "t5": ("T5EncoderModel", T5),
}
MOVED = {"gpt2", "gpt-neo", "ctrl", "bert", "distilbert", "bart"}
WITHOUT_POSITION_IDS = {"bart"}
WARNING = "Value Zeroing: 1 example(s) begin with padding, and the model gives "


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    kind, config = MODELS[name]
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**config)).eval()
    randomize(model)
    return model.to(dtype)


def layers_of(model: nn.Module) -> list[nn.Module]:
    return find_layers(model, "encoder" if isinstance(model, transformers.BartModel) else None)


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Two sentences, of seven and of four tokens. The second has padding on its left."""
    pad = model.config.pad_token_id or 0
    mask = torch.tensor([[1] * 7, [0, 0, 0, 1, 1, 1, 1]])
    ids = torch.randint(4, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.where(mask.bool(), pad), "attention_mask": mask}


def alone(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The second sentence without its padding."""
    return {name: x[1:, 3:] for name, x in inputs.items()}


def told(method: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = method.attribute(*args, **kwargs)
    return found, [str(one.message) for one in caught if "begin with padding" in str(one.message)]


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("name", MODELS)
def test_a_warning_where_the_models_call_is_moved(name: str, place: int) -> None:
    model = built(name)
    inputs, layer = inputs_of(model), layers_of(model)[place]
    own, single = (model(**some, output_hidden_states=True) for some in (inputs, alone(inputs)))
    states = "encoder_hidden_states" if name == "bart" else "hidden_states"
    change = (own[states][1][1, 3:] - single[states][1][0]).abs().max()
    assert (change > 1e-3) == (name in MOVED)
    found, messages = told(ValueZeroing(model, layer), inputs)
    assert len(messages) == (name in MOVED)
    expected = ValueZeroing(model, layer).attribute(alone(inputs))[0]
    assert ((found[1, 3:, 3:] - expected).abs().max() > 1e-3) == (name in MOVED)


@pytest.mark.parametrize("name", sorted(MOVED))
def test_what_the_warning_says_to_pass(name: str) -> None:
    model = built(name)
    inputs, method = inputs_of(model), ValueZeroing(model, layers_of(model)[1])
    _, (message,) = told(method, inputs)
    assert message.startswith(WARNING)
    assert ("because it counts padding as positions" in message) == (name not in WITHOUT_POSITION_IDS)
    expected = method.attribute(alone(inputs))[0]
    right = {key: torch.stack([x[0], x[1].roll(-3)]) for key, x in inputs.items()}
    remedies = {"pad on the right": (right, slice(0, 4))}
    if name not in WITHOUT_POSITION_IDS:
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(0)
        remedies["pass position_ids=(attention_mask.cumsum(1) - 1).clamp(0)"] = (
            inputs | {"position_ids": positions},
            slice(3, 7),
        )
    assert message.endswith(", or ".join(reversed(remedies)) + ".")
    for form, kept in remedies.values():
        found, messages = told(method, form)
        assert messages == []
        torch.testing.assert_close(found[1, kept, kept], expected, rtol=1e-4, atol=1e-6)


def test_every_way_to_call() -> None:
    model = built("gpt2")
    inputs, layers = inputs_of(model), find_layers(model)
    function = lambda **given: model(**given).logits  # noqa: E731 - as a user writes it
    for method in (LayerAttention(function, layers), ValueZeroingRollout(model, layers)):
        _, (message,) = told(method, inputs)
        assert "pass position_ids" in message
    _, (message,) = told(ValueZeroingEffect(function, layers), inputs, target=(-1, 5))
    assert "pass position_ids" in message
    ids, mask = inputs.values()
    by_place = lambda ids, mask: model(ids, attention_mask=mask).logits  # noqa: E731 - as a user writes it
    _, (message,) = told(LayerAttention(by_place, layers), ids, additional_forward_args=mask)
    assert message.endswith("text alone, pad on the right.")
    assert told(LayerAttention(by_place, layers), (ids, mask))[1] == [message]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rounding_is_no_move(dtype: torch.dtype) -> None:
    for name in ("llama", "gpt2"):
        model = built(name, dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            _, messages = told(LayerAttention(model, find_layers(model)[1]), inputs_of(model))
        assert len(messages) == (name in MOVED)


def test_other_padding_gives_no_warning() -> None:
    model = built("gpt2")
    inputs, layer = inputs_of(model), find_layers(model)[1]
    right = {key: x.flip(1) for key, x in inputs.items()}
    all_padding = {key: torch.cat([x[:1], x[1:] * 0]) for key, x in inputs.items()}
    for some in (right, all_padding, alone(inputs)):
        assert told(LayerAttention(model, layer), some)[1] == []


def test_a_cache_is_left_alone() -> None:
    model = built("gpt2")
    inputs = inputs_of(model)
    cache = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).past_key_values
    more = {
        "input_ids": inputs["input_ids"][:, :2],
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 2), value=1),
    }
    for filled in (cache, transformers.DynamicCache(config=model.config)):
        given = (more if filled is cache else inputs) | {"past_key_values": filled}
        before = filled.get_seq_length()
        assert told(LayerAttention(model, find_layers(model)[1]), given)[1] == []
        assert filled.get_seq_length() == before


def test_the_model_runs_no_further_than_the_layer() -> None:
    model = built("llama")
    layers, inputs = find_layers(model), inputs_of(model)
    counts = [0, 0]

    def count(place: int) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            counts[place] += 1

        return hook

    for place, layer in enumerate(layers):
        layer.register_forward_pre_hook(count(place))
    states = torch.get_rng_state()
    LayerAttention(model, layers[0]).attribute(inputs)
    assert counts == [2, 1]
    assert torch.equal(torch.get_rng_state(), states)


class Forgetful(nn.Module):
    """A model that takes a mask and does not use it in its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.layers[0](self.words(input_ids))
        return self.layers[1](x, src_key_padding_mask=attention_mask == 0)


def test_a_forgotten_mask_is_no_move() -> None:
    model = Forgetful().eval()
    inputs = inputs_of(built("gpt2"))
    assert told(ValueZeroing(model, model.layers[1]), inputs)[1] == []


def test_verify_names_the_positions() -> None:
    model = built("gpt2")
    inputs = inputs_of(model)
    report = verify(model, inputs)
    assert report.verdict.startswith("failed: positions: 1 example(s) begin with padding")
    assert "pass position_ids=" in report.verdict
    assert "Also failed: padding" in report.verdict
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(0)
    assert verify(model, inputs | {"position_ids": positions}).passed
    assert verify(built("llama"), inputs).passed
