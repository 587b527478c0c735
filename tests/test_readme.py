"""The README's code runs, its commands are those of `.ci/run`, and it stays short."""

import re
import runpy
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks_of, commands_of, run_blocks

README = ROOT / "README.md"
MOST_WORDS = 1500
MOST_TO_READ = 900  # without code and tables: three to four minutes


def test_readme_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(README)
    assert {"python", "bash"} <= {block.language for block in blocks}
    run_blocks(blocks)


def test_readme_has_the_setup_commands() -> None:
    commands = [command for block in blocks_of(README) for command in commands_of(block.code)]
    assert 'pip install torch==2.13.0 -e ".[test]"' in commands
    assert "pytest" in [command.partition("#")[0].strip() for command in commands]


def test_readme_is_short() -> None:
    text = README.read_text("utf-8")
    assert len(text.split()) <= MOST_WORDS
    prose = re.sub(r"^```.*?^```$|^\|.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= MOST_TO_READ


@pytest.mark.slow
def test_numbers_of_the_first_picture() -> None:
    """Its description and its caption quote what the script computes."""
    text = README.read_text("utf-8")
    ((described, caption),) = re.findall(r"!\[(Which word.*?)\]\(.*?\n\n\*(.*?)\*\n", text, re.DOTALL)
    assert len(caption.split()) <= 30
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


def test_pages_can_be_found() -> None:
    """README links the first page and the lessons. The first page links each page, that of lessons each notebook."""
    docs = ROOT / "tutorials" / "docs"
    readme = README.read_text("utf-8")
    assert "(tutorials/docs/index.md#where-to-go)" in readme
    assert "(tutorials/docs/teaching.md)" in readme
    start, lessons = (docs / "index.md").read_text("utf-8"), (docs / "teaching.md").read_text("utf-8")
    assert not [page.name for page in docs.glob("*.md") if page.stem != "index" and f"({page.name}" not in start]
    notebooks = [*sorted((ROOT / "tutorials").glob("*.ipynb")), ROOT / "tutorials" / "README.md"]
    assert not [one.name for one in notebooks if f"(../{one.name})" not in lessons]


def test_readme_links_the_first_lesson_early() -> None:
    first_screen = README.read_text("utf-8").partition("## Install")[0]
    assert "](tutorials/01_value_zeroing_with_captum.ipynb)" in first_screen
    assert "minute" in first_screen
