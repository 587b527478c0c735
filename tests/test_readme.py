"""The README's code runs, its commands are those of `.ci/run`, and it stays short."""

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


def test_readme_links_every_page() -> None:
    pages = sorted((ROOT / "tutorials").rglob("*.md")) + sorted((ROOT / "tutorials").glob("*.ipynb"))
    text = README.read_text("utf-8")
    missing = [page.name for page in pages if f"({page.relative_to(ROOT).as_posix()})" not in text]
    assert not missing
