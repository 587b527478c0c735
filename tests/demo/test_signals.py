"""Images and sound in the demo: the numbers are those of Python, and what does not fit is told."""

import html
import json
import re
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import captum_vz
from captum_vz.demo.answers import Answers, Limits
from tests.explaining.models import SOUND, SPEECH, image_classifier, sound_model

METHODS = ["value-zeroing", "value-zeroing-effect"]


@pytest.fixture
def answers() -> Iterator[Answers]:
    found = Answers(Limits(("agreement",), True, 40))
    yield found
    found.close()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any, Any], str]:
    """Saves a model with its processor. Returns the folder."""

    def save(model: Any, processor: Any) -> str:
        for part in (model, processor):
            part.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@pytest.fixture
def image(tmp_path: Path) -> str:
    path = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
    return str(path)


@pytest.fixture
def sound(tmp_path: Path) -> str:
    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.random.default_rng(0).integers(-9000, 9000, 4000, dtype=np.int16).tobytes())
    return str(path)


def explained(answers: Answers, model: str, file: str | None, **more: Any) -> tuple[Any, ...]:
    return answers.explain("this text is not read", model, METHODS, "", -1, file=file, **more)


@pytest.mark.parametrize("kind", ["image", "sound", "speech"])
def test_numbers_are_those_of_python(
    kind: str, answers: Answers, saved: Callable[[Any, Any], str], image: str, sound: str
) -> None:
    made = {"image": image_classifier, "sound": lambda: sound_model(SOUND), "speech": lambda: sound_model(SPEECH)}
    name = saved(*made[kind]())
    file = image if kind == "image" else sound
    told, view, layers, shares, by_method, files = explained(answers, name, file)
    assert "alert" not in told
    assert "<iframe" in view
    assert Path(layers).is_file()
    assert Path(by_method).is_file()
    (numbers,) = (json.loads(Path(one).read_text()) for one in files if one.endswith("maps.json"))
    for method in METHODS:
        found = captum_vz.explain(name, file, method=method)
        assert numbers["methods"][method]["scores"] == found.scores.tolist()
        assert numbers["tokens"] == found.tokens
        assert all(token in shares for token in found.tokens)
        assert found.prediction.rstrip(".") in view or html.escape(found.prediction) in view


def test_table_of_many_sources(answers: Answers, saved: Callable[[Any, Any], str], tmp_path: Path) -> None:
    """The table has the twenty largest sources and the explained one. The pictures have all."""
    samples = np.random.default_rng(1).integers(-9000, 9000, 40_000, dtype=np.int16)
    with wave.open(str(tmp_path / "long.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    name = saved(*sound_model(SOUND))
    _, _, _, shares, *_ = explained(answers, name, str(tmp_path / "long.wav"))
    found = captum_vz.explain(name, tmp_path / "long.wav", method=METHODS[0])
    largest = {*found.scores.topk(20).indices.tolist(), found.token}
    assert len(found.tokens) > 90
    assert {int(place) for place in re.findall(r">(\d+) frame", shares)} == largest
    assert "where value-zeroing is largest" in shares


def test_what_does_not_fit(answers: Answers, saved: Callable[[Any, Any], str], image: str, sound: str) -> None:
    name = saved(*image_classifier())
    for file, more, message in (
        (None, {}, "ViTForImageClassification, which takes an image: choose a file in the options"),
        (sound, {}, "is no image that Pillow reads"),
        (image, {"truth": True}, "only texts are blanked out"),
        (image, {"other": "a text"}, "only texts are blanked out, or compared"),
    ):
        told, *_ = explained(answers, name, file, **more)
        assert 'role="alert"' in told
        assert message in told
    told, *_ = explained(answers, "agreement", image)
    assert "BertForMaskedLM, which reads a text: take the file away" in told
    told, *_ = answers.generate("a text", name, "value-zeroing", 2, [])
    assert "takes no text" in told
