"""Texts that are longer than a model takes, read in windows, and lists of texts."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

import captum_vz
from captum_vz import ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.result import Explanations, TokenText
from captum_vz.testbed import agreement_sentences, load_model
from tests.explaining.models import classifier, reader, tokenizer

SIZE, OVERLAP = 16, 6
METHODS: dict[str, Any] = {
    "value-zeroing": ValueZeroing,
    "value-zeroing-rollout": partial(captum_vz.ValueZeroingRollout, residual=0.5),
}


def windows_by_hand(count: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """The content tokens of each window, `[CLS]` at 0 and `[SEP]` at the end."""
    room, found, start = size - 2, [], 1
    while True:
        stop = min(start + room, count - 1)
        found.append((start, stop))
        if stop == count - 1:
            return found
        start += room - overlap


def inputs_of(encoding: BatchEncoding, window: tuple[int, int]) -> tuple[dict[str, torch.Tensor], list[int]]:
    count = encoding["input_ids"].shape[1]
    places = [0, *range(*window), count - 1]
    return {name: one[:, places] for name, one in encoding.items()}, places


def test_long_text_names_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is compared before anything is computed that takes longer for a longer text."""
    monkeypatch.setattr("captum_vz.result.TokenText.of", None)
    monkeypatch.setattr("captum_vz.app.inputs.prepare_text", None)
    with pytest.raises(ArgumentError, match="pass window= to"):
        captum_vz.explain("agreement", "hat " * 200)


def test_reading_tokens_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is decoded with the few before it, however long the text is."""
    _, words = load_model()
    plain, counts, rates = words.decode, list[int](), list[float]()

    def decode(given: list[int], **options: Any) -> Any:
        counts.append(len(given))
        return plain(given, **options)

    monkeypatch.setattr(words, "decode", decode)
    for many in (50, 100):
        ids = words("hat. " * many)["input_ids"]
        counts.clear()
        assert len(set(TokenText.of(words, ids).sentences)) == many + 1  # and [SEP]
        rates.append(sum(counts) / len(ids))
    assert rates[1] < 1.1 * rates[0] < 22


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_those_of_their_windows(method: str) -> None:
    model, words = load_model()
    text = " ".join(record["masked"] for record in agreement_sentences(6)).replace("[MASK]", "hat")
    encoding = words(text, return_tensors="pt")
    count = len(encoding.tokens())
    windows = windows_by_hand(count, SIZE, OVERLAP)
    found = captum_vz.explain("agreement", text, method=method, window=(SIZE, OVERLAP), token=20)
    assert found.windows == windows
    (one,) = found.maps
    expected = torch.zeros(count, count)
    context = torch.full((count,), -1.0)
    made = METHODS[method](model, find_layers(model))
    for number, window in enumerate(windows):
        inputs, places = inputs_of(encoding, window)
        mapped = made.attribute(inputs)
        mapped = (mapped[-1] if isinstance(mapped, list) else mapped)[0]
        for row, place in enumerate(places):
            edges = [place - window[0] if number else count, window[1] - 1 - place if window[1] < count - 1 else count]
            room = min(edges)
            if place == 0:
                room = count - number
            if place == count - 1:
                room = number
            if room > context[place]:
                context[place] = room
                expected[place] = 0
                expected[place, places] = mapped[row]
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.scores, expected[20], rtol=1e-4, atol=1e-6)
    start, stop = found.rows[0].window
    outside = [i for i in range(1, count - 1) if not start <= i < stop]
    assert start <= 20 < stop
    assert found.scores[outside].eq(0).all()
    assert found.scores.sum().item() == pytest.approx(1, abs=1e-4)
    assert "no row looks outside its window" in str(found)


def test_label_of_a_long_text_is_that_of_the_mean_logits() -> None:
    """The effect on the mean of the windows' logits, with a token zeroed in all windows that hold it."""
    model, words = classifier(), tokenizer()
    text = "the pictures of some hat are scaring marcus. " * 5
    encoding = words(text, return_tensors="pt")
    count = len(encoding.tokens())
    windows = windows_by_hand(count, SIZE, OVERLAP)
    logits = torch.stack([model(**inputs_of(encoding, window)[0]).logits[0] for window in windows]).mean(0)
    label = int(logits.argmax())
    largest = captum_vz.explain("agreement", "hat " * 200, window=True, method="random")
    assert largest.windows == windows_by_hand(202, 128, 126 // 4)
    found = captum_vz.explain(model, text, tokenizer=words, window=(SIZE, OVERLAP))
    assert found.predictions[0][1] == pytest.approx(logits.softmax(-1)[label].item(), abs=1e-5)
    expected = torch.zeros(count)
    for window in windows:
        inputs, places = inputs_of(encoding, window)
        effect = ValueZeroingEffect(model, find_layers(model)).attribute(inputs, target=label)[0]
        expected[places] += effect / len(windows)
    torch.testing.assert_close(found.scores, expected, rtol=1e-4, atol=1e-5)
    rows = captum_vz.explain(model, text, tokenizer=words, method="value-zeroing", window=(SIZE, OVERLAP)).rows
    assert [row.window for row in rows] == windows
    assert all(row.name == "[CLS]" for row in rows)


def test_question_is_in_each_window() -> None:
    model, words = reader(), tokenizer()
    text = "the pictures of marcus are scaring the teacher. " * 6
    row = captum_vz.explain(model, "some hat?", text, tokenizer=words, window=(24, 8)).rows[0]
    encoding = words("some hat?", text, return_tensors="pt")
    places = [*range(encoding.sequence_ids().index(1)), *range(*row.window), len(encoding.tokens()) - 1]
    inputs = {name: one[:, places] for name, one in encoding.items()}
    effect, place = ValueZeroingEffect(model, find_layers(model)), places.index(row.token)
    by_hand = effect.attribute(inputs, target=lambda output: output.start_logits[:, place])[0]
    torch.testing.assert_close(row.scores[places], by_hand)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"window": (2, 0)}, "room for 0 others"),
        ({"window": (16, 14)}, "from 0 to 13"),
        ({"window": (16, -1)}, "from 0 to 13"),
        ({"window": 500}, "window is 500"),
        ({"window": "all"}, "window is 'all'"),
        ({"window": (1, 2, 3)}, "True, a number of"),
        ({"window": (16, True)}, "True, a number of"),
        *(({"words": one}, "'clauses' or 'sent") for one in ("phrases", 2, None, ["a"])),
    ],
)
def test_wrong_windows_and_words_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        captum_vz.explain("agreement", "hat " * 200, **options)


