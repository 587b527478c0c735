"""The files that a program or the command writes are whole, or as they were before."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from captum_vz.cli import main
from captum_vz.functional import normalize_rows
from captum_vz.study import Example, write_jsonl
from captum_vz.visualization import describe, draw_maps, draw_row, save_figure, save_html, text_record, view
from tests.command import full_disk, refused

TOKENS = ["the", "pictures", "of", "some", "hat"]
MAP = normalize_rows(torch.rand(5, 5, generator=torch.Generator().manual_seed(0)))
pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits, links and devices are those of POSIX")


def drawn() -> Any:
    return draw_row(MAP[:2], TOKENS, token=2)


def plain() -> Any:
    """A figure of the user's own, with a picture in it."""
    figure = Figure()
    draw_maps([MAP], TOKENS, token=2, ax=figure.subplots())
    return figure


# Each of these files is longer than a full disk allows.
WRITERS: dict[str, Callable[[Path], Any]] = {
    "figure.png": lambda path: drawn().savefig(path),
    "figure.pdf": lambda path: drawn().savefig(str(path)),
    "figure.svg": lambda path: drawn().savefig(path, transparent=True),
    "saved.pdf": lambda path: save_figure(drawn(), path),
    "plain.pdf": lambda path: save_figure(plain(), path),
    "view.html": lambda path: view([MAP], TOKENS).save(path),
    "records.html": lambda path: save_html([text_record(TOKENS, MAP[0])], path),
    "table.csv": lambda path: describe(draw_row({str(i): MAP[0] for i in range(50)}, TOKENS)).to_csv(path),
    "examples.jsonl": lambda path: write_jsonl(path, [Example("1", tuple(TOKENS), 1)] * 50),
}


@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_leaves_the_older_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("older")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        WRITERS[name](path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "older"


@pytest.mark.parametrize("name", WRITERS)
def test_missing_folder_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/"):
        WRITERS[name](tmp_path / "nowhere" / name)


SENTENCE = "the pictures of some hat [MASK] scaring marcus."
COMMANDS = [
    ["explain", SENTENCE, "--output", "new.svg"],
    ["compare", SENTENCE, "--methods", "random", "--html", "new.html"],
    ["generate", "the pictures of some hat", "--max-new-tokens", "1", "--output", "new.png"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda one: f"{one[0]} {one[-1]}")
def test_full_disk_is_one_line(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / arguments[-1]
    path.write_text("older")
    with full_disk():
        assert f"cannot write {path.name}: File too large." in refused(capsys, *arguments)
    assert list(folder.iterdir()) == [path]
    assert path.read_text() == "older"


def test_stopped_picture_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    assert main(["explain", SENTENCE, "--output", str(tmp_path / "new.png")]) == 130
    assert not list(tmp_path.iterdir())


def test_older_file_keeps_its_rights_and_links(tmp_path: Path) -> None:
    path, link, second = tmp_path / "view.html", tmp_path / "link.html", tmp_path / "second.html"
    path.write_text("older")
    path.chmod(0o640)
    link.symlink_to(path)
    second.hardlink_to(path)
    view([MAP], TOKENS).save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_text() == second.read_text() != "older"


def test_new_file_behind_a_link_is_gone(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "new.html")
    with full_disk(), pytest.raises(OSError, match="File too large"):
        view([MAP], TOKENS).save(link)
    assert list(tmp_path.iterdir()) == [link]
    assert link.is_symlink()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_protected_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "view.html"
    path.write_text("older")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=re.escape(str(path))):
        view([MAP], TOKENS).save(path)
    assert path.read_text() == "older"


def test_threads_write_their_own_files(tmp_path: Path) -> None:
    """Names of which the first forty characters are alike."""

    def write(number: int) -> None:
        write_jsonl(
            tmp_path / f"value-zeroing-rollout-of-bert-base-uncased-{number}.jsonl", [Example(str(number), ("a",), 0)]
        )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, list(range(8)) * 10))
    found = {path.stem.rpartition("-")[2]: json.loads(path.read_text())["id"] for path in tmp_path.iterdir()}
    assert found == {str(number): str(number) for number in range(8)}


def test_pictures_beside_a_file_are_its_own(tmp_path: Path) -> None:
    with rc_context({"svg.image_inline": False}):
        drawn().savefig(tmp_path / "one.svg")
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"one"}
    assert len(list(tmp_path.glob("one.svg.image*.png"))) > 0


def test_device_is_written_in_place() -> None:
    drawn().savefig("/dev/null", format="png")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["picture", "picture."])
def test_name_without_an_ending_gets_matplotlibs(name: str, tmp_path: Path) -> None:
    with rc_context({"savefig.format": "svg"}):
        drawn().savefig(tmp_path / name)
    drawn().savefig(tmp_path / name)
    drawn().savefig(tmp_path / "named", format="pdf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["named", "picture.png", "picture.svg"]
    assert (tmp_path / "named").read_bytes().startswith(b"%PDF")
