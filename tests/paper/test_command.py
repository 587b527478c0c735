"""`python tutorials/paper`: its sentences, its models, and its errors of one line."""

import json
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from captum_vz.testbed import HELD_OUT_PARADIGMS, agreement_sentences
from paper.__main__ import main
from tests import command
from tests.test_cli import byte_level_tokenizer

KINDS = ("anaphor", "determiner_noun", "determiner_adjective_noun", "relational_noun", "subject_verb")
Output = pytest.CaptureFixture[str]
refused = partial(command.refused, run=main, name="paper")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_held_out_blimp(capsys: Output, folder: Path) -> None:
    """A folder in BLiMP's format with the grammar's sentences. BLiMP writes anaphors in another form."""
    for paradigm, kind in zip(HELD_OUT_PARADIGMS, KINDS, strict=True):
        records = [record | {"UID": paradigm} for record in agreement_sentences(6, paradigm=kind)]
        (folder / f"{paradigm}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    asked = ["--blimp", ".", "--methods", "random", "--folder", "out", "--controls", "0"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    (found,) = re.findall(r"## agreement: (\d+) sentences, (\d+) skipped", out)
    assert 12 <= sum(map(int, found)) <= 15
    assert out.endswith("tables, figures and this report: out\n")
    assert main([*asked, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_errors_are_one_line(capsys: Output, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    run = ("--grammar", "2", "--folder", "out")
    assert "anaphor_number_agreement.jsonl is missing" in refused(capsys, "--blimp", "nowhere", "--folder", "out")
    assert "methods is ['magic']: pass some of" in refused(capsys, *run, "--methods", "magic")
    assert "there are 0 examples: pass at least 1" in refused(capsys, "--grammar", "0", "--folder", "out")
    (folder / "taken").write_text("", encoding="utf-8")
    assert "taken" in refused(capsys, "--grammar", "2", "--folder", "taken", "--methods", "random")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "engine is 'local', but 2 processes were launched" in refused(
        capsys, *run, "--methods", "random", "--engine", "local"
    )

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paper.__main__.reproduce", stopped)
    assert main(list(run)) == 130
    assert capsys.readouterr().err == "paper: stopped. The same command continues from here.\n"


def test_report_has_no_empty_table(capsys: Output) -> None:
    """A method without layers has no row in the table of layers. One sentence has no interval."""
    assert main(["--grammar", "1", "--methods", "random", "--folder", "out"]) == 0
    out = capsys.readouterr().out
    assert "in each layer" not in out
    assert "nan" not in out


@pytest.mark.parametrize("positions", [4, 64])
def test_skipped_examples(positions: int, folder: Path, capsys: Output) -> None:
    """Sentences that are too long, and words whose forms the tokenizer cuts into pieces."""
    tokenizer = byte_level_tokenizer(mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, **size)
    BertForMaskedLM(config).save_pretrained(folder / "m")
    tokenizer.save_pretrained(folder / "m")
    capsys.readouterr()
    for _ in range(2):  # the second call finds a finished run, and reports the same
        options = ["--grammar", "2", "--model", "m", "--methods", "random", "--folder", "out", "--quiet"]
        if positions == 4:
            told = "'m' can use none of the 2 examples: it is 25 tokens long, but the model takes at most 4"
            assert told in refused(capsys, *options)
        else:
            assert main(options) == 0
            told = r"- m, blank_out: 2 examples skipped \(.*the forms 'themselves' and 'himself' of the"
            assert re.search(told, (folder / "out" / "report.md").read_text("utf-8"))


def test_folder_is_run_as_a_program(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).parents[2] / "tutorials" / "paper"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert left.value.code == 0
    assert "usage: python tutorials/paper" in capsys.readouterr().out
