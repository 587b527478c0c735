"""Real models by their names, in each call that takes one. They are installed in the slow part of `.ci/run`."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import captum_vz
from captum_vz.cli import main
from captum_vz.errors import ArgumentError
from captum_vz.generation import attribute_generation
from captum_vz.study import Example, compare, run_study
from captum_vz.testbed import load_model
from captum_vz.testbed.models import model_source
from tests.documents import ROOT
from tests.view.pages import missing

pytestmark = pytest.mark.slow

PROMPTS = list(map(json.loads, (ROOT / "tests/benchmarks/prompts.jsonl").read_text("utf-8").splitlines()))
CAPITAL = "As everybody knows, the capital of Russia is"


def real(name: str) -> Any:
    """A model and its tokenizer, if they are installed."""
    try:
        return load_model(name)
    except ArgumentError as error:
        missing(str(error))


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return real("smollm2")


def test_minilm_is_the_encoder_of_its_package() -> None:
    model, tokenizer = real("minilm")
    folder, text = model_source("minilm"), tokenizer(CAPITAL, return_tensors="pt")
    torch.testing.assert_close(model(**text)[0], AutoModel.from_pretrained(folder)(**text)[0])
    assert dict(text).keys() == dict(AutoTokenizer.from_pretrained(folder)(CAPITAL)).keys()


def test_smollm2_knows_a_capital(smollm2: Any) -> None:
    model, tokenizer = smollm2
    assert len(captum_vz.find_layers(model)) == 30
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    at_end = model(**tokenizer(CAPITAL, return_tensors="pt")).logits[0, -1]
    assert tokenizer.decode(at_end.argmax()) == " Moscow"


@pytest.mark.parametrize("kind", ["fact", "name", "opposite", "agreement", "repeat"])
def test_deciding_word_is_first(smollm2: Any, kind: str) -> None:
    """The default of `explain`, and the row of Value Zeroing that it shows with it."""
    _, prompt, *_ = (one for one in PROMPTS if one["kind"] == kind)
    found = captum_vz.explain(smollm2, prompt["text"], target=prompt["good"], foil=prompt["foil"], words=True)
    assert list(found.parts) == ["decision", "value-zeroing"]
    for part in found.parts.values():
        between = part.rows[0].scores[1:-1]  # neither the first word nor the explained one
        assert found.tokens[1 + between.argmax()].strip(" ,.") == prompt["cue"], part.name


def test_calls_take_the_name(smollm2: Any, tmp_path: Path) -> None:
    found = captum_vz.explain("smollm2", CAPITAL, foil="Athens")
    assert "Russia" in found.tokens[found.scores.argmax()]
    table = compare("smollm2", CAPITAL, ["value-zeroing", "attn-lrp"], foil="Athens", layer="deciding")
    assert "Russia" in table.tokens[1 + table.shares["value-zeroing"][1:-1].argmax()]
    generated = attribute_generation("smollm2", CAPITAL, max_new_tokens=1)
    assert "Moscow" in generated.generated.labels[0]
    example = Example("1", (*PROMPTS[0]["text"].split(), "[MASK]"), 10, (6,), "are", "is")
    study = run_study("smollm2", [example], tmp_path, ["decision"], ["cue_p1"], quiet=True)
    assert study.summary["mean"].tolist() == [1]


def test_command_takes_the_name(smollm2: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CAPITAL, "--model", "smollm2", "--foil", "Athens"]) == 0
    assert "Russia" in capsys.readouterr().out


def test_picture_marks_the_layer_that_decides(smollm2: Any) -> None:
    """The description of README's picture quotes what its script computes."""
    words, _, layer, rows = runpy.run_path(str(ROOT / "tutorials" / "images" / "first.py"))["real"]()
    share = rows[f"layer {layer}"][words.index("Russia")]
    described = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"layer {layer} reads “Russia” ({100 * share:.0f} %)" in described
