"""The pictures of the page: made by one script, from the code that the page shows."""

import re
import runpy
from pathlib import Path

import pytest

from captum_vz.visualization import read_provenance
from tests.documents import ROOT

IMAGES = ROOT / "tutorials" / "images"
PAGE = ROOT / "tutorials" / "docs" / "pictures.md"
SHOWN = sorted(re.findall(r"^!\[([^\]]+)\]\(\.\./images/([\w-]+\.png)\)", PAGE.read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("name", [*(name for _, name in SHOWN), "explained.png"])
def test_picture_states_its_origin(name: str) -> None:
    found = read_provenance(IMAGES / name)
    assert found["package"].startswith("captum_vz")
    assert len(found["description"]) > 40
    assert not re.search(r"/(home|root|tmp|work)/", str(found))


def test_every_picture_is_shown_and_bars_are_those_of_the_table() -> None:
    documents = [*(ROOT / "tutorials" / "docs").glob("*.md"), ROOT / "README.md"]
    text = "".join(path.read_text("utf-8") for path in documents)
    assert not [path.name for path in IMAGES.glob("*.png") if path.name not in text]
    drawn = runpy.run_path(str(IMAGES / "explain_pages.py"))
    times, figure = drawn["times"](), drawn["speed"]()
    assert times["bert-base"] == {"maps": 2.16, "row": 0.27, "forward pass": 0.15, "definition": 9.1}
    (axes,) = figure.axes
    widths = [[bar.get_width() for bar in bars] for bars in axes.containers]
    assert widths == [[times[model][name] for model in times] for name in drawn["BARS"]]


@pytest.mark.slow
def test_page_pictures_are_drawn_again(tmp_path: Path) -> None:
    """The script draws each picture of the pages. Where a page's text quotes numbers of its picture, they are right."""
    drawn = runpy.run_path(str(IMAGES / "explain_pages.py"))
    names = [name for name in drawn["PICTURES"] if name != "view"]  # which needs a browser
    drawn["main"](names, tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.png")) == sorted(names)
    reports = drawn["reports"]()
    assert [report.passed for report in reports.values()] == [True, True, False]
    assert {one.name for one in reports["model that is wrong"].checks if one.excess > 1} == {"padding"}


@pytest.mark.slow
def test_pictures_are_those_of_the_code(tmp_path: Path) -> None:
    """The script draws all pictures again. Their largest scores, as their descriptions name them, are the same."""
    draw = runpy.run_path(str(IMAGES / "draw.py"))["draw"]
    assert set(draw(tmp_path)) == {*(name for _, name in SHOWN), "explained.png"}
    for path in sorted(tmp_path.glob("*.png")):
        assert read_provenance(path)["description"] == read_provenance(IMAGES / path.name)["description"], path.name
