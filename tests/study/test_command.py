"""`captum-vz study`: its options, and its errors of one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from captum_vz.cli import main
from captum_vz.study import Example, Study, run_study, write_jsonl
from captum_vz.subjects import loading as app_models
from captum_vz.testbed import HELD_OUT_PARADIGMS, agreement_sentences, load_model
from tests.command import Output, assert_records_equal_file, refused
from tests.study.test_run import assert_same_study, parts

pytestmark = pytest.mark.usefixtures("folder", "undrawn")
METHODS = ["value-zeroing", "random"]


def test_study_runs_and_prints_results(capsys: Output, folder: Path) -> None:
    examples = [Example.from_record(record) for record in agreement_sentences(6)]
    assert main(["study", "--grammar", "6", "--folder", "s", "--methods", *METHODS]) == 0
    out, err = capsys.readouterr()
    assert "6/6" in err
    expected = run_study({"agreement": load_model}, examples, "t", METHODS, quiet=True)
    assert_same_study(Study("s"), expected)
    mean = expected.summary.query("method == 'value-zeroing' and layer == 3 and group == 'all'")["mean"].tolist()
    line = next(line for line in out.splitlines() if line.startswith("value-zeroing"))
    assert [float(number) for number in re.findall(r"(\S+) \[", line)] == pytest.approx(mean, abs=5e-4)
    again = ["study", "--grammar", "6", "--folder", "s", "--methods", *METHODS]
    assert main([*again, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*again, "--metrics", "cue_ap"]) == 0  # of the metrics in the folder, those that are asked for
    out = capsys.readouterr().out
    assert "cue_ap" in out
    assert not re.search("cue_dot|blank_out", out)


def test_blimp_leaves_out_what_a_studied_model_knows(folder: Path, saved: Callable[..., str], capsys: Output) -> None:
    forms = {"sentence_good": "The sketch of Rosa is red.", "sentence_bad": "The sketch of Rosa are red."}
    for paradigm in HELD_OUT_PARADIGMS:
        records = [json.dumps(forms | {"UID": paradigm, "pairID": str(number)}) for number in range(10)]
        (folder / f"{paradigm}.jsonl").write_text("\n".join(records))
    options = ["study", "--blimp", ".", "--methods", "random", "--metrics", "cue_mrr", "--folder"]
    assert main([*options, "held", "--limit", "4"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "20 of 50 pairs of BLiMP. Left out: 25 that the embedded models were trained on; 5 of "
        "regular_plural_subject_verb_agreement_1, to have as many singular as plural verbs."
    )
    assert out[1] == "4 of 20 sentences, evenly spaced (--limit)."
    own = saved(*load_model())
    assert main([*options, "whole", "--model", own, "--html", "page.html"]) == 0
    assert capsys.readouterr().out.startswith("50 of 50 pairs of BLiMP. Left out: none.\n")
    assert "50 of 50 pairs of BLiMP" in Path("page.html").read_text("utf-8")
    assert main([*options, "behind", "--prefix", "As we all know,", "--quiet"]) == 0
    behind = Study("behind").examples
    assert {example.text for example in behind} == {"As we all know, the sketch of Rosa [MASK] red."}
    assert {example.words[max(example.cue)] for example in behind if example.cue} == {"sketch"}


def test_csv_is_read_in_words(folder: Path, capsys: Output) -> None:
    (folder / "my.csv").write_text("text,target,cue,good,bad\nThe hats of Rosa are red.,are,hats,are,is\n")
    assert main(["study", "--csv", "my.csv", "--methods", "random", "--folder", "s", "--quiet"]) == 0
    assert Study("s").rows()[["cue_dot", "blank_out"]].notna().all(axis=None)
    assert "A CSV? Pass --csv" in refused(capsys, "study", "--jsonl", "my.csv", "--folder", "t")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--grammar", "2"], "the following arguments are required: --folder"),
        (["--folder", "s"], "study needs sentences: pass --blimp FOLDER, --jsonl FILE, --csv FILE or --grammar N"),
        (["--folder", "s", "--jsonl", "none.jsonl"], "none.jsonl is missing"),
        (["--folder", "s", "--blimp", "none"], "is missing: expected BLiMP's 'data' folder"),
        (["--folder", "s", "--grammar", "-1"], "argument --grammar: -1 is less than 1"),
        (["--folder", "file/s", "--grammar", "2"], "cannot write file/s: "),
        (["--folder", "other", "--grammar", "2"], "is not empty, and holds no study.json"),
        (["--folder", "s", "--plugin", "mine.txt", "--grammar", "2"], "plugin is mine.txt: expected a Python file"),
        (["--folder", "s", "--plugin", "none.py", "--grammar", "2"], "plugin is none.py: expected"),
        (["--folder", "s", "--plugin", "odd.py", "--grammar", "2"], "odd.py, line 2: NameError: name 'magic' is not"),
        (["--folder", "s", "--plugin", "bad.py", "--grammar", "2"], "bad.py: SyntaxError"),
    ],
)
def test_bad_command_gives_one_line(arguments: list[str], told: str, folder: Path, capsys: Output) -> None:
    (folder / "file").write_text("")
    (folder / "other").mkdir()
    for name, text in (("other/thesis.tex", ""), ("mine.txt", ""), ("odd.py", "x = 1\nmagic()\n"), ("bad.py", "def")):
        (folder / name).write_text(text)
    assert told in refused(capsys, "study", *arguments)
    assert "did you mean" not in refused(capsys, "study", "--grammar", "2", "--metrics", "largest", "--folder", "s")


def test_study_of_skipped_examples_fails(folder: Path, capsys: Output) -> None:
    write_jsonl("bad.jsonl", [Example(str(i), ("hats", "[MASK]"), 7) for i in range(3)])
    options = ["study", "--jsonl", "bad.jsonl", "--folder", "s", "--methods", "random", "--quiet"]
    told = (
        "captum-vz: 'agreement' could use none of the 3 examples, most often because: the target is word 7, but there "
        "are 2 words, 0 to 1. s/skipped.csv lists the reasons.\n"
    )
    for _ in range(2):  # the second call finds a finished run, and reports the same
        assert main(options) == 2
        assert capsys.readouterr() == ("", told)
    assert len(pd.read_csv("s/skipped.csv")) == 3


def test_json_equals_the_files(folder: Path, capsys: Output) -> None:
    bad = Example("bad, of two words", ("hats", "[MASK]"), 7)
    write_jsonl("some.jsonl", [*map(Example.from_record, agreement_sentences(3)), bad])
    assert main(["study", "--jsonl", "some.jsonl", "--folder", "s", "--methods", *METHODS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["settings", "summary", "differences", "skipped"]
    assert found["settings"] == json.loads((folder / "s" / "study.json").read_text("utf-8"))
    for name in ("summary", "skipped"):
        assert found[name]
        assert_records_equal_file(found[name], folder / "s" / f"{name}.csv")


PLUGIN = """
from captum.attr import Saliency
from captum_vz.study import register_method, register_metric

