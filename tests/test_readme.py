"""The README's code runs, its commands are those of `.ci/run`, and it stays short."""

import re
import runpy
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks_of, commands_of, run_blocks

README = ROOT / "README.md"
MOST_WORDS = 1600


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(README)
    assert {"python", "bash"} <= {block.language for block in blocks}
    run_blocks(blocks)


def test_readme_has_the_setup_commands() -> None:
    commands = [command for block in blocks_of(README) for command in commands_of(block.code)]
    assert 'pip install torch==2.13.0 -e ".[test]"' in commands
    assert "pytest" in commands


def test_readme_is_short() -> None:
    assert len(README.read_text("utf-8").split()) <= MOST_WORDS


@pytest.mark.slow
def test_numbers_of_the_first_picture() -> None:
    """Its description and its caption quote what the script computes."""
    described, caption = re.findall(r"!\[(Which word.*?)\]\(.*?\n\n\*(.*?)\*\n", README.read_text("utf-8"), re.DOTALL)[
        0
    ]
    assert len(caption.split()) <= 40
    script = runpy.run_path(str(ROOT / "tutorials" / "images" / "first.py"))
    words, _, rows = script["rows"]()
    cue = words.index("pictures")
    assert all(max(rows[name]) == rows[name][cue] for name in ("layer 3", "truth*"))
    shown = [rows["layer 3"][cue], rows["truth*"][cue], *script["shares"]().values()]
    assert re.findall(r"\d\.\d\d", described) == [f"{share:.2f}" for share in shown]
    ranks = script["shares"](metric="cue_ap")
    alike = [ranks[name] for name in ("Value Zeroing", "attention norms", "attention")]
    assert re.findall(r"\d\.\d\d", caption) == [f"{share:.2f}" for share in alike]
    assert max(ranks.values()) - min(alike) < 0.01


def test_readme_links_every_page() -> None:
    """README links the pages, and the page of lessons links the notebooks."""
    readme, lessons = README.read_text("utf-8"), (ROOT / "tutorials" / "docs" / "lessons.md").read_text("utf-8")
    pages = sorted((ROOT / "tutorials" / "docs").glob("*.md"))
    notebooks = [*sorted((ROOT / "tutorials").glob("*.ipynb")), ROOT / "tutorials" / "README.md"]
    missing = [page.name for page in pages if f"({page.relative_to(ROOT).as_posix()})" not in readme]
    missing += [one.name for one in notebooks if f"(../{one.name})" not in lessons]
    assert not missing


def test_readme_links_the_first_lesson_early() -> None:
    first_screen = README.read_text("utf-8").partition("## Install")[0]
    assert "](tutorials/01_value_zeroing_with_captum.ipynb)" in first_screen
    assert "minute" in first_screen
