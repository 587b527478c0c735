"""A study as a whole: its folder, its summary, and that no interruption loses or repeats a row."""

import errno
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from accelerate import PartialState

from captum_vz import _files
from captum_vz.metrics import summarize
from captum_vz.study import Example, Scorer, Study, run_study
from captum_vz.testbed import load_model
from tests.study.conftest import Decoder, Shipped

METHODS = ["value-zeroing", "value-zeroing-rollout", "random"]
SHARDS = 5


def study(folder: Path, examples: list[Example], models: Any = None, **changed: Any) -> Study:
    """A small study of five shards."""
    options: dict[str, Any] = {"methods": METHODS, "metrics": ["cue_dot"], "shard_size": 2, "resamples": 50}
    models = {"agreement": load_model} if models is None else models
    return run_study(models, examples, folder, **options | {"quiet": True} | changed)


def in_train_mode() -> tuple[Any, Any]:
    model, tokenizer = load_model()
    return model.train(), tokenizer


def shards(folder: Path) -> dict[str, tuple[int, bytes]]:
    """For each finished shard its time of writing and its bytes."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("shards/*.parquet")}


def assert_same_study(one: Study, other: Study) -> None:
    pd.testing.assert_frame_equal(one.rows(), other.rows())
    pd.testing.assert_frame_equal(one.skipped, other.skipped)
    for name in ("summary.csv", "skipped.csv"):
        assert (one.folder / name).read_bytes() == (other.folder / name).read_bytes()
    settings = [json.loads((each.folder / "study.json").read_text()) for each in (one, other)]
    for each in settings:  # the same study may have been run by other commands
        each["provenance"] |= {"commands": [], "data": {}}
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
    assert f"NA: {len(bad) - encoded} examples skipped" in str(found)
    assert f"NA, cue_dot: {encoded - usable} examples skipped" in str(found)
    assert f"NA, globenc: {encoded} examples skipped" in str(found)


def test_unusable_study_lists_reasons(bad: list[Example], tmp_path: Path) -> None:
    found = study(tmp_path / "s", [replace(example, cue=()) for example in bad], methods=["random"])
    assert len(found.skipped) == 10
    assert set(found.summary.query("group == 'all'")["skipped"]) == {10}
    assert str(found).endswith("agreement, cue_dot: 9 examples skipped\nagreement: 1 examples skipped")
    with pytest.raises(ValueError, match=r"'agreement' could use none of the 10 examples.*there is no cue"):
        found.check_used()


def test_figure_shows_last_layers(reference: Study) -> None:
    by_layer, last = reference.plot("cue_dot").axes
    summary = reference.summary.query("group == 'all'").groupby("method").tail(1).set_index("method")["mean"]
    names = [label.get_text() for label in last.get_yticklabels()]
    assert sorted(names) == sorted(summary.index)
    drawn = [line.get_xdata()[0] for line in last.lines]
    assert drawn == pytest.approx(summary[names].tolist())
    assert [text.get_text() for text in by_layer.texts] == names
    assert len([line for line in by_layer.lines if line.get_linestyle() == ":"]) == 1  # random has no layers
    assert (reference.folder / "figures" / "cue_dot.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="metric is 'magic': pass one of 'cue_dot'"):
        reference.plot("magic")


@pytest.mark.slow
def test_several_models_in_one_study(bad: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    model, tokenizer = shipped
    other = type(model)(model.config).eval()
    both = study(
        tmp_path / "s", bad, {"agreement": shipped, "org/other one": (other, tokenizer)}, methods=["attention"]
    )
    assert both.rows()["model"].unique().tolist() == ["agreement", "org/other one"]
    counts = both.summary.query("group == 'all'").groupby("model")["skipped"].unique()
    assert [one.tolist() for one in counts] == [[2], [2]]
    assert len(both.plot("cue_dot").axes) == 4


def in_a_process(work: Callable[[], object]) -> multiprocessing.Process:
    """Start the work in a forked process, which does not import anything again."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_continues(seed: int, bad: list[Example], reference: Study, tmp_path: Path) -> None:
    draw, folder = random.Random(seed), tmp_path / "study"
    seen: dict[str, tuple[int, bytes]] = {}
    kills = 0
    for _ in range(8):
        process = in_a_process(lambda: study(folder, bad))
        process.join(draw.uniform(0.02, 0.5))
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        now = shards(folder)
        assert seen.items() <= now.items()  # finished shards are not changed
        seen = now
    assert kills
    assert_same_study(study(folder, bad), reference)
    assert seen.items() <= shards(folder).items()


