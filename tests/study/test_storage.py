"""A study's folder: what faults, other processes and other studies may do to it without changing a row in silence."""

import json
import multiprocessing
import os
import random
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from captum_vz._files import TEMPORARY, remove_temporary, safe_name, write_whole
from captum_vz.errors import UnsupportedLayerError
from captum_vz.study import Batch, Example, Study, as_method, encode, read_jsonl
from captum_vz.study.folder import blocks_of, claim, fingerprint, read_examples
from captum_vz.testbed import load_model
from tests.command import Output, refused
from tests.study.test_run import in_a_process, parts, study

pytestmark = pytest.mark.usefixtures("undrawn")


def small(folder: Path, examples: list[Example], **changed: Any) -> Study:
    return study(folder, examples[:4], **{"methods": ["random", "position"]} | changed)


@pytest.mark.parametrize("table", ["scores", "values"])
def test_changed_bytes_are_noticed(table: str, examples: list[Example], tmp_path: Path) -> None:
    """A flipped bit when the table is read, and another size at the next start."""
    before = small(tmp_path / "s", examples)
    rows, skipped = before.rows(), before.skipped
    path = min((tmp_path / "s" / table).iterdir())
    whole, draw = path.read_bytes(), random.Random(0)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    places = [draw.randrange(len(whole)) for _ in range(20)] + [draw.randrange(footer, len(whole)) for _ in range(20)]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="bytes have changed"):
            before.rows(["example", "cue_dot"])
    more = {"methods": ["random", "position", "attention"]}
    with pytest.raises(ValueError, match="bytes have changed"):
        small(tmp_path / "s", examples, **more)  # its rows are read, because rows are added
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="bytes have changed"):
        small(tmp_path / "s", examples)
    path.unlink()
    again = small(tmp_path / "s", examples)
    pd.testing.assert_frame_equal(again.rows(), rows)
    pd.testing.assert_frame_equal(again.skipped, skipped)


def test_each_number_and_word_counts(examples: list[Example], tmp_path: Path) -> None:
    model, tokenizer = load_model()
    small(tmp_path / "s", examples, models={"agreement": (model, tokenizer)})
    weights = model.get_input_embeddings().weight
    with torch.no_grad():
        before = weights[7, 1].item()
        weights[7, 1] += 1
    with pytest.raises(ValueError, match="with other weights"):
        small(tmp_path / "s", examples, models={"agreement": (model, tokenizer)})
    with torch.no_grad():
        weights[7, 1] = before
    small(tmp_path / "s", examples, models={"agreement": (model, tokenizer)})
    known = fingerprint(model, tokenizer)
    tokenizer.add_tokens(["one"])
    one = fingerprint(model, tokenizer)
    _, again = load_model()
    again.add_tokens(["other"])
    assert len({known, one, fingerprint(model, again)}) == 3


SHARED = Example("shared", ("a", "b"), 0)


def test_starts_at_once_are_merged(tmp_path: Path) -> None:
    """Processes that know nothing of each other add to one study. None of them loses what another has added."""
    for round in range(3):
        folder, start = tmp_path / f"{round}", multiprocessing.get_context("fork").Barrier(4)

        def first(number: int, folder: Path = folder, start: Any = start) -> None:
            start.wait()
            name, example = f"{number}", Example(f"{number}", ("a", "b"), 0)
            claim(folder, [name], {"methods": {name: name}, "metrics": {name: name}}, [example, SHARED], 1)

        processes = [in_a_process(lambda number=number: first(number)) for number in range(4)]
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * 4
        found = json.loads((folder / "study.json").read_text())
        for names in (found["models"], found["methods"], found["metrics"]):
            assert sorted(names) == ["0", "1", "2", "3"]
        ids = [example.id for block in blocks_of(found) for example in read_examples(folder, block)]
        assert sorted(ids) == [*"0123", "shared"]


def test_changed_examples_and_settings_are_noticed(examples: list[Example], tmp_path: Path) -> None:
    small(tmp_path / "s", examples)
    path = tmp_path / "s" / "examples" / "000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"target", b"tarket"))
    with pytest.raises(ValueError, match="missing or has"):
        small(tmp_path / "s", examples)
    (tmp_path / "study.json").write_text(json.dumps({"captum_vz": "1", "models": ["a"]}))
    with pytest.raises(ValueError, match="hold the settings"):
        Study(tmp_path)


