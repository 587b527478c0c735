"""Fonts in files: what publishers check in PDF, and text in SVG that can be searched."""

import re
from collections.abc import Callable
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from matplotlib import rcParams
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from captum_vz.visualization import draw_audio, draw_comparison, draw_maps, draw_route, draw_row, save_figure

TOKENS = ["the", "pictures", "[MASK]"]
MAP = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.1, 0.3, 0.6]])

DRAWN: dict[str, Callable[[], Figure]] = {
    "maps": lambda: draw_maps([MAP], TOKENS, 2, title="the title"),
    "row": lambda: draw_row([MAP, MAP], TOKENS, 2),
    "comparison": lambda: draw_comparison({"one": MAP[0]}, TOKENS, 2, truth=MAP[1]),
    "route": lambda: draw_route([MAP, MAP], TOKENS, 2),
    "audio": lambda: draw_audio(torch.sin(torch.arange(99.0)), MAP[0], 16000, names=TOKENS),
}


def words_of(svg: bytes) -> list[str]:
    return ["".join(one.itertext()) for one in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def assert_camera_ready(pdf: bytes) -> None:
    assert b"/FontFile2" in pdf  # a TrueType font
    assert not re.search(rb"/Type3\b", pdf)


def saved(figure: Figure, kind: str, way: str, folder: Path) -> bytes:
    path, buffer = folder / f"figure.{kind}", BytesIO()
    match way:
        case "path":
            figure.savefig(path)
            return path.read_bytes()
        case "buffer":
            figure.savefig(buffer, format=kind)
        case "canvas":
            figure.canvas.print_figure(buffer, format=kind, bbox_inches="tight")
        case "copied":
            deepcopy(figure).savefig(buffer, format=kind)
        case "save_figure":
            save_figure(figure, path)
            return path.read_bytes()
    return buffer.getvalue()


@pytest.mark.parametrize("way", ["path", "buffer", "canvas", "copied", "save_figure"])
def test_any_way_of_saving(way: str, tmp_path: Path) -> None:
    before = dict(rcParams)
    figure = DRAWN["maps"]()
    assert_camera_ready(saved(figure, "pdf", way, tmp_path))
    assert {*TOKENS, "the title", "source token"} <= set(words_of(saved(figure, "svg", way, tmp_path)))
    assert dict(rcParams) == before


@pytest.mark.parametrize("name", DRAWN)
def test_every_picture_has_fonts(name: str, tmp_path: Path) -> None:
    assert_camera_ready(saved(DRAWN[name](), "pdf", "path", tmp_path))
    assert set(TOKENS) <= set(words_of(saved(DRAWN[name](), "svg", "path", tmp_path)))


def test_figure_of_a_user_has_fonts(tmp_path: Path) -> None:
    own = Figure()
    draw_maps([MAP], TOKENS, ax=own.subplots())
    assert_camera_ready(saved(own, "pdf", "save_figure", tmp_path))
    assert set(TOKENS) <= set(words_of(saved(own, "svg", "save_figure", tmp_path)))


def test_pages_have_fonts_of_the_user(tmp_path: Path) -> None:
    """Fonts are embedded when the pages are closed. All letters of the text must then be found in them."""
    with PdfPages(tmp_path / "pages.pdf") as pages:
        pages.savefig(DRAWN["maps"]())
    assert b"/Type3" in (tmp_path / "pages.pdf").read_bytes()
