"""A study as a whole: its folder, its summary, and that no interruption loses or repeats a row."""

import errno
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import pytest
import torch

from captum_vz import _files
from captum_vz.metrics import summarize
from captum_vz.study import Example, Scorer, Study, run, run_study
from captum_vz.study.figures import counted
from captum_vz.testbed import load_model
from tests.study.conftest import Decoder, Shipped, never

pytestmark = pytest.mark.usefixtures("undrawn")
METHODS = ["value-zeroing", "value-zeroing-rollout", "random"]
FILES = 10  #: the files of rows of the small study


def study(folder: Path, examples: Any, models: Any = None, block: int = 2, **changed: Any) -> Study:
    """A small study in parts of two examples."""
    options: dict[str, Any] = {"methods": METHODS, "metrics": ["cue_dot"], "resamples": 50, "quiet": True}
    models = {"agreement": load_model} if models is None else models
    with patch.object(run, "BLOCK", block):
        return run_study(models, examples, folder, **options | changed)


def parts(folder: Path, table: str = "*") -> dict[str, tuple[int, bytes]]:
    """For each finished file of rows its time of writing and its bytes."""
    settings = json.loads((folder / "study.json").read_text()) if (folder / "study.json").is_file() else {"parts": {}}
    every = [part["files"] for one in settings["parts"].values() for part in one.values()]
    names = [name for files in every for table_, (name, *_) in files.items() if table in ("*", table_)]
    return {name: ((folder / name).stat().st_mtime_ns, (folder / name).read_bytes()) for name in names}


def assert_same_study(one: Study, other: Study) -> None:
    pd.testing.assert_frame_equal(one.rows(), other.rows())
    pd.testing.assert_frame_equal(one.skipped, other.skipped)
    for name in ("summary.csv", "skipped.csv"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()
    settings = [json.loads((each.folder / "study.json").read_text()) for each in (one, other)]
    assert settings[0] == settings[1]
    names = [sorted(str(path.relative_to(each.folder)) for path in each.folder.rglob("*")) for each in (one, other)]
    assert names[0] == names[1]


@pytest.fixture(scope="module")
def bad(examples: list[Example]) -> list[Example]:
    """Ten examples, two of which cannot be used."""
    return [*examples[:3], replace(examples[3], cue=()), *examples[4:9], replace(examples[9], target=99)]


@pytest.fixture(scope="module")
def reference(bad: list[Example], tmp_path_factory: pytest.TempPathFactory) -> Study:
    return study(tmp_path_factory.mktemp("reference") / "study", bad)


def test_rows_equal_the_scorer(reference: Study, bad: list[Example], shipped: Shipped) -> None:
    rows = reference.rows()
    assert rows["example"].nunique() == 9  # an example without a cue has scores, but no cue alignment
    assert len(rows) == 9 * (4 + 4 + 1)
    assert rows["cue_dot"].isna().sum() == 4 + 4 + 1
    expected = [row for row in Scorer(*shipped, METHODS, "cue_dot").score(bad) if row["skipped"] is None]
    assert rows["example"].tolist() == [row["example"] for row in expected]
    assert rows["layer"].fillna(-1).tolist() == [-1 if row["layer"] is None else row["layer"] for row in expected]
    for found, row in zip(rows.itertuples(), expected, strict=True):
        assert list(found.tokens) == row["tokens"]
        assert found.scores == pytest.approx(row["scores"], rel=1e-4, abs=1e-6)  # float32, in batches of other sizes
    assert set(rows["model"]) == {"agreement"}


def test_skipped_examples_are_counted(reference: Study, bad: list[Example]) -> None:
    skipped = reference.skipped
    assert skipped["example"].tolist() == [bad[3].id, bad[9].id]
    assert skipped["skipped"].tolist()[0] == "there is no cue"
    assert skipped["skipped"].tolist()[1].startswith("the target is word 99, but there are")
    assert pd.read_csv(reference.folder / "skipped.csv")["example"].tolist() == skipped["example"].tolist()
    whole = reference.summary.query("group == 'all'")
    assert set(whole["skipped"]) == {2}
    assert set(whole["examples"]) == {8}


def test_summary_equals_the_rows(reference: Study, bad: list[Example]) -> None:
    rows, summary = reference.rows(["method", "layer", "group", "example", "cue_dot"]), reference.summary
    groups = {"all", *(example.group for example in bad)}
    assert len(summary) == len(groups) * (4 + 4 + 1)
    for line in summary.itertuples():
        some = rows[
            (rows["method"] == line.method) & (rows["layer"].fillna(-1) == (-1 if line.layer is pd.NA else line.layer))
        ]
        some = some if line.group == "all" else some[some["group"] == line.group]
        some = some[some["example"] != bad[3].id]
        expected = summarize(torch.tensor(some["cue_dot"].to_numpy()), resamples=50)
        assert (line.mean, line.low, line.high) == pytest.approx(expected[:1] + expected[2:4], nan_ok=True)
        assert (line.examples, line.undefined) == expected[4:]
        assert line.metric == "cue_dot"


def test_one_model_with_its_tokenizer(bad: list[Example], reference: Study, tmp_path: Path) -> None:
    model, tokenizer = load_model()
    found = study(tmp_path, bad, model, tokenizer=tokenizer)
    assert found.summary["mean"].tolist() == reference.summary["mean"].tolist()


def test_method_refused_everywhere_is_counted(bad: list[Example], decoder: Decoder, tmp_path: Path) -> None:
    found = study(tmp_path / "s", bad, {"NA": decoder}, methods=["globenc", "random"], metrics="cue_dot")
    summary = found.summary.query("group == 'all'").set_index("method")
    encoded = found.rows()["example"].nunique()
    usable = found.rows()["cue_dot"].notna().sum()
    assert 0 < usable < encoded < len(bad)
    assert summary["examples"].to_dict() == {"globenc": 0, "random": usable}
    assert summary["skipped"].to_dict() == {"globenc": len(bad), "random": len(bad) - usable}
    assert set(found.summary["model"]) == {"NA"}
    assert re.search(r"globenc +-\n", str(found))
    counts = {"NA": len(bad) - encoded, "NA, cue_dot": encoded - usable, "NA, globenc": encoded}
    for who, count in counts.items():
        assert f"{who}: {counted(count, 'example')} skipped" in str(found)


def in_a_process(work: Callable[[], object]) -> multiprocessing.Process:
    """Start the work in a forked process, which does not import anything again."""

    def alone() -> None:
        torch.set_num_threads(1)  # makes the pool of a forked process, which several threads must not make at once
        work()

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    return process


@pytest.mark.parametrize("last", [3, 4])  # the first or the second file of the second part
def test_killed_before_rename_continues(last: int, bad: list[Example], reference: Study, tmp_path: Path) -> None:
    folder = tmp_path / "study"

    def killed_at(count: int) -> None:
        """Kill the process after `count` files are written, before the last one is renamed. 0: at the settings."""
        rename, written = os.replace, []

        def step_or_die(source: Any, goal: Any) -> None:
            written.extend([goal] if goal.suffix != ".jsonl" and goal.name != "study.json" else [])
            if len(written) == count and (written or goal.name == "study.json"):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, goal)

        _files.os.replace = step_or_die  # in this process only
        study(folder, bad)

    in_a_process(lambda: killed_at(0)).join()
    assert not (folder / "study.json").exists()
    while len(before := parts(folder)) < FILES:
        process = in_a_process(lambda: killed_at(last))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert before.items() <= parts(folder).items()
        assert list(folder.rglob(".*.tmp"))
    assert_same_study(study(folder, bad), reference)
    assert parts(folder) == before


