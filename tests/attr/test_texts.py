"""attribute_texts: batches of many texts against one text after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, attribute_texts, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.testbed import load_model
from captum_vz.text import fill_batches

TEXTS = [
    "the pictures of some hat [MASK] scaring marcus.",
    "hats [MASK] here.",
    "some hat [MASK] scaring marcus.",
    "the hats [MASK] here.",
    "the pictures of some hat [MASK] here.",
]
MODEL, TOKENIZER = load_model()
MASKS = [TOKENIZER(text)["input_ids"].index(TOKENIZER.mask_token_id) for text in TEXTS]
ASKED: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (lambda: ValueZeroing(MODEL), {}),
    (lambda: ValueZeroing(MODEL), {"token": -2}),
    (lambda: ValueZeroing(MODEL, find_layers(MODEL)[1]), {"token": MASKS}),
    (lambda: ValueZeroingRollout(MODEL), {"token": torch.tensor(MASKS)}),
    (lambda: ValueZeroingEffect(MODEL), {"target": [(at, 5) for at in MASKS], "foil": [(at, 7) for at in MASKS]}),
    (lambda: ValueZeroingEffect(MODEL, by_layer=True), {"target": (-3, 5)}),
]


def alone(method: Any, place: int, asked: dict[str, Any]) -> Any:
    """What the method gives for one text."""
    inputs = TOKENIZER(TEXTS[place], return_tensors="pt")
    size = inputs["input_ids"].shape[1]
    each = {name: value if isinstance(value, (int, tuple)) else [value[place]] for name, value in asked.items()}
    if isinstance(each.get("target"), tuple):
        each["target"] = (size + each["target"][0], each["target"][1])
    return method.attribute(inputs, **each)


def leaves(result: Any) -> list[Tensor]:
    return result if isinstance(result, list) else [result]


@pytest.mark.parametrize(("make", "asked"), ASKED)
def test_texts_equal_one_after_another(make: Callable[..., Any], asked: dict[str, Any]) -> None:
    method = make()
    found = attribute_texts(method, TEXTS, TOKENIZER, batch_tokens=20, **asked)
    for place, own in enumerate(found):
        for one, expected in zip(leaves(own), leaves(alone(method, place, asked)), strict=True):
            torch.testing.assert_close(one, expected[0], rtol=1e-4, atol=1e-5)


def test_batches_of_similar_length(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    with MODEL.register_forward_pre_hook(note, with_kwargs=True):
        attribute_texts(ValueZeroing(MODEL), TEXTS, TOKENIZER, batch_tokens=20, show_progress=True, token=1)
    lengths = sorted(len(TOKENIZER(text)["input_ids"]) for text in TEXTS)
    assert [width for rows, width in shapes for _ in range(rows)] == [
        max(batch) for batch in fill_batches(lengths, int, len(lengths), 20) for _ in batch
    ]
    assert len(shapes) < len(TEXTS)
    assert "5/5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one text", {}, "a list of texts"),
        (TEXTS, {"batch_tokens": 0}, "batch_tokens is 0"),
        (TEXTS, {"token": [1, 2]}, "token has 2 entries"),
    ],
)
def test_misuse_of_many_texts(texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        attribute_texts(ValueZeroing(MODEL), texts, TOKENIZER, **options)
