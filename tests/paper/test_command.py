"""`python tutorials/paper`: its sentences, its models, and its errors of one line."""

import json
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from captum_vz.testbed import HELD_OUT_PARADIGMS, agreement_sentences
from paper.__main__ import main
from tests import command
from tests.command import Output

KINDS = ("anaphor", "determiner_noun", "determiner_adjective_noun", "relational_noun", "subject_verb")
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
    assert "anaphor_number_agreement.jsonl is missing" in refused(capsys, "--blimp", "nowhere", "--folder", "out")
    assert "there are 0 examples: pass at least 1" in refused(capsys, "--grammar", "0", "--folder", "out")
    (folder / "taken").write_text("", encoding="utf-8")
    assert "taken" in refused(capsys, "--grammar", "2", "--folder", "taken", "--methods", "random")

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paper.__main__.reproduce", stopped)
    assert main(["--grammar", "2", "--folder", "out"]) == 130
    assert capsys.readouterr().err == "paper: stopped. The same command continues from here.\n"


def test_program_and_report_without_empty_tables(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method without layers has no row in the table of layers. One sentence has no interval."""
    assert main(["--grammar", "1", "--methods", "random", "--folder", "out"]) == 0
    out = capsys.readouterr().out
    assert "in each layer" not in out
    assert "nan" not in out
    script = Path(__file__).parents[2] / "tutorials" / "paper"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    assert left.value.code == 0
    assert "usage: python tutorials/paper" in capsys.readouterr().out
