"""What a figure says about itself, in the figure and in files, what pictures refuse, and the pictures of the pages."""

import csv
import io
import json
import re
import runpy
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib import rcParams
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from captum_vz.errors import ArgumentError
from captum_vz.visualization import (
    add_provenance,
    describe,
    draw_audio,
    draw_comparison,
    draw_image,
    draw_maps,
    draw_route,
    draw_row,
    image_grid,
    read_provenance,
    save_figure,
    save_html,
    weights_fingerprint,
)
from tests.documents import ROOT

TOKENS = ["a", "b <i>", "日"]
MAP = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.0, 0.25, 0.75]])


def test_text_and_table_have_the_numbers() -> None:
    text = describe(draw_maps({"layer 4": MAP}, TOKENS, token=2, title="Where from?")).text
    row = "the row of 日 has its largest scores at 日 0.75, b <i> 0.25, a 0.00."
    assert text == f"Where from?. layer 4, map of 3 tokens: {row}"
    whole = describe(draw_maps([MAP], TOKENS)).text
    assert "the largest scores are b <i> from b <i> 0.80, 日 from 日 0.75, a from a 0.50" in whole
    found = describe(draw_maps([MAP, MAP.T], TOKENS, label="share"))
    assert found.columns == ("panel", "out", "output token", "in", "source token", "share")
    for panel, i, _, j, source, score in found.rows:
        expected = MAP if panel == "layer 0" else MAP.T
        assert score == float(expected[i, j]) and source == TOKENS[j]
    assert len(found.rows) == 18
    with pytest.raises(ArgumentError, match="drawn by captum_vz"):
        describe(Figure())


def test_table_is_exported(tmp_path: Path) -> None:
    found = describe(draw_row([MAP[0]], TOKENS, token=0))
    head, *lines = csv.reader(io.StringIO(found.to_csv(tmp_path / "t.csv")))
    assert head == ["row", "in", "source token", "share of the row"]
    assert [float(line[3]) for line in lines] == pytest.approx([0.5, 0.3, 0.2])
    assert (tmp_path / "t.csv").read_text("utf-8") == found.to_csv()
    frame = found.to_pandas()
    assert frame["source token"].tolist() == TOKENS


def test_same_numbers_give_the_same_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.hashsalt", "0")
    for name in ("one.svg", "two.svg"):
        draw_maps([MAP], TOKENS, token=0).savefig(tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_notebook_shows_the_figure() -> None:
    """Without `%matplotlib inline` or pyplot, and with words for readers who do not see it."""
    figure = draw_maps([torch.tensor([[0.75, 0.25], [0.5, 0.5]])], ["a", "b"], token=0)
    shown, about = DisplayFormatter().format(figure)
    with Image.open(io.BytesIO(shown["image/png"])) as image:
        assert image.size == tuple(int(inches * figure.dpi) for inches in figure.get_size_inches())
    assert about["image/png"]["alt"] == describe(figure).text
    assert about["image/png"]["width"] == round(figure.get_size_inches()[0] * 96)


def test_figures_of_users_are_saved(tmp_path: Path) -> None:
    own = Figure()
    draw_maps([MAP], TOKENS, ax=own.subplots())
    add_provenance(own, model=nn.Linear(2, 2), name="mine", method="m", weather="fine")
    for path in (tmp_path / "own.png", tmp_path / "own.svg"):
        save_figure(own, path)
        found = read_provenance(path)
        told = ("Linear", "mine", "m", "fine")
        assert tuple(found[name] for name in ("model class", "model", "method", "weather")) == told
        assert {key: value for key, value in found.items() if key != "description"} == describe(own).provenance
    for record in ({}, {"captum_vz": '{"package"'}, {"captum_vz": '["package"]'}):
        own.savefig(tmp_path / "plain.png", metadata=record)
        with pytest.raises(ArgumentError, match="no provenance"):
            read_provenance(tmp_path / "plain.png")
    draw_maps([MAP], TOKENS).savefig(tmp_path / "maps.png", metadata={"Title": "mine", "Author": "me"})
    with Image.open(tmp_path / "maps.png") as image:
        assert (image.text["Title"], image.text["Author"]) == ("mine", "me")
        assert json.loads(image.text["captum_vz"])["package"]
    with pytest.raises(ArgumentError, match="of type str"):
        add_provenance(Figure(), model="bert")  # type: ignore[arg-type]  # the error is tested
    (tmp_path / "x.svg").write_text("<svg")
    with pytest.raises(ArgumentError, match=r"x\.svg is no SVG"):
        read_provenance(tmp_path / "x.svg")
    with pytest.raises(ArgumentError, match="no PNG or SVG"):
        read_provenance(tmp_path / "x.pdf")


def test_fingerprint_sees_every_weight() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)).to(torch.bfloat16)
    before = weights_fingerprint(model)
    assert re.fullmatch("[0-9a-f]{64}", before)
    assert weights_fingerprint(model) == before
    with torch.no_grad():
        model[0].weight[17, 3] += 1
    assert weights_fingerprint(model) != before


HOSTILE = ["\x00NUL", "\ud800", "\u202ex", "a\nb", "<&>\"'", "🚀"]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_hostile_tokens_are_in_files(ending: str, tmp_path: Path) -> None:
    """Control characters and halves of surrogate pairs are written as escapes, which any file takes."""
    figure = draw_maps([torch.eye(6)], HOSTILE, title="t\x00 🚀", label="l\x01", token=1)
    add_provenance(figure, text="".join(HOSTILE), method="m\x00")
    figure.savefig(tmp_path / f"picture.{ending}")
    if ending != "pdf":
        found = read_provenance(tmp_path / f"picture.{ending}")
        assert found["text"] == "".join(HOSTILE)
        assert found["description"] == str(describe(figure))
        assert found["description"].startswith("t\\x00 ") and "the row of \\ud800 has" in found["description"]
    describe(figure).to_csv(tmp_path / "numbers.csv")


