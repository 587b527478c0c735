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
from captum_vz.testbed import check, load_model

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
        assert check.value_zeroing_row(answer)


ROWS = {
    "swapped": (lambda: map_by_hand()[:, MASK], "rows and columns are swapped"),
    "swapped distances": (lambda: by_hand()[:, MASK], "rows and columns are swapped"),
    "swapped, divided": (lambda: by_hand()[:, MASK] / by_hand()[:, MASK].sum(), "rows and columns are swapped"),
    "distances": (lambda: by_hand()[MASK], "Divide each row by its sum"),
    "similarities": (lambda: normalize_rows(1 - by_hand()[MASK]), "these are similarities"),
    "cosines": (lambda: 1 - by_hand()[MASK], "these are similarities"),
    "context": (lambda: normalize_rows(by_hand("context")[MASK]), "residual connection is forgotten"),
    "projection": (lambda: normalize_rows(by_hand("projected")[MASK]), "residual connection is forgotten"),
    "attention": (lambda: scores_of(LayerAttention, -1)[MASK], "these are attention weights"),
    "softmax": (lambda: by_hand()[MASK].softmax(-1), "softmax"),
    "layer": (lambda: scores_of(ValueZeroing, 1)[MASK], "this is layer 1"),
    "token": (lambda: map_by_hand()[2], "this is the row of output token 2"),
    "map": (map_by_hand, "this is the whole map"),
    "largest": (lambda: by_hand()[MASK] / by_hand()[MASK].max(), "divided by its largest entry"),
    "length": (lambda: by_hand()[MASK] / by_hand()[MASK].norm(), "divided by its Euclidean length"),
    "own value": (lambda: normalize_rows(by_hand()[MASK] * (torch.arange(11) != MASK)), "the token itself is left out"),
    "percent": (lambda: 100 * map_by_hand()[MASK], "these are percentages"),
    "sign": (lambda: -map_by_hand()[MASK], "the sign is wrong"),
}


def scores_of(method: Any, layer: int, **options: Any) -> Tensor:
    model, tokenizer = load_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    return method(model, find_layers(model)[layer], **options).attribute(encoding)[0]


@pytest.mark.parametrize("case", ROWS)
def test_mistake_in_row_is_named(case: str) -> None:
    answer, words = ROWS[case]
    verdict = check.value_zeroing_row(answer())
    assert not verdict
    assert words in verdict.message
    assert verdict.mistake == verdict.message


MAPS = {
    "swapped": (lambda: map_by_hand().mT, "rows and columns are swapped"),
    "swapped, divided": (lambda: normalize_rows(by_hand().mT), "rows and columns are swapped"),
    "columns": (lambda: by_hand() / by_hand().sum(0), "each column is divided"),
    "one sum": (lambda: by_hand() / by_hand().sum(), "divided by one sum"),
    "distances": (by_hand, "Divide each row by its sum"),
    "context": (lambda: normalize_rows(by_hand("context")), "residual connection is forgotten"),
    "euclidean": (lambda: scores_of(ValueZeroing, -1, distance="euclidean"), "Euclidean"),
}


def test_map_by_hand_is_right() -> None:
    assert check.value_zeroing_map(map_by_hand())
    assert check.value_zeroing_map(map_by_hand()[None])


@pytest.mark.parametrize("case", MAPS)
def test_mistake_in_map_is_named(case: str) -> None:
    answer, words = MAPS[case]
    assert words in (check.value_zeroing_map(answer()).mistake or "")


@pytest.mark.parametrize("answer", [None, ...])
def test_missing_answer_is_named(answer: Any) -> None:
    verdict = check.value_zeroing_row(answer)
    assert (verdict.passed, verdict.mistake) == (False, "no answer")
    assert str(verdict).startswith("Not yet. value_zeroing_row: there is no answer yet.")


def test_unknown_mistakes_show_the_difference() -> None:
    row = map_by_hand()[MASK].clone()
    row[4] += 0.25
    verdict = check.value_zeroing_row(row)
    assert verdict.mistake is None
    assert "the largest difference is 2.5e-01, at (4,)" in verdict.message
    assert "shape (3,)" in check.value_zeroing_row([0.1, 0.2, 0.7]).message
    assert "NaN" in check.value_zeroing_row([float("nan")] * 11).message
    assert "type str" in check.value_zeroing_row("pictures").message
    assert "compute in float64" in check.value_zeroing_row(map_by_hand()[MASK] + 1e-4).message.lower()


def test_nearest_mistake_is_named() -> None:
    """Answers of several mistakes are nearly alike. So the first that fits is not always the one that was made."""
    nearly = [("one", [0.5, 0.5003]), ("two", [0.5, 0.5])]
    assert check.value([0.5, 0.5], [0.4, 0.6], nearly).mistake == "two"
    assert check.value([0.4, 0.6001], [0.4, 0.6], [("one", [0.4, 0.6005])]).mistake is None  # rounding explains more


def test_row_of_a_model_needs_its_token() -> None:
    model, tokenizer = load_model()
    encoding = tokenizer("the cat sees anna.", return_tensors="pt")
    row = ValueZeroing(model, find_layers(model)[0]).attribute(encoding, token=2)
    assert check.value_zeroing_row(row, encoding, model=model, layer=0, token=2)
    with pytest.raises(ArgumentError, match="token is None"):
        check.value_zeroing_row(row, encoding, model=model)
    with pytest.raises(ArgumentError, match="without inputs"):
        check.value_zeroing_row(row, model=model)


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
    assert check.cross_map(right, model, inputs)
    wrong = {
        "swapped": right.mT,
        "self-attention": scores(last),
        "encoder": scores(find_layers(model, "encoder")[-1]),
        "Divide each row": scores(last, attention="cross", normalize=False),
        "layer 0": scores(first, attention="cross"),
    }
    for words, answer in wrong.items():
        assert words in (check.cross_map(answer, model, inputs).mistake or ""), words


def test_joint_row_and_its_mistakes() -> None:
    model, tokenizer = load_model()
    encoding = tokenizer(check.SENTENCE, return_tensors="pt")
    groups = torch.tensor([0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 8])
    method = ValueZeroing(model, find_layers(model)[-1])
    alone = method.attribute(encoding, token=MASK)[0]
    right = method.attribute(encoding, token=MASK, feature_mask=groups[None])[0]
    first = torch.tensor([0, 1, 3, 4, 6, 7, 8, 9, 10])  # the first token of each group
    options: Any = {"model": model, "token": MASK}
    assert check.joint_row(right, encoding, groups, **options)
    assert check.joint_row(right[first], encoding, groups, **options)
    summed = torch.zeros(9).scatter_add(0, groups, alone)
    for answer in (alone, summed, summed[groups]):
        assert "one at a time" in (check.joint_row(answer, encoding, groups, **options).mistake or "")


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
    assert "sign is wrong" in (graded(-right).mistake or "")
    assert "sign is lost" in (graded(right.abs()).mistake or "")
    assert "last layer only" in (graded(effects(layers[-1:])).mistake or "")
    without = torch.tensor([preference(j, layers) for j in range(11)])
    assert "numbers without each value" in (graded(without).mistake or "")

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
        return check.value_zeroing_map(normalize_rows(torch.stack(columns, 1)), hidden, model=model)

    assert graded()
    assert "h = norm1(x" in (graded(first=0).mistake or "")
    assert "y = norm2(h" in (graded(second=0).mistake or "")
    assert "twice" in (graded(0, 0).mistake or "")
    assert "feed-forward is missing" in (graded(ff=0).mistake or "")
    assert "one head only" in (graded(heads=0).mistake or "")