def ids(batch):
    return batch.inputs["input_ids"]

def fails(batch):
    raise OSError("no such file of mine")

register_method("ids", ids)
register_method("fails", fails)
register_method("captums", Saliency)
register_metric("largest", lambda batch, rows: rows.max(-1).values)
"""


def test_plugin_is_read(folder: Path, own_names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second start computes nothing."""
    (folder / "mine.py").write_text(PLUGIN)
    own = ["--methods", "ids", "fails", "captums", "random", "--metrics", "largest", "cue_dot", "--plugin", "mine.py"]
    assert main(["study", "--grammar", "4", *own, "--folder", "s", "--quiet"]) == 0
    found, before = Study("s"), parts(Path("s"))
    assert found.rows().groupby("method")["example"].nunique().to_dict() == {"captums": 4, "ids": 4, "random": 4}
    assert set(found.skipped["skipped"]) == {"OSError: no such file of mine"}
    assert found.summary.query("method == 'captums' and metric == 'largest' and group == 'all'")["examples"].item() == 4
    assert (folder / "s" / "figures" / "largest.png").is_file()
    summary = found.summary
    monkeypatch.setattr(app_models, "load_model", None)
    assert main(["study", "--grammar", "4", *own, "--folder", "s", "--quiet"]) == 0
    assert parts(Path("s")) == before
    pd.testing.assert_frame_equal(Study("s").summary, summary)
