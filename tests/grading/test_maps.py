"""The grader of maps accepts answers that are computed by plain hooks, and names each usual mistake."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.functional import cosine_distance, normalize_rows
from captum_vz.testbed import load_model
from captum_vz_lessons import check
from tests.generation.models import case_of
from tests.grading import assert_graded

MASK = 6
MODEL, TOKENIZER = load_model()
ENCODING = TOKENIZER(check.SENTENCE, return_tensors="pt")
graded_map = partial(check.value_zeroing, inputs=ENCODING, model=MODEL)
graded_row = partial(graded_map, token=MASK)


@torch.no_grad()
def run_without(zeroed: int | None, layers: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The output of the last layer and the logits of the mask, without the value of one token in some layers."""

    def zero(module: nn.Module, inputs: Any, values: Tensor) -> Tensor:
        return values if zeroed is None else values.index_fill(1, torch.tensor([zeroed]), 0)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.attention.self.value.register_forward_hook(zero))
        found = MODEL(**ENCODING, output_hidden_states=True)
    return found.hidden_states[-1][0], found.logits[0, MASK]


@pytest.fixture(scope="module")
def distances() -> Tensor:
    """Cosine distances `(out, in)` of the last layer, by two passes for each token."""
    layers: Any = MODEL.bert.encoder.layer[-1:]
    clean = run_without(None, layers)[0]
    return torch.stack([cosine_distance(run_without(j, layers)[0], clean) for j in range(11)], dim=1)


def scores_of(method: Any, layer: int, **options: Any) -> Tensor:
    return method(MODEL, find_layers(MODEL)[layer], **options).attribute(ENCODING)[0]


def test_right_rows_and_maps(distances: Tensor) -> None:
    right = distances / distances.sum(1, keepdim=True)
    for answer in (right[MASK], right[MASK][None], right[MASK].tolist(), right[MASK].numpy()):
        assert graded_row(answer)
    assert graded_map(right) and graded_map(right[None])
    assert graded_map(scores_of(ValueZeroing, 0)[2], layer=0, token=2)


def test_mistakes_in_rows_are_named(distances: Tensor) -> None:
    right, row = normalize_rows(distances), distances[MASK]
    rows = {
        "rows and columns are swapped": right[:, MASK],
        "columns are swapped": distances[:, MASK],
        "are swapped": distances[:, MASK] / distances[:, MASK].sum(),
        "Divide each row by its sum": row,
        "these are similarities": normalize_rows(1 - row),
        "are similarities": 1 - row,
        "these are attention weights": scores_of(LayerAttention, -1)[MASK],
        "softmax": row.softmax(-1),
        "this is layer 1": scores_of(ValueZeroing, 1)[MASK],
        "this is the row of output token 2": right[2],
        "this is the whole map": right,
        "divided by its largest entry": row / row.max(),
        "divided by its Euclidean length": row / row.norm(),
        "the token itself is left out": normalize_rows(row * (torch.arange(11) != MASK)),
        "these are percentages": 100 * right[MASK],
        "the sign is wrong": -right[MASK],
    }
    assert_graded(graded_row, rows)


def test_mistakes_in_maps_are_named(distances: Tensor) -> None:
    maps = {
        "rows and columns are swapped": normalize_rows(distances).mT,
        "columns are swapped": normalize_rows(distances.mT),
        "each column is divided": distances / distances.sum(0),
        "divided by one sum": distances / distances.sum(),
        "Divide each row by its sum": distances,
        "Euclidean": scores_of(ValueZeroing, -1, distance="euclidean"),
    }
    assert_graded(graded_map, maps)
    right = normalize_rows(distances)[MASK]
    verdict = graded_row(right + 0.25 * (torch.arange(11) == 4))
    assert verdict.mistake is None
    assert "the largest difference is 2.5e-01, at (4,)" in verdict.message
    assert "shape (3,)" in graded_row([0.1, 0.2, 0.7]).message
    assert "NaN" in graded_row([float("nan")] * 11).message
    assert "type str" in graded_row("pictures").message
    assert "compute in float64" in graded_row(right + 1e-4).message


def test_cross_map_and_its_mistakes() -> None:
    model = case_of("bart", torch.float32).model
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 9, 10]])}
    first, *_, last = find_layers(model, "decoder")

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
    graded = partial(check.value_zeroing, inputs=inputs, model=model, attention="cross")
    assert_graded(graded, wrong, right)


def test_source_that_is_read_and_its_mistakes() -> None:
    model = case_of("bart", torch.float32).model
    inputs = {"input_ids": torch.tensor([[5, 5, 5, 5]]), "decoder_input_ids": torch.tensor([[2, 9, 10]])}
    scores: Any = ValueZeroing(model, find_layers(model, "decoder")[-1], attention="cross").attribute(inputs)
    best = int(scores[0, 1].argmax())
    graded = partial(check.source_read, model=model, inputs=inputs, row=1)
    assert_graded(graded, {"holds the same token": (best + 1) % 4}, best)
    assert not graded(7)


def test_effect_and_its_mistakes() -> None:
    are = TOKENIZER.convert_tokens_to_ids("are")
    layers: Any = MODEL.bert.encoder.layer

    def logits(some: Any) -> Tensor:
        return torch.stack([run_without(j, some)[1][are] for j in range(11)])

    clean, target = run_without(None, layers)[1][are], (MASK, are)
    right = clean - logits(layers)
    graded = partial(check.effect, inputs=ENCODING, model=MODEL, target=target)
    assert graded(right), graded(right)
    wrong = {"sign is wrong": -right, "sign is lost": right.abs(), "last layer only": clean - logits(layers[-1:])}
    assert_graded(graded, wrong | {"numbers without each value": logits(layers)})
    groups = torch.tensor([[0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 10]])
    joint = ValueZeroingEffect(MODEL, list(layers)).attribute(ENCODING, target=target, feature_mask=groups)
    assert graded(joint, together=[1, 2])
    assert_graded(partial(graded, together=[1, 2]), {"one at a time": right})


def test_one_head_of_a_torch_layer() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    hidden = torch.randn(1, 6, 16, dtype=torch.float64)
    graded = partial(check.value_zeroing, inputs=hidden, model=model)
    right, wrong = (ValueZeroing(model, model.layers[-1], heads=one).attribute(hidden)[0] for one in (None, [0]))
    assert_graded(graded, {"one head only": wrong}, right)
