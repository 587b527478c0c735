"""The README's code runs, its commands are those of `.ci/run`, and it stays short."""

import re
from pathlib import Path

import pytest

from captum_vz import ValueZeroing, ValueZeroingRollout, find_layers
from captum_vz.testbed import load_model
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


def test_numbers_of_the_first_picture() -> None:
    """The caption quotes what is computed, in the order of its sentences."""
    caption = README.read_text("utf-8").partition("*Value Zeroing in the four layers")[2].partition("\n\n")[0]
    quoted = re.findall(r"(?<![\w.=])0\.\d\d", caption)
    model, tokenizer = load_model()
    encoding = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    the, pictures, mask = map(encoding.tokens().index, ("the", "pictures", "[MASK]"))
    layers = find_layers(model)
    read = ValueZeroing(model, layers[3]).attribute(encoding, token=mask)[0]
    kept, bare = (
        ValueZeroingRollout(model, layers, residual=one).attribute(encoding, token=mask)[0] for one in (0.5, None)
    )
    assert quoted == [f"{number:.2f}" for number in (read[pictures], kept[pictures], bare[the])]
    assert (kept.argmax(), bare.argmax()) == (pictures, the)


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
