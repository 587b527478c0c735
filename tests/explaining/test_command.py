"""The command line and Python give the same numbers, for the heads of saved models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import captum_vz
from captum_vz.cli import main
from captum_vz.study import compare
from captum_vz.testbed import load_model
from tests.command import Output, alone_in, refused
from tests.explaining.models import SENTENCE, chooser, classifier, image_classifier, reader, tagger, tokenizer


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return alone_in(tmp_path, monkeypatch)


@pytest.fixture
def saved(capsys: Output) -> Callable[[Any, Any], str]:
    """Save a model and its tokenizer."""

    def save(model: Any, words: Any) -> str:
        model.save_pretrained("model")
        words.save_pretrained("model")
        capsys.readouterr()
        return "model"

    return save


QUESTION, TEXT = "some hat?", "the pictures of marcus are scaring the teacher."
MASKED = "the pictures of some hat [MASK] scaring marcus."
CASES: dict[str, tuple[Callable[[], Any], list[str], dict[str, Any]]] = {
    "masked": (lambda: load_model()[0], [MASKED, "--layer", "1"], {"layer": 1}),
    "causal": (lambda: load_model("causal")[0], ["some hat", "--token", "hat"], {"token": "hat"}),
    "classifier": (classifier, [SENTENCE], {}),
    "label": (classifier, [SENTENCE, "--target", "person", "--foil", "THING"], {"target": "person", "foil": "THING"}),
    "map": (classifier, [SENTENCE, "--method", "value-zeroing-rollout"], {"method": "value-zeroing-rollout"}),
    "words": (classifier, ["the wug of", "--words"], {"words": True}),
    "clauses": (classifier, ["the wug, some hat.", "--clauses"], {"words": "clauses"}),
    "sentences": (classifier, ["the wug. some hat.", "--sentences"], {"words": "sentences"}),
    "pair": (classifier, [SENTENCE, "--pair", TEXT], {"text_pair": TEXT}),
    "window": (classifier, ["hat " * 90, "--window", "20", "5"], {"window": (20, 5)}),
    "largest window": (classifier, ["hat " * 90, "--window"], {"window": True}),
    "tagger": (tagger, [SENTENCE], {}),
    "every word": (tagger, [SENTENCE, "--token", "*"], {"token": "*"}),
    "tagged word": (tagger, [SENTENCE, "--token", "hat"], {"token": "hat"}),
    "answer": (reader, [QUESTION, "--pair", TEXT], {"text_pair": TEXT}),
    "choice": (chooser, [QUESTION, "--pair", "marcus", "the hat"], {"text_pair": ["marcus", "the hat"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_command_equals_python(case: str, saved: Callable[[Any, Any], str], capsys: Output) -> None:
    make, arguments, options = CASES[case]
    name = saved(make(), tokenizer())
    assert main(["explain", *arguments, "--model", name, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    expected = captum_vz.explain(name, arguments[0], **options).to_dict()
    assert {key: found[key] for key in expected} == json.loads(json.dumps(expected))
    if case in ("masked", "causal", "map", "every word"):
        assert main(["explain", *arguments, "--model", name, "--output", "x.png", "--html", "x.html"]) == 0
        out = capsys.readouterr().out
        said = expected["predictions"][0]
        assert f"the model predicts: {said['token']} {said['probability']:.2f}" in out
        assert all(row["name"] in out for row in expected["rows"])
        assert Image.open("x.png").format == "PNG"
        assert "<script" in Path("x.html").read_text()


@pytest.mark.parametrize(
    ("make", "arguments", "told"),
    [
        (classifier, [SENTENCE, "--target", "sad"], "--target is 'sad', which is no label of the model"),
        (classifier, ["hat " * 90], "pass --window to read it in windows"),
        (reader, [QUESTION], "pass the text as --pair"),
        (reader, [QUESTION, "--pair", TEXT, "--target", "nobody"], "is no part of the second text"),
        (chooser, [QUESTION], "pass two or more as --pair"),
        (classifier, [SENTENCE, "--window", "9", "1", "1"], "--window is given 3 numbers"),
    ],
)
def test_wrong_use_is_one_line(
    make: Callable[[], Any], arguments: list[str], told: str, saved: Callable[[Any, Any], str], capsys: Output
) -> None:
    name = saved(make(), tokenizer())
    assert told in refused(capsys, "explain", *arguments, "--model", name)


def test_compare_takes_models_of_one_text(saved: Callable[[Any, Any], str], capsys: Output) -> None:
    for model, words in ((chooser(), tokenizer()), image_classifier()):
        name = saved(model, words)
        for command in (["compare", SENTENCE], ["verify"]):
            assert "reads no text by itself" in refused(capsys, *command, "--model", name)
    for more in ([], ["--truth"]):
        told = refused(capsys, "compare", "the hat [MASK] small.", "--target", "is", "--foil", "is", *more)
        assert "--foil is 'is', which is the target" in told


@pytest.mark.parametrize(("make", "token"), [(classifier, None), (tagger, "hat")])
def test_compare_takes_labels(
    make: Callable[[], Any], token: str | None, saved: Callable[[Any, Any], str], capsys: Output
) -> None:
    """A label by its name or number, and its foil, as `explain` takes them; maps show the row of the same token."""
    model, place = (make(), tokenizer()), {"token": token} if token else {}
    for named in ({"target": "person", "foil": "THING"}, {"target": 2}, {}):
        table = compare(model, SENTENCE, ["value-zeroing-effect", "value-zeroing"], **named, **place)
        effect = captum_vz.explain(model, SENTENCE, **named, **place).scores.double().abs()
        torch.testing.assert_close(table.shares["value-zeroing-effect"], effect / effect.sum(), atol=1e-6, rtol=0)
        row = captum_vz.explain(model, SENTENCE, method="value-zeroing", **place)
        torch.testing.assert_close(table.shares["value-zeroing"], row.scores.double(), atol=1e-6, rtol=0)
        assert table.token == row.token
    wrong = ["compare", SENTENCE, "--model", saved(*model), *(f"--{key}={value}" for key, value in place.items())]
    assert "did you mean PERSON?): pass one of O, PERSON, THING" in refused(capsys, *wrong, "--target", "persom")
    if token is None:
        assert "has one label for the whole text" in refused(capsys, *wrong, "--truth")
    else:
        assert main([*wrong, "--target", "THING", "--foil", "O", "--truth"]) == 0
        assert "the lead of THING over O " in capsys.readouterr().out
