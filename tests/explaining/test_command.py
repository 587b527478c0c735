"""The command line and Python give the same numbers, for the heads of saved models."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import DataLoaderAttribution, FeatureAblation
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import captum_vz
from captum_vz import ValueGates, ValueZeroing, ValueZeroingEffect
from captum_vz.generation import context_reliance
from captum_vz.result import Explanation, Explanations
from captum_vz.study import compare
from captum_vz.testbed import load_model
from captum_vz.visualization import view
from tests.command import Output, ran, refused
from tests.documents import ROOT
from tests.explaining.models import (
    SENTENCE,
    chooser,
    classifier,
    image_classifier,
    reader,
    sentence_transformer,
    t5,
    tagger,
    tokenizer,
)

pytestmark = pytest.mark.usefixtures("folder")
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
    out, err = ran(capsys, "explain", *arguments, "--model", name, "--json")
    assert err == ""
    found = json.loads(out)
    expected = captum_vz.explain(name, arguments[0], **options).to_dict()
    assert {key: found[key] for key in expected} == json.loads(json.dumps(expected))
    if case in ("masked", "causal", "map", "every word"):
        out = ran(capsys, "explain", *arguments, "--model", name, "--output", "x.png", "--html", "x.html").out
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
        assert "the lead of THING over O " in ran(capsys, *wrong, "--target", "THING", "--foil", "O", "--truth").out


# Each line of the table "What do people ask for?" runs


PAGE = (ROOT / "tutorials" / "docs" / "explain.md").read_text("utf-8")
LINES = re.findall(r"^\| [^|]+\? \| `(.*)` \|$", PAGE, re.MULTILINE)


#: What the lines of the table name.
MODELS: dict[str, Callable[[], Any]] = {one.__name__: one for one in (classifier, tagger, reader, chooser, tokenizer)}
MODELS |= {"t5": lambda: t5(vocabulary=len(tokenizer())), "sentence_transformer": sentence_transformer}
MODELS |= {"vit": lambda: image_classifier()[0], "image_processor": lambda: image_classifier()[1]}


def test_other_lines_of_the_table() -> None:
    assert len(LINES) == 21
    (line,) = [line for line in LINES if line.startswith("DataLoader")]
    model = classifier()
    gated, ids = ValueGates(model), tokenizer()([SENTENCE] * 2, return_tensors="pt")["input_ids"]
    loader = DataLoader(TensorDataset(torch.ones(ids.shape), ids))
    names = {"DataLoaderAttribution": DataLoaderAttribution, "FeatureAblation": FeatureAblation, "loader": loader}
    found = eval(line, names | {"score": lambda gates, ids: gated(gates, ids)[:, 1]})
    expected = ValueZeroingEffect(model).attribute(ids, target=1)
    torch.testing.assert_close(found[0].view_as(expected), expected, rtol=0, atol=1e-5)
    # On the tab of all heads: two layers of four.
    (line,) = [line for line in LINES if line.startswith("view")]
    names = {"view": view, "ValueZeroing": ValueZeroing, "classifier": classifier()}
    page = eval(line, names | {"inputs": tokenizer()(SENTENCE, return_tensors="pt")})
    labels = [f"layer {layer}, head {head}" for layer in range(2) for head in range(4)]
    assert [panel.label for panel in page.methods[0].panels] == labels
    (line,) = [line for line in LINES if line.startswith("context_reliance")]
    found = eval(line, {"context_reliance": context_reliance})
    assert found.sensitive[0] == 0
    assert [found.context[place] for place in found.cues[0]] == ["pictures"]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("explain")])
def test_line_of_the_table_runs(line: str) -> None:
    Image.new("RGB", (8, 8), "red").save("cat.png")
    names: dict[str, Any] = {"explain": captum_vz.explain, "text": SENTENCE}
    names |= {name: make() for name, make in MODELS.items() if re.search(rf"\b{name}\b", line)}
    if "classifier" in names:
        names["classifier"].config.id2label = {0: "NEGATIVE", 1: "POSITIVE", 2: "OTHER"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # remarks, such as the token that is explained
        found = eval(line, names)
    if isinstance(found, Explanations):
        assert len(found) == found.to_pandas()["text"].nunique() == 2 and found.plot()
        return
    assert isinstance(found, Explanation)
    assert all(row.scores.shape == (len(found.tokens),) for row in found.rows)
    assert found.rows[0].scores.count_nonzero()
    assert found.predictions
    found.plot()
    assert found.view().html()
    assert found._repr_html_()
    assert len(found.to_pandas()) == len(found.tokens) or "t5" in line
