"""The cases that give a warning, and cases that give none."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from captum.attr import Saliency
from torch import Tensor, nn
from transformers import VisualBertConfig, VisualBertModel

from captum_vz import (
    AttentionFlow,
    AttentionRollout,
    LayerAttention,
    TokenAttribution,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
    find_layers,
)
from captum_vz.errors import RefusedError
from tests.reference import FAMILIES, Case

METHODS = [ValueZeroing, LayerAttention, ValueZeroingRollout, AttentionRollout, AttentionFlow]
each_method = pytest.mark.parametrize("method", METHODS)


def told(case: Case, method: Any, **arguments: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = method(case.model, case.layers).attribute(case.inputs, **arguments)
    assert all(one.filename == __file__ for one in caught)  # it points at the caller's line
    return answer, [str(one.message) for one in caught]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "wav2vec2", "t5-encoder", "bart-decoder", "vit"])
@each_method
def test_padded_batch_gives_no_warning(method: Any, name: str) -> None:
    case = FAMILIES[name].case
    for arguments in ({}, {"token": 0}, {"token": 2}):
        _, messages = told(case, method, **arguments)
        assert messages == []


@each_method
def test_padded_target_warns_once(method: Any) -> None:
    case = FAMILIES["bert"].case  # three examples of 7, 5 and 3 tokens
    for target in (5, -1, [0, 6, 0], torch.tensor([0, 0, 3])):
        answer, (message,) = told(case, method, token=target)
        assert message.startswith(f"{method.get_name()}: the target token of an example is padding")
        targets = [target] * 3 if isinstance(target, int) else [int(one) for one in target]
        for row in answer if isinstance(answer, list) else [answer]:
            for b, length in enumerate((7, 5, 3)):
                assert row[b].any() == (targets[b] % 7 < length)


@pytest.mark.parametrize("target", [None, 1])
def test_unchanged_row_warns(target: int | None) -> None:
    case = FAMILIES["bert"].build()
    with torch.no_grad():
        case.layers[1].attention.self.value.weight.zero_()
        case.layers[1].attention.self.value.bias.zero_()
    maps, (message,) = told(case, ValueZeroing, token=target)
    rows = 15 if target is None else 3
    assert message == f"Value Zeroing: {rows} rows of layer 1 (BertLayer) are zero: no source changes these tokens."
    assert not maps[1].any()
    assert maps[0].any()
    assert maps[2].any()


@pytest.mark.parametrize("target", [None, 1])
@pytest.mark.parametrize("distance", ["cosine", "euclidean", "l1"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
@pytest.mark.parametrize(("size", "tells"), [(1e4, False), (1e7, True)])
def test_row_changed_by_rounding_warns(size: float, tells: bool, name: str, distance: str, target: int | None) -> None:
    case = FAMILIES[name].build()
    last = case.layers[-1]

    def carry_much(layer: Any, args: Any) -> Any:
        states = args[0].clone()
        states[:, 1] *= size
        return (states, *args[1:])

    last.register_forward_pre_hook(carry_much)

    def of_last(dtype: torch.dtype) -> tuple[torch.Tensor, list[str]]:
        case.model.to(dtype)
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in case.inputs.items()}
        method = partial(ValueZeroing, distance=distance)
        maps, messages = told(replace(case, inputs=inputs), method, token=target)
        return maps[-1], messages

    (rounded, messages), (right, nothing) = of_last(torch.float32), of_last(torch.float64)
    assert nothing == []
    assert ((rounded - right).abs().max() > 0.01) == tells
    about = f"{len(rounded)} rows of layer 2 ({type(last).__name__}) change by hardly more than float32 rounds"
    assert messages == [f"Value Zeroing: {about}: run the model in float64 (model.double())."] * tells


@pytest.mark.parametrize(("name", "side"), [("bert", "right"), ("bert", "left"), ("llama", "right"), ("gpt2", "left")])
@pytest.mark.parametrize("kind", [ValueZeroing, LayerAttention, ValueZeroingEffect])
def test_padding_without_a_mask_warns(name: str, side: str, kind: Any) -> None:
    case = FAMILIES[name].build()
    config, ids = case.model.config, torch.randint(5, 12, (3, 7))
    config.pad_token_id, config.eos_token_id, config.bos_token_id = 3, 3, None
    pads = {"right": slice(5, None), "left": slice(0, 2)}[side]
    ids[1, pads] = 3
    mask = (ids != 3).long()
    method = kind(lambda *x, **y: case.model(*x, **y).last_hidden_state[:, 0, 0], case.layers)
    message = r"1 example\(s\) end or begin with padding \(id 3\) that no mask hides, .*: pass attention_mask\."
    for inputs in (ids, {"input_ids": ids}):
        with pytest.warns(UserWarning, match=message) as caught:
            method.attribute(inputs)
        assert len(caught) == 1
    ids[2, -1] = 3  # one token that ends a text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*begin with padding, which")  # of padding that a mask hides
        method.attribute({"input_ids": ids, "attention_mask": mask})
        method.attribute({"input_ids": ids[[0, 2]]})
        method.attribute(ids, additional_forward_args=(None, mask) if name == "gpt2" else (mask,))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_without_a_mask_on_embeddings(side: str) -> None:
    case = FAMILIES["bert"].build()
    case.model.config.pad_token_id = 3
    ids = torch.randint(5, 12, (3, 7))
    ids[1, {"right": slice(5, None), "left": slice(0, 2)}[side]] = 3
    method = TokenAttribution(case.model, Saliency, None)
    for inputs in (ids, {"input_ids": ids}):
        with pytest.warns(UserWarning, match=r"1 example\(s\) end"):
            method.attribute(inputs, target=(2, 1), baselines="zero")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        method.attribute({"input_ids": ids, "attention_mask": (ids != 3).long()}, target=(2, 1), baselines="zero")
        method.attribute(ids[[0, 2]], target=(2, 1), baselines="zero")


class Prompted(nn.Module):
    """A model behind two virtual tokens: of the sequence (prompt tuning), or of its cache (prefix tuning)."""

    def __init__(self, case: Case, prefix: bool) -> None:
        super().__init__()
        self.model, self.prefix = case.model, prefix
        width = case.model.get_input_embeddings().embedding_dim
        self.virtual = nn.Parameter(torch.randn(1, 2, width, dtype=torch.float64))

    def vectors(self, ids: Tensor) -> Tensor:
        virtual = self.virtual.expand(len(ids), -1, -1)
        return torch.cat([virtual, self.model.get_input_embeddings()(ids)], 1)

    def forward(self, input_ids: Tensor) -> Any:
        if not self.prefix:
            return self.model(inputs_embeds=self.vectors(input_ids))
        cache = self.model(inputs_embeds=self.virtual.expand(len(input_ids), -1, -1), use_cache=True).past_key_values
        for layer in cache.layers:
            layer.values = layer.values * 2
        return self.model(input_ids, past_key_values=cache)


@pytest.mark.parametrize("kind", [ValueZeroing, LayerAttention, ValueZeroingRollout])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_prompt_tuning(name: str, kind: Any) -> None:
    case = FAMILIES[name].case
    model, ids = Prompted(case, False), torch.randint(4, 12, (2, 5))
    whole = kind(case.model, case.layers).attribute({"inputs_embeds": model.vectors(ids)})
    method = kind(model, case.layers)
    for inputs in (ids, {"input_ids": ids}):
        with pytest.warns(UserWarning, match="inputs has 5 tokens"):
            torch.testing.assert_close(method.attribute(inputs), whole)
        expected = [one[:, 3] for one in whole] if isinstance(whole, list) else whole[:, 3]
        for place in ({"token": 3}, {"target": (3, 0)}):  # they count virtual tokens too
            with pytest.warns(UserWarning, match="inputs has 5 tokens"):
                torch.testing.assert_close(method.attribute(inputs, **place), expected)


def test_token_of_text_with_an_image() -> None:
    """An image comes before or after the text. A position of the text may be one of the image in the layer."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = VisualBertModel(VisualBertConfig(vocab_size=30, visual_embedding_dim=12, **sizes)).eval()
    inputs = {"input_ids": torch.tensor([[5, 9, 3, 7, 8]]), "attention_mask": torch.ones(1, 5)}
    inputs |= {"visual_embeds": torch.randn(1, 3, 12), "visual_attention_mask": torch.ones(1, 3)}
    method = ValueZeroing(model, find_layers(model)[0])
    with pytest.warns(UserWarning, match="8 output tokens"):
        row = method.attribute(inputs, token=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = method.attribute(inputs)
    torch.testing.assert_close(row, whole[:, -1])


def test_prefix_tuning_and_a_class_token() -> None:
    case = FAMILIES["llama"].case
    method = ValueZeroing(Prompted(case, True), case.layers[1:])  # the first run of a layer fills the cache
    with pytest.raises(RefusedError, match="are not related"):
        method.attribute(torch.randint(4, 12, (2, 5)))
    with pytest.warns(UserWarning, match="and 7 sources"):
        (found,) = method.attribute(torch.randint(4, 12, (2, 5)), token=-1, run=-1)[:1]
    assert found.shape == (2, 7)
