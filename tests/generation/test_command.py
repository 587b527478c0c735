"""The command `captum-vz generate`."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from captum_vz import ValueZeroing, ValueZeroingEffect, ValueZeroingRollout
from captum_vz.cli import main
from captum_vz.generation import attribute_generation
from tests.command import Output, refused
from tests.generation.models import case_of, tokenizer_of_words

TEXT = "the pictures of some hat"
MODEL = case_of("llama", torch.float32).model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> Path:
    """The folder where the command runs, with a model in `llama`."""
    monkeypatch.chdir(tmp_path)
    MODEL.save_pretrained(tmp_path / "llama")
    tokenizer_of_words().save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    return tmp_path


def generate(capsys: Output, *arguments: str) -> str:
    assert main(["generate", TEXT, "--model", "llama", "--max-new-tokens", "3", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def from_api(method: Any, **options: Any) -> Any:
    return attribute_generation((MODEL, tokenizer_of_words()), TEXT, method, 3, **{"do_sample": False, **options})


def test_json_equals_the_api(capsys: Output, folder: Path) -> None:
    record = json.loads(generate(capsys, "--json", "--mask", "stop"))
    found = from_api(partial(ValueZeroingRollout, residual=0.5))
    torch.testing.assert_close(torch.tensor(record["scores"]).permute(1, 2, 0), found.scores)
    torch.testing.assert_close(torch.tensor(record["prefix"]).permute(1, 2, 0), found.prefix)
    assert record["generated"] == list(found.generated.labels)
    assert record["mask"] == [True, False, True, True, False]
    assert (record["model"], record["method"]) == ("llama", "value-zeroing-rollout")
    assert list(folder.glob("*.png")) == []
    record = json.loads(generate(capsys, "--json", "--sample", "3"))
    assert record["generated"] == list(from_api(ValueZeroing, do_sample=True, seed=3).generated.labels)


def test_table_names_the_strongest_tokens(capsys: Output, folder: Path) -> None:
    options = "--method value-zeroing --layer 0 --mask stop --output steps.png"
    lines = generate(capsys, *options.split()).splitlines()
    found = from_api(ValueZeroing)
    assert lines[0] == f"text: {TEXT} {found.text}"
    assert lines[1] == "value-zeroing, layer 0: the prompt tokens that each new token draws on most"
    for step, line in enumerate(lines[2:5]):
        assert line.split()[:2] == [str(step), found.generated.labels[step]]
        kept = {"pictures": found.scores[step, 1, 0], "hat": found.scores[step, 4, 0]}
        first, second = sorted(kept, key=lambda word: -kept[word])
        assert line.split()[-4:] == [first, f"{kept[first]:.2f}", second, f"{kept[second]:.2f}"]
        assert f"prompt {found.prompt_share[step, 0]:.2f}:" in line
    assert lines[5] == "picture: steps.png"
    assert Image.open(folder / "steps.png").size[0] > 300


def test_one_step_has_all_prompt_tokens(capsys: Output) -> None:
    """Tokens keep their place in the prompt if others are hidden. One layer is computed alone."""
    options = ["--method", "value-zeroing-effect-layer", "--layer", "0"]
    lines = generate(capsys, *options, "--step", "-1", "--mask", "the,some").splitlines()
    found = from_api(lambda model, layers: ValueZeroingEffect(model, layers[0]))
    label = found.generated.labels[2]
    assert lines[1] == f"{options[1]}, layer 0: how much {label} (step 2) draws on each prompt token"
    shown = [line.split() for line in lines[2:]]
    assert [one[:2] for one in shown] == [["1", "pictures"], ["2", "of"], ["4", "hat"]]
    expected = found.scores[2, [1, 2, 4], 0].tolist()
    assert [float(one[2]) for one in shown] == pytest.approx(expected, abs=1e-4)


def test_unknown_words_are_told(capsys: Output) -> None:
    assert main(["generate", TEXT, "--model", "llama", "--max-new-tokens", "1", "--mask", "hat,unheardof"]) == 0
    assert capsys.readouterr().err == "captum-vz: --mask: 'unheardof' is no word of the prompt.\n"
    assert main(["generate", "the \N{CJK UNIFIED IDEOGRAPH-732B} hat [MASK]", "--max-new-tokens", "1"]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert "unknown word at position 2: the model is given [UNK]" in first
    assert "[MASK] is no mask for a model that predicts the next token" in second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3"], "--step 3 is out of range: --max-new-tokens is 3"),
        (["--layer", "3"], "--layer 3 is out of range: the model has"),
        (["--method", "input-x-gradient", "--layer", "1"], "input-x-gradient has no scores of single layers"),
        (["--max-new-tokens", "0"], "argument --max-new-tokens: 0 is less than 1"),
        (["--method", "blank-out"], "--method: there is no method 'blank-out'"),
        (["--mask", "the,pictures,of,some,hat"], "leaves out all prompt tokens"),
        (["--max-new-tokens", "500"], "ask for at most "),
        (["--model", "agreement"], "BertForMaskedLM has no generate: pass a causal model"),
    ],
)
def test_bad_command_says_why(arguments: list[str], message: str, capsys: Output) -> None:
    options = ["generate", TEXT, "--model", "llama", "--max-new-tokens", "3", *arguments]
    assert message in refused(capsys, *options)
