"""Padding on the left moves the tokens of models that count positions from the first token: a warning says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers, verify
from tests.reference.case import built
from tests.reference.families import ENCODER_SIZE, SEQ2SEQ_SIZE, T5_SIZE

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", ENCODER_SIZE),
    "ctrl": ("CTRLLMHeadModel", {**ENCODER_SIZE, "dff": 32}),
    "bert": ("BertForMaskedLM", ENCODER_SIZE),
    "bart": ("BartModel", SEQ2SEQ_SIZE),
    "roberta": ("RobertaForMaskedLM", ENCODER_SIZE),
    "llama": ("LlamaForCausalLM", ENCODER_SIZE),
    "t5": ("T5EncoderModel", T5_SIZE),
}
MOVED = {"gpt2", "ctrl", "bert", "bart"}
NAMED = MOVED - {"ctrl"}  # its positions are no embedding


def model_of(name: str) -> Any:
    kind, config = MODELS[name]
    return built(kind, dtype=torch.float32, **config)


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


@pytest.mark.parametrize("name", MODELS)
def test_models_that_count_padding(name: str) -> None:
    """`verify` runs the model without the padding. A map says what the model's modules show."""
    model = model_of(name)
    inputs, layer = inputs_of(model), layers_of(model)[-1]
    found, messages = told(ValueZeroing(model, layer), inputs)
    expected = ValueZeroing(model, layer).attribute(alone(inputs))[0]
    assert ((found[1, 3:, 3:] - expected).abs().max() > 1e-3) == (name in MOVED)
    assert len(messages) == (name in NAMED)
    if name in NAMED - {"bart"}:  # what the warning says to pass
        positions = {"position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(0)}
        found, messages = told(ValueZeroing(model, layer), inputs | positions)
        assert messages == []
        torch.testing.assert_close(found[1, 3:, 3:], expected, rtol=1e-4, atol=1e-6)
    if name != "bart":  # whose decoder needs ids of its own
        failed = [check.name for check in verify(model, inputs).checks if check.outcome == "failed"]
        assert ("positions" in failed) == (name in MOVED)


def test_every_way_to_call() -> None:
    model = model_of("gpt2")
    inputs, layers = inputs_of(model), find_layers(model)
    function = lambda **given: model(**given).logits  # noqa: E731 - as a user writes it
    assert len(told(ValueZeroingRollout(model, layers), inputs)[1]) == 1
    assert len(told(ValueZeroingEffect(function, layers), inputs, target=(-1, 5))[1]) == 1
    ids, mask = inputs.values()

    def by_place(ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = model(ids, None, mask, None, positions)[0]
        return logits

    method, positions = LayerAttention(by_place, layers), (mask.cumsum(1) - 1).clamp(0)
    assert len(told(method, ids, additional_forward_args=mask)[1]) == len(told(method, (ids, mask))[1]) == 1
    assert told(method, (ids, mask, positions))[1] == []


def test_other_padding_gives_no_warning() -> None:
    model = model_of("gpt2")
    inputs, layer = inputs_of(model), find_layers(model)[1]
    right = {key: x.flip(1) for key, x in inputs.items()}
    all_padding = {key: torch.cat([x[:1], x[1:] * 0]) for key, x in inputs.items()}
    cache = {"past_key_values": transformers.DynamicCache(config=model.config)}
    for some in (right, all_padding, alone(inputs), inputs | cache):
        assert told(LayerAttention(model, layer), some)[1] == []


def test_verify_names_the_positions() -> None:
    model = model_of("gpt2")
    inputs = inputs_of(model)
    report = verify(model, inputs)
    assert report.verdict.startswith("failed: positions: 1 example(s) begin with padding")
    assert "Pass position_ids=" in report.verdict
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(0)
    assert verify(model, inputs | {"position_ids": positions}).passed
