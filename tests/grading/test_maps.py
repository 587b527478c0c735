"""The grader of maps accepts answers that are computed by plain hooks, and names each usual mistake."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, BartModel

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.functional import cosine_distance, normalize_rows
from captum_vz.testbed import load_model
from captum_vz_lessons import check
from tests.grading import assert_named

MASK = 6


@cache
def by_hand(part: str = "layer") -> Tensor:
    """Cosine distances `(out, in)` of the last layer, or of a part of it, by two hooks and one pass a token."""
    model, tokenizer = load_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    layer: Any = model.bert.encoder.layer[-1]
    watched = {"layer": layer, "context": layer.attention.self, "projected": layer.attention.output.dense}[part]
    clean = _watched(model, encoding, layer, watched, None)
    moved = [_watched(model, encoding, layer, watched, j) for j in range(len(clean))]
    return torch.stack([cosine_distance(one, clean) for one in moved], dim=1)


def _watched(model: Any, encoding: Any, layer: Any, watched: nn.Module, zeroed: int | None) -> Tensor:
    found: list[Tensor] = []

    def zero(module: nn.Module, inputs: Any, values: Tensor) -> Tensor:
        return values if zeroed is None else values.index_fill(1, torch.tensor([zeroed]), 0)

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        found.append(output if isinstance(output, Tensor) else output[0])

    with (
        torch.no_grad(),
        layer.attention.self.value.register_forward_hook(zero),
        watched.register_forward_hook(keep),
    ):
        model(**encoding)
    return found[0][0]


def map_by_hand() -> Tensor:
    return by_hand() / by_hand().sum(1, keepdim=True)


def test_row_by_hand_is_right() -> None:
    row = map_by_hand()[MASK]
    for answer in (row, row[None], row.tolist(), row.numpy()):
        assert check.value_zeroing(answer)


ROWS = {
    "rows and columns are swapped": lambda: map_by_hand()[:, MASK],
    "columns are swapped": lambda: by_hand()[:, MASK],
    "are swapped": lambda: by_hand()[:, MASK] / by_hand()[:, MASK].sum(),
    "Divide each row by its sum": lambda: by_hand()[MASK],
    "these are similarities": lambda: normalize_rows(1 - by_hand()[MASK]),
    "are similarities": lambda: 1 - by_hand()[MASK],
    "residual connection is forgotten": lambda: normalize_rows(by_hand("context")[MASK]),
    "residual connection": lambda: normalize_rows(by_hand("projected")[MASK]),
    "these are attention weights": lambda: scores_of(LayerAttention, -1)[MASK],
    "softmax": lambda: by_hand()[MASK].softmax(-1),
    "this is layer 1": lambda: scores_of(ValueZeroing, 1)[MASK],
    "this is the row of output token 2": lambda: map_by_hand()[2],
    "this is the whole map": map_by_hand,
    "divided by its largest entry": lambda: by_hand()[MASK] / by_hand()[MASK].max(),
    "divided by its Euclidean length": lambda: by_hand()[MASK] / by_hand()[MASK].norm(),
    "the token itself is left out": lambda: normalize_rows(by_hand()[MASK] * (torch.arange(11) != MASK)),
    "these are percentages": lambda: 100 * map_by_hand()[MASK],
    "the sign is wrong": lambda: -map_by_hand()[MASK],
}
MAPS = {
    "rows and columns are swapped": lambda: map_by_hand().mT,
    "columns are swapped": lambda: normalize_rows(by_hand().mT),
    "each column is divided": lambda: by_hand() / by_hand().sum(0),
    "divided by one sum": lambda: by_hand() / by_hand().sum(),
    "Divide each row by its sum": by_hand,
    "residual connection is forgotten": lambda: normalize_rows(by_hand("context")),
    "Euclidean": lambda: scores_of(ValueZeroing, -1, distance="euclidean"),
}


def scores_of(method: Any, layer: int, **options: Any) -> Tensor:
    model, tokenizer = load_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    return method(model, find_layers(model)[layer], **options).attribute(encoding)[0]


def embedded() -> Any:
    model, tokenizer = load_model()
    return model, tokenizer(check.SENTENCE, return_tensors="pt")


def graded_map(answer: Any) -> check.Verdict:
    model, encoding = embedded()
    return check.value_zeroing(answer, encoding, model=model)


def test_mistakes_in_rows_and_maps_are_named() -> None:
    assert_named(check.value_zeroing, {words: answer() for words, answer in ROWS.items()})
    assert_named(graded_map, {words: answer() for words, answer in MAPS.items()})
    assert graded_map(map_by_hand()) and graded_map(map_by_hand()[None])


def test_unknown_mistakes_show_the_difference() -> None:
    row = map_by_hand()[MASK].clone()
    row[4] += 0.25
    verdict = check.value_zeroing(row)
    assert verdict.mistake is None
    assert "the largest difference is 2.5e-01, at (4,)" in verdict.message
    assert "shape (3,)" in check.value_zeroing([0.1, 0.2, 0.7]).message
    assert "NaN" in check.value_zeroing([float("nan")] * 11).message
    assert "type str" in check.value_zeroing("pictures").message
    assert "compute in float64" in check.value_zeroing(map_by_hand()[MASK] + 1e-4).message.lower()


def test_row_of_a_model_needs_its_inputs() -> None:
    model, tokenizer = load_model()
    encoding = tokenizer("the cat sees anna.", return_tensors="pt")
    row = ValueZeroing(model, find_layers(model)[0]).attribute(encoding, token=2)
    assert check.value_zeroing(row, encoding, model=model, layer=0, token=2)
    with pytest.raises(ArgumentError, match="without inputs"):
        check.value_zeroing(row, model=model)
    with pytest.raises(ArgumentError, match="2 examples"):
        check.value_zeroing(row, tokenizer(["some hat"] * 2, return_tensors="pt"), model=model)


def test_cross_map_and_its_mistakes() -> None:
    torch.manual_seed(0)
    size = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(vocab_size=30, **size, **heads)).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 9, 10]])}
    first, last = find_layers(model, "decoder")

    def scores(layer: nn.Module, **options: Any) -> Tensor:
        return ValueZeroing(model, layer, **options).attribute(inputs)[0]

    right = scores(last, attention="cross")
    assert right.shape == (3, 4)
    wrong = {
        "swapped": right.mT,
        "self-attention": scores(last),
        "encoder": scores(find_layers(model, "encoder")[-1]),
        "Divide each row": scores(last, attention="cross", normalize=False),
        "layer 0": scores(first, attention="cross"),
    }

    def graded(answer: Tensor) -> check.Verdict:
        return check.value_zeroing(answer, inputs, model=model, attention="cross")

    assert graded(right)
    assert_named(graded, wrong)


def test_effect_and_its_mistakes() -> None:
    model, tokenizer = load_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    are, is_ = tokenizer.convert_tokens_to_ids(["are", "is"])
    layers: Any = model.bert.encoder.layer

    def preference(zeroed: int | None, some: Any) -> float:
        def zero(module: nn.Module, inputs: Any, values: Tensor) -> Tensor:
            return values if zeroed is None else values.index_fill(1, torch.tensor([zeroed]), 0)

        handles = [layer.attention.self.value.register_forward_hook(zero) for layer in some]
        with torch.no_grad():
            logits = model(**encoding).logits[0, MASK]
        for handle in handles:
            handle.remove()
        return (logits[are] - logits[is_]).item()

    def effects(some: Any) -> Tensor:
        return torch.tensor([preference(None, some) - preference(j, some) for j in range(11)])

    def graded(answer: Tensor) -> check.Verdict:
        return check.effect(answer, encoding, model=model, target=(MASK, are), foil=(MASK, is_))

    right = effects(layers)
    assert graded(right), graded(right)
    wrong = {"sign is wrong": -right, "sign is lost": right.abs(), "last layer only": effects(layers[-1:])}
    wrong["numbers without each value"] = torch.tensor([preference(j, layers) for j in range(11)])
    assert_named(graded, wrong)

    groups = [0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 10]
    options: Any = {"model": model, "target": (MASK, are), "foil": (MASK, is_), "together": [1, 2]}
    joint = ValueZeroingEffect(model, find_layers(model)).attribute(
        encoding, target=(MASK, are), foil=(MASK, is_), feature_mask=torch.tensor([groups])
    )
    assert check.effect(joint, encoding, **options)
    assert "one at a time" in (check.effect(right, encoding, **options).mistake or "")


@torch.no_grad()
def test_steps_of_a_torch_layer_and_their_mistakes() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    hidden = torch.randn(1, 6, 16, dtype=torch.float64)
    first, last = model.layers
    x = first(hidden)[0]
    projected = x @ last.self_attn.in_proj_weight.T + last.self_attn.in_proj_bias
    q, k, v = (one.unflatten(-1, (2, 8)).transpose(0, 1) for one in projected.chunk(3, dim=-1))

    def output(values: Tensor, first: float, second: float, ff: float) -> Tensor:
        heads = [((q[h] @ k[h].T) / 8**0.5).softmax(-1) @ values[h] for h in range(2)]
        h = last.norm1(first * x + last.self_attn.out_proj(torch.cat(heads, -1)))
        return last.norm2(second * h + last.linear2(last.linear1(h).relu())) if ff else h

    def graded(first: float = 1, second: float = 1, ff: float = 1, heads: Any = slice(None)) -> check.Verdict:
        columns = []
        for j in range(6):
            zeroed = v.clone()
            zeroed[heads, j] = 0
            columns.append(cosine_distance(output(zeroed, first, second, ff), output(v, first, second, ff)))
        return check.value_zeroing(normalize_rows(torch.stack(columns, 1)), hidden, model=model)

    assert graded()
    assert "h = norm1(x" in (graded(first=0).mistake or "")
    assert "y = norm2(h" in (graded(second=0).mistake or "")
    assert "twice" in (graded(0, 0).mistake or "")
    assert "feed-forward is missing" in (graded(ff=0).mistake or "")
    assert "one head only" in (graded(heads=0).mistake or "")