# Lists of texts


TEXTS = ["the pictures of some hat [MASK] scaring marcus.", "the hat [MASK] new.", "The Pictures [MASK] new."]


@pytest.mark.parametrize("options", [{}, {"target": "are"}, {"words": True, "method": "attention"}])
def test_list_is_each_text_alone(options: dict[str, Any]) -> None:
    found = captum_vz.explain("agreement", TEXTS, **options)
    assert isinstance(found, Explanations)
    assert len(found) == len(TEXTS)
    for one, text in zip(found, TEXTS, strict=True):
        alone = captum_vz.explain("agreement", text, **options)
        torch.testing.assert_close(one.scores, alone.scores)
        assert (one.tokens, one.predictions) == (alone.tokens, alone.predictions)
    assert found[1:][0] is found[1]
    with pytest.raises(ArgumentError, match="3 texts and 1"):
        captum_vz.explain("agreement", TEXTS, ["one"])
    with pytest.raises(ArgumentError, match="texts is empty"):
        captum_vz.explain("agreement", [])


def test_words_table_and_picture_of_several_texts() -> None:
    """Words are compared in lower case, and [CLS], [SEP], the mask's neighbours in brackets and "." are left out."""
    found = captum_vz.explain("agreement", TEXTS)
    words = found.words()
    own = [one.scores[place] for one in found for place, token in enumerate(one.tokens) if token == "pictures"]
    torch.testing.assert_close(words["pictures"], torch.stack(own))
    assert found.to_pandas()["text"].tolist() == [number for number, one in enumerate(found) for _ in one.tokens]
    means = [float(scores.abs().mean()) for scores in words.values()]
    assert means == sorted(means, reverse=True)
    assert not {"[cls]", "[sep]", "."} & set(words)
    found = captum_vz.explain("agreement", TEXTS, target="are")
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(TEXTS)
    assert "pictures +" in lines[1]
    assert "<td" in found._repr_html_()
    panel = found.plot(most=4).axes[0]
    assert [one.get_text() for one in panel.get_yticklabels()] == [
        f"{word} ({len(scores)})" for word, scores in list(found.words().items())[:4]
    ]
    bars = [one.get_width() for one in panel.patches]
    assert bars == pytest.approx([float(scores.mean()) for scores in list(found.words().values())[:4]])
