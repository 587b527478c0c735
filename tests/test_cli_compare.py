"""The command `compare`: its table, its truth, and what its pictures carry."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from captum_vz.cli import main
from captum_vz.study import compare
from captum_vz.testbed import load_model
from captum_vz.visualization import read_provenance
from captum_vz.visualization.pictures.files import weights_fingerprint
from tests.command import Output

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
MASK = 6
CHOSEN = ["value-zeroing", "attention", "position"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(capsys: Output, *arguments: str) -> str:
    assert main(["compare", SENTENCE, "--methods", *CHOSEN, *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_what_is_told_of_layers_targets_and_rises(capsys: Output) -> None:
    assert main(["compare", SENTENCE, "--methods", "random", "saliency"]) == 0
    assert capsys.readouterr().out.startswith("the tokens on which [MASK] draws most\n")
    assert main(["compare", SENTENCE, "--methods", "random", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer"] is None
    assert main(["compare", SENTENCE, "--methods", "attention", "--target", "are"]) == 0
    assert "--target changes no score" in capsys.readouterr().err
    assert main(["compare", SENTENCE, "--methods", "attention", "value-zeroing-effect", "--target", "are"]) == 0
    assert capsys.readouterr().err == ""
    # Without some token the lead rises, so that "falls" alone would be false.
    text = "the pictures of some hat [MASK] small."
    asked = ["compare", text, "--methods", "random", "--truth", "--target", "are", "--foil", "were"]
    assert main([*asked, "--json"]) == 0
    falls = [fall for fall in json.loads(capsys.readouterr().out)["falls"] if fall is not None]
    assert max(falls, key=abs) < 0 < max(falls)
    assert main(asked) == 0
    said = "the lead of are over were changes most (+ it falls, - it rises) without: "
    assert said in capsys.readouterr().out


def test_competing_answers_are_told(capsys: Output) -> None:
    """A model whose question nobody knows, here the same model in a folder."""
    for one in load_model():
        one.save_pretrained("folder")
    capsys.readouterr()
    line = "are 0.51 competes with were 0.49: --foil were asks why are and not were"
    assert line in compared(capsys, "--truth", "--model", "folder")
    assert "competes" not in compared(capsys, "--truth", "--model", "folder", "--foil", "were")


def test_picture_and_order_of_methods(capsys: Output) -> None:
    for options, shown in (((), False), (("--truth",), True)):
        assert compared(capsys, "--output", "methods.svg", *options).endswith("picture: methods.svg\n")
        drawn = Path("methods.svg").read_text("utf-8")
        assert (">blanking out</text>" in drawn) is shown
    agreement = compare("agreement", SENTENCE, CHOSEN, foil="is", truth=True).agreement
    _, heads, *lines = compared(capsys, "--truth", "--foil", "is").splitlines()
    assert heads.split()[:2] == ["method", "agrees"]
    expected = sorted(agreement.items(), key=lambda one: -one[1])
    assert [line.split()[:2] for line in lines[:3]] == [[name, f"{one:.2f}"] for name, one in expected]


# What pictures carry


@pytest.mark.parametrize(
    ("arguments", "model", "method", "name"),
    [
        (["explain", SENTENCE, "--layer", "0"], "agreement", "value-zeroing", "maps.png"),
        (["explain", SENTENCE, "--method", "random"], "agreement", "random", "scores.svg"),
        (["compare", SENTENCE, "--methods", "attention", "random"], "agreement", "attention, random", "methods.png"),
        (["generate", "the <b> hat", "--max-new-tokens", "2"], "causal", "value-zeroing-rollout", "steps.svg"),
    ],
)
def test_picture_carries_its_provenance(
    arguments: list[str], model: str, method: str, name: str, capsys: Output
) -> None:
    assert main([*arguments, "--output", name]) == 0
    capsys.readouterr()
    found = read_provenance(name)
    loaded, _ = load_model("causal") if model == "causal" else load_model()
    assert (found["model"], found["method"], found["text"]) == (model, method, arguments[1])
    assert (found["model class"], found["weights"]) == (type(loaded).__name__, weights_fingerprint(loaded))
    assert shlex.split(found["command"]) == ["captum-vz", *arguments, "--output", name]
    assert found["description"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--layer", "-2", "--token", "pictures"], {"layer": -2, "token": "pictures"}),
        (["--truth", "--foil", "is"], {"truth": True, "foil": "is"}),
        (["--patch", "pictures", "picture"], {"patch": ("pictures", "picture")}),
    ],
)
def test_output_is_that_of_the_function(options: list[str], asked: dict[str, Any], capsys: Output) -> None:
    table = compare("agreement", SENTENCE, CHOSEN, **asked)
    found, expected = json.loads(compared(capsys, *options, "--json")), json.loads(table.to_json())
    assert {name: found[name] for name in expected} == expected
    assert (found["text"], found["model"]) == (SENTENCE, "agreement")
    assert set(str(table).splitlines()) <= set(compared(capsys, *options, "--full").splitlines())
    if table.falls is not None:
        falls = table.falls.tolist()
        assert found["falls"] == [fall if fall == fall else None for fall in falls]
        shown = compared(capsys, *options)
        assert "without: pictures" in shown and f"{falls[2]:+.2f}" in shown


@pytest.mark.parametrize("columns", [40, 200])
def test_methods_are_lines_that_fit(columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """At most 80 columns, at most as many as the terminal has, and each method's strongest token first."""
    monkeypatch.setattr("captum_vz.cli.texts.room", lambda: columns)
    monkeypatch.setattr("captum_vz.visualization.forms.room", lambda: columns)
    methods = ["value-zeroing-effect-layer", "value-zeroing-rollout", "attention", "alti"]
    text = "the pictures of some extraordinarily hat [MASK] scaring marcus."
    assert main(["compare", text, "--methods", *methods]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.split(maxsplit=1)[0] in methods]
    assert max(map(len, lines)) <= min(columns, 80)
    found = compare("agreement", text, methods)
    for line, name in zip(lines, methods, strict=True):
        token = line.split()[1].rstrip("…")
        assert found.tokens[int(found.shares[name].argmax())].startswith(token)
    assert main(["compare", text, "--methods", *methods, "--full"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    cells = [cell.strip("*") for line in lines if line.split()[:2] == ["2", "pictures"] for cell in line.split()[2:]]
    assert cells == [f"{found.shares[name][2]:.3f}" for name in methods]