# Fonts in files: what publishers check in PDF, and text in SVG that can be searched.

WORDS = ["the", "pictures", "[MASK]"]


def by_buffer(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:])
    path.write_bytes(buffer.getvalue())


WAYS: dict[str, Callable[[Figure, Path], object]] = {
    "path": lambda figure, path: figure.savefig(path),
    "buffer": by_buffer,
    "copied": lambda figure, path: deepcopy(figure).savefig(path),
    "save_figure": save_figure,
}


@pytest.mark.parametrize("way", WAYS)
def test_any_way_of_saving(way: str, tmp_path: Path) -> None:
    before = dict(rcParams)
    figure = draw_maps([MAP], WORDS, 2, title="the title")
    for ending in ("pdf", "svg"):
        WAYS[way](figure, tmp_path / f"figure.{ending}")
    pdf, svg = (tmp_path / "figure.pdf").read_bytes(), ElementTree.parse(tmp_path / "figure.svg")
    assert b"/FontFile2" in pdf and not re.search(rb"/Type3\b", pdf)  # a TrueType font
    shown = {"".join(one.itertext()) for one in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {*WORDS, "the title", "source token"} <= shown
    assert dict(rcParams) == before


# The pictures of the page: made by one script, from the code that the page shows


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


# What pictures refuse


TWO = ["a", "b"]
ONE = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
IMAGE, SOUND = torch.rand(3, 8, 8), torch.sin(torch.arange(32000) / 20)
ARRAYS: list[Any] = [ONE.numpy()]
maps = partial(draw_maps, [ONE], TWO)
audio = partial(draw_audio, SOUND, sampling_rate=16000)
over = partial(draw_image, image=IMAGE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_maps([], TWO), "at least one map"),
        (lambda: draw_maps([torch.eye(3)], TWO), r"got \(3, 3\)"),
        (lambda: draw_maps([ONE.expand(4, 2, 2)], TWO), "or heads="),
        (lambda: draw_maps(ARRAYS, TWO), "got ndarray"),
        (lambda: draw_maps([ONE / 0], TWO), "got NaN or infinity"),
        (lambda: maps(2), "2 is out of range"),
        (lambda: draw_maps([ONE] * 2, TWO, ax=Figure().subplots()), "ax holds 1 axes"),
        (lambda: maps(scale="log"), "scale is 'log'"),
        (lambda: maps(vmax=float("nan")), "vmax is nan"),
        (lambda: maps(vmax=1, scale="panel"), "a positive number"),
        (lambda: maps(words=[0, 1, 2]), "words has 3 entries"),
        (lambda: maps(dim="stop"), "dim is 'stop'"),
        (lambda: maps(drop=[0, 1]), "leaves out all"),
        (lambda: maps(0, drop=[0]), "marked and left out"),
        (lambda: maps(minus=([torch.eye(1)], ["a"])), "'b' has no partner"),
        (lambda: maps(minus=([ONE] * 2, TWO)), "minus has the maps"),
        (lambda: maps(minus=(ONE,)), r"pass \(maps"),
        (lambda: draw_row([ONE], TWO), "pass token, the"),
        (lambda: draw_row([], TWO), "at least one layer"),
        (lambda: draw_row([ONE[0]], TWO, scale="panel"), "'row', 'root'"),
        (lambda: draw_comparison({"m": ONE[0]}, TWO, truth=torch.rand(3)), r"got \(3,\)"),
        (lambda: draw_comparison({}, TWO), "at least one method"),
        (lambda: draw_route([], TWO, 0), "at least one layer"),
        (lambda: draw_route([-ONE], TWO, 0), "maps of shares"),
        (lambda: draw_route([ONE * 2], TWO, 0), "a sum of up to 2"),
        (lambda: draw_route([ONE], TWO, 0, threshold=0), "threshold is 0"),
        (lambda: draw_audio(torch.rand(2, 9), ONE[0], 16000), r"a batch \(2, 9\)"),
        (lambda: audio(scores=torch.tensor([float("nan")])), "scores: .* got NaN"),
        (lambda: audio(scores=ONE[0], spans=[(0, 1)]), "2 scores and 1"),
        (lambda: audio(scores=ONE[0, :1], spans=[(1, 9)]), "not inside the"),
        (lambda: audio(scores=ONE[0, :1], names=TWO), "1 scores and 2"),
        (lambda: image_grid(torch.rand(3, 3), IMAGE), r"a batch \(3, 3\)"),
        (lambda: image_grid(torch.rand(4), torch.rand(4, 4)), r"image is \(4, 4\)"),
        (lambda: image_grid(torch.rand(30), torch.rand(3, 7, 100)), "make no grid"),
        (lambda: image_grid(torch.rand(4), IMAGE, grid=(3, 3)), "3 by 3 patches"),
        (lambda: over([torch.eye(17)]), "pass token"),
        (lambda: over([]), "at least one layer"),
        (lambda: over([torch.rand(17)], scale="log"), "scale is 'log'"),
        (lambda: save_html([], "page.html"), "at least one record"),
    ],
)
def test_wrong_arguments_of_pictures(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()
