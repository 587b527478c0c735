"""The pictures of the page: made by one script, from the code that the page shows."""

import re
import runpy
from pathlib import Path

import pytest

from captum_vz.visualization import read_provenance
from tests.documents import ROOT

IMAGES = ROOT / "tutorials" / "images"
PAGE = ROOT / "tutorials" / "docs" / "pictures.md"
SHOWN = sorted(re.findall(r"!\[([^\]]+)\]\(\.\./images/([\w-]+\.png)\)", PAGE.read_text("utf-8")))


def test_pictures_have_words() -> None:
    assert len(SHOWN) > 10
    assert all(len(words.split()) > 4 for words, _ in SHOWN)


@pytest.mark.parametrize("name", [*(name for _, name in SHOWN), "explained.png"])
def test_picture_states_its_origin(name: str) -> None:
    found = read_provenance(IMAGES / name)
    assert found["package"].startswith("captum_vz")
    assert len(found["description"]) > 40
    assert not re.search(r"/(home|root|tmp|work)/", str(found))


def test_every_picture_is_shown() -> None:
    documents = [*(ROOT / "tutorials" / "docs").glob("*.md"), ROOT / "README.md"]
    text = "".join(path.read_text("utf-8") for path in documents)
    assert not [path.name for path in IMAGES.glob("*.png") if path.name not in text]


@pytest.mark.slow
def test_pictures_are_those_of_the_code(tmp_path: Path) -> None:
    """The script draws all pictures again. Their largest scores, as their descriptions name them, are the same."""
    draw = runpy.run_path(str(IMAGES / "draw.py"))["draw"]
    assert set(draw(tmp_path)) == {*(name for _, name in SHOWN), "explained.png"}
    for path in sorted(tmp_path.glob("*.png")):
        assert read_provenance(path)["description"] == read_provenance(IMAGES / path.name)["description"], path.name
