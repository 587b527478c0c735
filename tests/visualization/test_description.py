"""What a figure says about itself: its text, its table, and where it comes from, in the figure and in files."""

import csv
import io
import json
import re
from copy import deepcopy
from pathlib import Path
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
    draw_maps,
    draw_row,
    read_provenance,
    save_figure,
    weights_fingerprint,
)

TOKENS = ["a", "b <i>", "日"]
MAP = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.0, 0.25, 0.75]])


def test_text_and_table_have_the_numbers() -> None:
    text = describe(draw_maps({"layer 4": MAP}, TOKENS, token=2, title="Where from?")).text
    assert (
        text
        == "Where from?. layer 4, map of 3 tokens: the row of 日 has its largest scores at 日 0.75, b <i> 0.25, a 0.00."
    )
    whole = describe(draw_maps([MAP], TOKENS)).text
    assert "the largest scores are b <i> from b <i> 0.80, 日 from 日 0.75, a from a 0.50" in whole
    found = describe(draw_maps([MAP, MAP.T], TOKENS, label="share"))
    assert found.columns == ("panel", "out", "output token", "in", "source token", "share")
    for panel, i, _, j, source, score in found.rows:
        expected = MAP if panel == "layer 0" else MAP.T
        assert score == float(expected[i, j]) and source == TOKENS[j]
    assert len(found.rows) == 18
    with pytest.raises(ArgumentError, match="Nothing in this Figure was drawn by captum_vz"):
        describe(Figure())


def test_table_is_exported(tmp_path: Path) -> None:
    found = describe(draw_row([MAP[0]], TOKENS, token=0))
    head, *lines = csv.reader(io.StringIO(found.to_csv(tmp_path / "t.csv")))
    assert head == ["row", "in", "source token", "share of the row"]
    assert [float(line[3]) for line in lines] == pytest.approx([0.5, 0.3, 0.2])
    assert (tmp_path / "t.csv").read_text("utf-8") == found.to_csv()
    frame = found.to_pandas()
    assert frame["source token"].tolist() == TOKENS


def signed(model: nn.Module) -> Figure:
    figure = draw_maps([MAP], TOKENS, token=0)
    return add_provenance(
        figure,
        model=model,
        name="mine",
        method="value-zeroing",
        text="日 <b>",
        command=["captum-vz", "explain", "日 <b>"],
    )


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_files_say_where_they_come_from(ending: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    figure = signed(model)
    figure.savefig(tmp_path / f"maps.{ending}")
    found = read_provenance(tmp_path / f"maps.{ending}")
    assert found["package"].startswith("captum_vz ")
    assert found["weights"] == weights_fingerprint(model)
    assert (found["model class"], found["model"], found["method"]) == ("Linear", "mine", "value-zeroing")
    assert (found["text"], found["command"]) == ("日 <b>", "captum-vz explain '日 <b>'")
    assert found["description"] == describe(figure).text
    assert {key: value for key, value in found.items() if key != "description"} == describe(figure).provenance


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
    add_provenance(own, method="m", weather="fine")
    save_figure(own, tmp_path / "own.png")
    found = read_provenance(tmp_path / "own.png")
    assert (found["method"], found["weather"]) == ("m", "fine")
    own.savefig(tmp_path / "plain.png")
    with pytest.raises(ArgumentError, match=r"plain\.png carries no provenance"):
        read_provenance(tmp_path / "plain.png")
    draw_maps([MAP], TOKENS).savefig(tmp_path / "maps.png", metadata={"Title": "mine", "Author": "me"})
    with Image.open(tmp_path / "maps.png") as image:
        assert (image.text["Title"], image.text["Author"]) == ("mine", "me")
        assert json.loads(image.text["captum_vz"])["package"]
    with pytest.raises(ArgumentError, match="model is of type str"):
        add_provenance(Figure(), model="bert")  # type: ignore[arg-type]  # the error is tested
    (tmp_path / "x.svg").write_text("<svg")
    with pytest.raises(ArgumentError, match=r"x\.svg is no SVG"):
        read_provenance(tmp_path / "x.svg")
    with pytest.raises(ArgumentError, match="is no PNG or SVG file"):
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


def drawn() -> Figure:
    return draw_maps([MAP], WORDS, 2, title="the title")


def words_of(svg: bytes) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def assert_camera_ready(pdf: bytes) -> None:
    assert b"/FontFile2" in pdf  # a TrueType font
    assert not re.search(rb"/Type3\b", pdf)


def saved(figure: Figure, kind: str, way: str, folder: Path) -> bytes:
    path, buffer = folder / f"figure.{kind}", io.BytesIO()
    match way:
        case "path":
            figure.savefig(path)
            return path.read_bytes()
        case "buffer":
            figure.savefig(buffer, format=kind)
        case "copied":
            deepcopy(figure).savefig(buffer, format=kind)
        case "save_figure":
            save_figure(figure, path)
            return path.read_bytes()
    return buffer.getvalue()


@pytest.mark.parametrize("way", ["path", "buffer", "copied", "save_figure"])
def test_any_way_of_saving(way: str, tmp_path: Path) -> None:
    before = dict(rcParams)
    figure = drawn()
    assert_camera_ready(saved(figure, "pdf", way, tmp_path))
    assert {*WORDS, "the title", "source token"} <= set(words_of(saved(figure, "svg", way, tmp_path)))
    assert dict(rcParams) == before