def test_killed_before_rename_continues(bad: list[Example], reference: Study, tmp_path: Path) -> None:
    folder = tmp_path / "study"

    def killed_at(count: int) -> None:
        """Kill the process after `count` files are written, before the last one is renamed. 0: at the settings."""
        rename, written = os.replace, []

        def dying(step: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            def step_or_die(source: Any, goal: Any) -> None:
                written.extend([goal] if goal.suffix != ".jsonl" and goal.name != "study.json" else [])
                if len(written) == count and (written or goal.name == "study.json"):
                    os.kill(os.getpid(), signal.SIGKILL)
                step(source, goal)

            return step_or_die

        _files.os.replace = dying(rename)  # in this process only
        study(folder, bad)

    in_a_process(lambda: killed_at(0)).join()
    assert not (folder / "study.json").exists()
    while len(before := shards(folder)) < SHARDS:
        process = in_a_process(lambda: killed_at(2))
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert before.items() <= shards(folder).items()
        assert list(folder.rglob(".*.tmp"))
    assert_same_study(study(folder, bad), reference)
    assert shards(folder) == before


def test_finished_study_computes_nothing(bad: list[Example], reference: Study) -> None:
    def never() -> Any:
        raise AssertionError("loaded")

    before = shards(reference.folder)
    study(reference.folder, bad, {"agreement": never})
    assert shards(reference.folder) == before


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"content_only": True}, "content_only was False and is True"),
    ],
)
def test_other_settings_refused(changed: dict[str, Any], told: str, bad: list[Example], reference: Study) -> None:
    with pytest.raises(ValueError, match=f"holds a study with other settings: {told}.*Pass those, or another folder"):
        study(reference.folder, bad, **changed)


@pytest.mark.slow
def test_other_weights_refused(bad: list[Example], reference: Study, shipped: Shipped, tmp_path: Path) -> None:
    folder = tmp_path / "study"
    study(folder, bad)
    model, tokenizer = shipped
    other = type(model)(model.config).eval(), tokenizer
    refused = pytest.raises(ValueError, match="was made with other weights than those of the model 'agreement' now")
    with refused:  # no work is left
        study(folder, bad, {"agreement": other})
    next((folder / "shards").iterdir()).unlink()
    for source in (other, lambda: other):
        with refused:
            study(folder, bad, {"agreement": source})