def test_only_files_of_killed_processes_removed(tmp_path: Path) -> None:
    dead = in_a_process(lambda: None)
    dead.join()
    here = socket.gethostname()
    left = [".x.tmp", "draft.tmp", f".x.elsewhere.{dead.pid}{TEMPORARY}", f".x.{here}.{os.getppid()}{TEMPORARY}"]
    left.append(f".x.{here}.1{TEMPORARY}")
    for name in [*left, f".x.{here}.{dead.pid}{TEMPORARY}"]:
        (tmp_path / name).write_text("")
    remove_temporary(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)


@pytest.mark.parametrize(
    "name", ["..", ".", "", "/", "../x", "~", ".hidden", "a\\b", "nul\0", "é", "x" * 300, "\ud800"]
)
def test_names_stay_in_their_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_whole(folder / safe_name(name) / "x", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(list(folder.iterdir())) == 1
    assert safe_name(name).isascii()


def test_different_names_differ() -> None:
    names = ["a/b", "a-b", "a b", "a\\b", "a--b", "..", ".", "", "...", "x" * 70, "x" * 71, "summary.csv", "report.md"]
    assert len({safe_name(name) for name in names}) == len(names)
    assert not {safe_name(name) for name in names} & {"summary.csv", "report.md"}


SHORT_OF_MEMORY = [True]


def out_of_memory_on_a_cpu() -> Exception:
    return RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")


def refused_for_memory() -> Exception:
    error = UnsupportedLayerError("the layer does not reproduce its output")
    error.__cause__ = MemoryError()
    return error


@pytest.mark.parametrize("error", [out_of_memory_on_a_cpu, refused_for_memory])  # test_batches.py has torch's own
def test_lack_of_memory_is_tried_again(error: Callable[[], Exception], examples: list[Example], tmp_path: Path) -> None:
    SHORT_OF_MEMORY[:] = [True]
    ids = encode(load_model()[1], examples[1]).ids

    def mine(batch: Batch) -> Tensor:
        if SHORT_OF_MEMORY[0] and any(tuple(row[: len(ids)].tolist()) == ids for row in batch.inputs["input_ids"]):
            raise error()
        return batch.inputs["input_ids"]

    # The version says that the code stays the same. What has changed is the memory.
    methods = {"mine": replace(as_method(mine), version="1"), "position": "position"}
    for _ in range(2):  # there still is no memory
        found = small(tmp_path / "s", examples, methods=methods)
        assert found.skipped["example"].tolist() == [examples[1].id]
        assert re.match(r"out of memory: \S", found.skipped["skipped"][0])
        assert set(found.summary.query("method == 'mine' and group == 'all'")["examples"]) == {3}
    before = parts(tmp_path / "s")
    SHORT_OF_MEMORY[:] = [False]
    reference = small(tmp_path / "reference", examples, methods=methods)
    pd.testing.assert_frame_equal(small(tmp_path / "s", examples, methods=methods).rows(), reference.rows())
    # Only the part of this example was computed again.
    assert [name in parts(tmp_path / "s") for name in sorted(before)] == [False, True, False, True]


BROKEN = {
    "binary": b"\x89PNG\r\n\x1a\n\x00\xff",
    "UTF-16": '{"tokens": ["a"], "target": 0}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "null": b"null",
    "no JSON": b"{",
    "surrogates": b'{"tokens": ["a", "\\ud800"], "target": 0}',
    "wrong types": b'{"tokens": {"a": 1}, "target": []}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(tmp_path)
    good = b'{"tokens": ["a", "b"], "target": 0}\n'
    Path("x.jsonl").write_bytes(BROKEN[kind] if kind == "UTF-16" else good + BROKEN[kind])
    where = r"x\.jsonl does not hold JSON objects" if kind == "UTF-16" else r"x\.jsonl, line 2: "
    with pytest.raises(ValueError, match=where):
        read_jsonl("x.jsonl")
    told = refused(capsys, "study", "--jsonl", "x.jsonl", "--folder", "s")
    assert len(told) < 300
    assert not Path("s").exists()
    Path("s").mkdir()
    Path("s/study.json").write_bytes(BROKEN[kind])
    told = refused(capsys, "study", "--grammar", "2", "--folder", "s")
    assert "s/study.json does not hold the settings of a study" in told
    with pytest.raises(ValueError, match=re.escape("does not hold the settings")):
        Study("s")


@pytest.mark.parametrize("record", [b"null", b"{}", b'{"sentence_good": 5, "sentence_bad": "a"}'])
def test_broken_blimp_is_one_line(record: bytes, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "anaphor_number_agreement.jsonl").write_bytes(record)
    told = refused(capsys, "study", "--blimp", str(tmp_path), "--folder", str(tmp_path / "s"))
    assert "anaphor_number_agreement.jsonl, line 1" in told
