"""`captum-vz paper`: its sentences, and its errors of one line."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from captum_vz import ValueZeroingRollout
from captum_vz.cli import main
from captum_vz.paper import reproduce
from captum_vz.study import Example
from captum_vz.testbed import agreement_sentences, load_model
from captum_vz.testbed.data import HELD_OUT_PARADIGMS
from tests.command import assert_records_equal_file, refused
from tests.test_cli import byte_level_tokenizer

KINDS = ("anaphor", "determiner_noun", "determiner_adjective_noun", "relational_noun", "subject_verb")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paper_takes_held_out_blimp(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """A folder in BLiMP's format with the grammar's sentences. BLiMP writes anaphors in another form."""
    for paradigm, kind in zip(HELD_OUT_PARADIGMS, KINDS, strict=True):
        records = [record | {"UID": paradigm} for record in agreement_sentences(6, paradigm=kind)]
        (folder / f"{paradigm}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert main(["paper", "--blimp", ".", "--methods", "random", "--output", "out"]) == 0
    out = capsys.readouterr().out
    (found,) = re.findall(r"## agreement: (\d+) sentences, (\d+) skipped", out)
    assert 12 <= sum(map(int, found)) <= 15
    assert out.endswith("tables, figures and this report: out\n")
    assert main(["paper", "--blimp", ".", "--methods", "random", "--output", "out", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_residual_of_the_papers_rollouts(capsys: pytest.CaptureFixture[str]) -> None:
    """Rollouts are the paper's, without residual, unless another one is asked for. They then have another name.

    A class that is made with the residual has the same numbers.
    """
    examples = [Example.from_record(record) for record in agreement_sentences(4)]
    own = {str(residual): partial(ValueZeroingRollout, residual=residual) for residual in (None, 0.5)}
    found = reproduce({"agreement": load_model()}, examples, "own", own, quiet=True).summary.groupby("method")["mean"]
    expected = {name: mean.tolist() for name, mean in found}
    for asked, name, residual in (
        ([], "value-zeroing-rollout", "None"),
        (["--residual", "none"], "value-zeroing-rollout", "None"),
        (["--residual", "0.5"], "value-zeroing-rollout (residual 0.5)", "0.5"),
    ):
        command = ["paper", "--generated", "4", "--methods", "value-zeroing-rollout", "--output", residual, "--json"]
        assert main([*command, *asked]) == 0
        told = json.loads(capsys.readouterr().out)["summary"]
        assert {row["method"] for row in told} == {name}
        means = [math.nan if row["mean"] is None else row["mean"] for row in told]
        assert means == pytest.approx(expected[residual], abs=1e-6, nan_ok=True)
    assert expected["0.5"] != pytest.approx(expected["None"], abs=0.01, nan_ok=True)


def test_paper_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    output = ("--output", "out")
    assert "one of the arguments --blimp --generated is required" in refused(capsys, "paper", *output)
    assert "--output" in refused(capsys, "paper", "--generated", "2")
    assert "anaphor_number_agreement.jsonl is missing" in refused(capsys, "paper", "--blimp", "nowhere", *output)
    assert "there is no method 'magic'" in refused(capsys, "paper", "--generated", "2", *output, "--methods", "magic")
    assert "argument --generated: 0 is less than 1" in refused(capsys, "paper", "--generated", "0", *output)
    assert "argument --generated: -1 is less than 1" in refused(capsys, "paper", "--generated", "-1", *output)
    (folder / "taken").write_text("", encoding="utf-8")
    assert "cannot write" in refused(capsys, "paper", "--generated", "2", "--output", "taken", "--methods", "random")

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("captum_vz.paper.evaluations.reproduce", stopped)
    assert main(["paper", "--generated", "2", *output]) == 130
    assert capsys.readouterr().err == "captum-vz: stopped. The same command continues from here.\n"


def test_report_has_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A method without layers has no row in the table of layers. One sentence has no interval."""
    assert main(["paper", "--generated", "1", "--methods", "random", "--output", "out"]) == 0
    out = capsys.readouterr().out
    assert "in each layer" not in out
    assert "nan" not in out


@pytest.mark.parametrize("positions", [4, 64])
def test_paper_of_skipped_examples(positions: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sentences that are too long, and words whose forms the tokenizer cuts into pieces."""
    tokenizer = byte_level_tokenizer(mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=positions, **size)
    BertForMaskedLM(config).save_pretrained(folder / "m")
    tokenizer.save_pretrained(folder / "m")
    capsys.readouterr()
    for _ in range(2):  # the second call finds a finished run, and reports the same
        options = ["paper", "--generated", "2", "--model", "m", "--methods", "random", "--output", "out", "--quiet"]
        if positions == 4:
            told = "'m' can use none of the 2 examples: it is 25 tokens long, but the model takes at most 4"
            assert told in refused(capsys, *options)
        else:
            assert main(options) == 0
            told = "blank_out: 2 sentences skipped, most often because: the forms 'themselves' and 'himself' of the"
            assert told in (folder / "out" / "report.md").read_text("utf-8")


def test_json_equals_the_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "causal", "--methods", "value-zeroing", "globenc", "--output", "out", "--json"]
    assert main(["paper", "--generated", "12", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["about", "summary", "differences", "probing", "correlation", "omitted", "skipped"]
    assert list(found)[: len(names)] == names
    assert {"sanity", "truth", "variants", "removing", "groups", "agreement"} <= set(found)
    assert found["about"] in (folder / "out" / "report.md").read_text("utf-8")
    assert all(found[name] for name in ("summary", "omitted", "skipped"))
    for name in {path.stem for path in (folder / "out").glob("*.csv")}:
        assert_records_equal_file(found[name], folder / "out" / f"{name}.csv")


def test_engine_reaches_the_studies(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["paper", "--generated", "2", "--methods", "random", "--output", "out", "--engine"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "engine is 'local', but 2 processes were launched" in refused(capsys, *options, "local")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main([*options, "local", "--quiet"]) == 0