@pytest.mark.parametrize(
    ("passed", "complaint"),
    [
        ({"examples": []}, "examples is empty"),
        ({"models": {}}, r"models is \[\], shard_size 2, batch_size 32 and batch_tokens 4096: pass at l"),
        ({"shard_size": 0}, "shard_size 0, batch_size 32 and batch_tokens 4096: pass"),
        ({"batch_size": 0}, "batch_size 0 and batch_tokens 4096: pass at least 1"),
        ({"models": {"agreement": in_train_mode()}}, r"train mode: call model\.eval\(\) first"),
        ({"methods": ["magic"]}, "pass some of"),
    ],
)
def test_bad_study_refused(passed: dict[str, Any], complaint: str, bad: list[Example], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        study(tmp_path / "study", passed.pop("examples", bad), **passed)
    assert not (tmp_path / "study").exists()


def test_repeated_ids_refused(bad: list[Example], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 ids are used by several examples, such as 'anaphor 0'"):
        study(tmp_path, [*bad, bad[0]])


@pytest.mark.slow
def test_failed_loader_leaves_folder_usable(bad: list[Example], reference: Study, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train mode"):
        study(tmp_path / "s", bad, {"agreement": in_train_mode})
    assert_same_study(study(tmp_path / "s", bad), reference)


def test_group_called_all_refused(bad: list[Example], tmp_path: Path) -> None:
    mixed = [replace(bad[0], group="all"), *bad[1:]]
    with pytest.raises(ValueError, match=r"a group is called 'all'.*another name"):
        study(tmp_path / "s", mixed)
    assert not (tmp_path / "s").exists()
    alone = study(tmp_path / "s", [replace(example, group="all") for example in bad], methods=["random"])
    with pytest.raises(ValueError, match=r"a group is called 'all'.*another name"):
        study(tmp_path / "s", [replace(bad[0], id="new", group="other")], methods=["random"])
    assert alone.summary["examples"].tolist() == [8]


@pytest.mark.slow
def test_examples_from_a_generator(bad: list[Example], reference: Study, tmp_path: Path) -> None:
    assert_same_study(study(tmp_path / "s", (example for example in bad)), reference)


@pytest.mark.slow
def test_copied_shard_is_ignored(bad: list[Example], reference: Study, tmp_path: Path) -> None:
    found = study(tmp_path / "s", bad)
    one = next((tmp_path / "s" / "shards").iterdir())
    one.with_name(f"{one.stem} (conflicted copy).parquet").write_bytes(one.read_bytes())
    pd.testing.assert_frame_equal(found.rows(), reference.rows())
    pd.testing.assert_frame_equal(study(tmp_path / "s", bad).summary, reference.summary)


def test_broken_file_is_named(bad: list[Example], shipped: Shipped, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    found = study(folder, bad, methods=["random"])
    broken = min((folder / "shards").iterdir())
    broken.write_bytes(broken.read_bytes()[:50])
    for again in (found.rows, lambda: study(folder, bad, {"agreement": shipped}, methods=["random"])):
        with pytest.raises(ValueError, match=rf"{re.escape(str(broken))} cannot be read.*delete it"):
            again()
    broken.unlink()
    assert len(study(folder, bad, methods=["random"]).rows()) == 9
    (folder / "study.json").write_text("{")
    for again in (lambda: Study(folder), lambda: study(folder, bad, methods=["random"])):
        with pytest.raises(ValueError, match=r"study\.json does not hold the settings .*delete the folder"):
            again()


def test_foreign_folder_is_not_changed(bad: list[Example], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"is not empty, and holds no study\.json"):
        study(tmp_path, bad)
    with pytest.raises(FileNotFoundError, match="expected the folder of a study"):
        Study(tmp_path)


@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, *(pytest.param(number, marks=pytest.mark.slow) for number in (errno.EROFS, errno.EACCES))],
)
def test_full_disk_keeps_finished_shards(
    number: int, bad: list[Example], reference: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, synced = tmp_path / "study", os.fsync
    left = [SHARDS + 1 + 3]  # the examples, the manifest and three shards

    def full(file: int) -> None:
        if not left[0]:
            raise OSError(number, os.strerror(number))
        left[0] -= 1
        synced(file)

    with monkeypatch.context() as patched:
        patched.setattr(_files.os, "fsync", full)
        with pytest.raises(OSError, match=f"cannot write .*{os.strerror(number)}.*start again") as caught:
            study(folder, bad)
        assert caught.value.errno == number
        with pytest.raises(FileNotFoundError, match="the study is not finished"):
            Study(folder).summary  # noqa: B018  # reading it is what is tested
    before = shards(folder)
    assert len(before) == 3
    assert not list(folder.rglob("*.tmp"))
    assert_same_study(study(folder, bad), reference)
    assert before.items() <= shards(folder).items()


def test_file_size_limit_is_reported(bad: list[Example], tmp_path: Path) -> None:
    """The same with a limit of the operating system. A shard is longer than the limit, the manifest is shorter."""
    folder, message = tmp_path / "study", tmp_path / "message"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            study(folder, bad)
        except OSError as error:
            message.write_text(str(error))

    in_a_process(limited).join()
    assert "cannot write" in message.read_text()
    assert os.strerror(errno.EFBIG) in message.read_text()
    assert json.loads((folder / "study.json").read_text())["models"] == ["agreement"]
    assert not shards(folder)


def test_impossible_folder_is_reported(bad: list[Example], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*study\.json.*Not a directory"):
        study(tmp_path / "file" / "study", bad)


def test_bar_shows_rate(bad: list[Example], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study(tmp_path / "quiet", bad, methods=["random"])
    assert capsys.readouterr().err == ""
    study(tmp_path / "study", bad, methods=["random"], quiet=False)
    bar = capsys.readouterr().err
    assert "10/10" in bar
    assert "example/s" in bar
    study(tmp_path / "study", bad, methods=["random"], quiet=False)
    assert capsys.readouterr().err == ""  # no work is left


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        port: int = opened.getsockname()[1]
        return port


@pytest.mark.slow
def test_four_processes_share_shards(bad: list[Example], reference: Study, tmp_path: Path) -> None:
    folder, port = tmp_path / "study", free_port()

    def share(rank: int) -> None:
        PartialState._reset_state()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update({"MASTER_ADDR": "localhost", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"})
        rename, written = os.replace, []

        def noted(source: Any, goal: Path) -> None:
            written.append(goal.name)
            rename(source, goal)

        _files.os.replace = noted  # in this process only
        found = study(folder, bad)
        (tmp_path / f"{rank}.json").write_text(json.dumps([len(found.summary), written]))

    processes = [in_a_process(lambda rank=rank: share(rank)) for rank in range(4)]
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * 4
    assert_same_study(Study(folder), reference)
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [lines for lines, _ in told] == [len(reference.summary)] * 4
    written = [[name for name in names if name.endswith(".parquet")] for _, names in told]
    assert [len(names) for names in written] == [2, 1, 1, 1]
    assert sorted(name for names in written for name in names) == sorted(shards(folder))
