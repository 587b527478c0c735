"""Images and sound in the demo: the numbers are those of Python, and what does not fit is told."""

import html
import json
import re
import wave
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import captum_vz
from captum_vz.demo.answers import Answer, Answers, Limits
from tests.explaining.models import SOUND, SPEECH, image_classifier, sound_model

METHODS = ["value-zeroing", "value-zeroing-effect"]


@pytest.fixture
def answers() -> Iterator[Answers]:
    with closing(Answers(Limits(("agreement",), True, 40))) as found:
        yield found


def saved(kind: str, folder: Path, samples: int = 4000) -> tuple[str, str]:
    """The folder of a model with its processor, and a file for it."""
    parts = image_classifier() if kind == "image" else sound_model(SOUND if kind == "sound" else SPEECH)
    for part in parts:
        part.save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    if kind == "image":
        Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / "file.png")
        return str(folder / "model"), str(folder / "file.png")
    with wave.open(str(folder / "file.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(random.integers(-9000, 9000, samples, dtype=np.int16).tobytes())
    return str(folder / "model"), str(folder / "file.wav")


def explained(answers: Answers, model: str, file: str | None, **more: Any) -> Answer:
    return answers.explain("this text is not read", model, METHODS, "", -1, file=file, **more)


@pytest.mark.parametrize("kind", ["image", "sound", "speech"])
def test_numbers_are_those_of_python(kind: str, answers: Answers, tmp_path: Path) -> None:
    name, file = saved(kind, tmp_path)
    told, view, layers, shares, by_method, files = explained(answers, name, file)
    assert "alert" not in told
    assert "<iframe" in view
    assert layers and by_method and Path(layers).is_file() and Path(by_method).is_file()
    (numbers,) = (json.loads(Path(one).read_text()) for one in files or () if one.endswith("maps.json"))
    for method in METHODS:
        found = captum_vz.explain(name, file, method=method)
        assert numbers["methods"][method]["scores"] == found.scores.tolist()
        assert numbers["tokens"] == found.tokens
        assert all(token in shares for token in found.tokens)
        assert found.prediction.rstrip(".") in view or html.escape(found.prediction) in view


def test_table_of_many_sources(answers: Answers, tmp_path: Path) -> None:
    """The table has the twenty largest sources and the explained one. The pictures have all."""
    name, file = saved("sound", tmp_path, 40_000)
    shares = explained(answers, name, file).shares
    found = captum_vz.explain(name, file, method=METHODS[0])
    assert len(found.tokens) > 90
    largest = {*found.scores.topk(20).indices.tolist(), found.token}
    assert {int(place) for place in re.findall(r">(\d+) frame", shares)} == largest
    assert "where value-zeroing is largest" in shares


def test_what_does_not_fit(answers: Answers, tmp_path: Path) -> None:
    name, image = saved("image", tmp_path)
    for model, file, more, message in (
        (name, None, {}, "ViTForImageClassification, which takes an image: choose a file in the options"),
        (name, __file__, {}, "is no image that Pillow reads"),
        (name, image, {"truth": True}, "only texts are blanked out"),
        (name, image, {"other": "a text"}, "only texts are blanked out, or compared"),
        ("agreement", image, {}, "BertForMaskedLM, which reads a text: take the file away"),
    ):
        told = explained(answers, model, file, **more).told
        assert 'role="alert"' in told and message in told
    assert "takes no text" in answers.generate("a text", name, "value-zeroing", 2, []).told
