"""The files that the command writes are whole or missing, whatever the disk does."""

import os
import stat
from pathlib import Path

import pytest
from PIL import Image

from captum_vz.cli import main
from tests.command import alone_in, full_disk, refused

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
PROMPT = "the pictures of some hat"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="limits, links and devices are those of POSIX")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return alone_in(tmp_path, monkeypatch)


COMMANDS = [
    ["explain", SENTENCE, "--output", "new.svg"],
    ["compare", SENTENCE, "--methods", "random", "--html", "new.html"],
    ["generate", PROMPT, "--max-new-tokens", "1", "--output", "new.png"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda one: f"{one[0]} {one[-1]}")
def test_full_disk_leaves_no_part_of_a_file(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(arguments[-1])
    path.write_text("older")
    before = sorted(folder.iterdir())
    with full_disk():
        assert f"cannot write {path}: File too large." in refused(capsys, *arguments)
    assert sorted(folder.iterdir()) == before
    assert path.read_text() == "older"


def test_stopped_picture_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stopped)
    assert main(["explain", SENTENCE, "--output", "new.png"]) == 130
    assert not list(folder.iterdir())


def test_replaced_file_keeps_its_rights_and_links(folder: Path) -> None:
    (folder / "there").mkdir()
    real, link = folder / "there" / "real.png", folder / "link.png"
    real.write_text("older")
    real.chmod(0o640)
    link.symlink_to(real)
    assert main(["explain", SENTENCE, "--output", "link.png"]) == 0
    assert link.readlink() == real
    assert Image.open(real).format == "PNG"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert [path.name for path in real.parent.iterdir()] == ["real.png"]


def test_devices_are_written_in_place() -> None:
    """A renamed file would take the place of the device."""
    assert main(["explain", SENTENCE, "--html", "/dev/null"]) == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