def test_finished_study_computes_nothing(bad: list[Example], reference: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts(reference.folder)
    study(reference.folder, bad, {"agreement": never})
    assert parts(reference.folder) == before
    monkeypatch.setattr("captum_vz.study.folder.__version__", "9")
    with pytest.raises(ValueError, match="study of captum_vz"):
        study(reference.folder, bad)


@pytest.mark.parametrize(
    ("passed", "complaint"),
    [
        ({"examples": []}, "examples is empty"),
        ({"models": {}}, "and batch_size 32"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"models": {"agreement": (load_model()[0].train(), load_model()[1])}}, "train mode: call"),
        ({"methods": ["magic"]}, "pass some of"),
    ],
)
def test_bad_study_refused(passed: dict[str, Any], complaint: str, bad: list[Example], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        study(tmp_path / "study", passed.pop("examples", bad), **passed)
    assert not (tmp_path / "study").exists()


def test_studies_that_do_not_fit_are_refused(bad: list[Example], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="used by several"):
        study(tmp_path, [*bad, bad[0]])
    mixed = [replace(bad[0], group="all"), *bad[1:]]
    with pytest.raises(ValueError, match="is called 'all'"):
        study(tmp_path / "s", mixed)
    assert not (tmp_path / "s").exists()
    alone = study(tmp_path / "s", [replace(example, group="all") for example in bad], methods=["random"])
    with pytest.raises(ValueError, match="is called 'all'"):
        study(tmp_path / "s", [replace(bad[0], id="new", group="other")], methods=["random"])
    assert alone.summary["examples"].tolist() == [8]


def test_full_disk_keeps_finished_parts(
    bad: list[Example], reference: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, folder, synced = errno.ENOSPC, tmp_path / "study", os.fsync
    left = [5 + 1 + 3 * 3]  # the examples, the manifest, and three parts with the manifest after each

    def full(file: int) -> None:
        if not left[0]:
            raise OSError(number, os.strerror(number))
        left[0] -= 1
        synced(file)

    with monkeypatch.context() as patched:
        patched.setattr(_files.os, "fsync", full)
        with pytest.raises(OSError, match="start again") as caught:
            study(folder, bad)
        assert caught.value.errno == number
        with pytest.raises(FileNotFoundError, match="is not finished"):
            Study(folder).summary  # noqa: B018  # reading it is what is tested
    before = parts(folder)
    assert len(before) == 6
    assert not list(folder.rglob("*.tmp"))
    assert_same_study(study(folder, bad), reference)
    assert before.items() <= parts(folder).items()
