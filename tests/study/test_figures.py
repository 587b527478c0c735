"""How figures of studies look: colours, marks and places of methods, and letters that can be read in one column."""

from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from captum_vz.study import METHODS, sign_figure
from captum_vz.study.figures import (
    COLUMN,
    draw_differences,
    draw_summary,
    in_order,
    label_color,
    method_color,
    method_mark,
)
from captum_vz.study.scoring.metrics import _joins
from paper.figures import draw_page, draw_probing
from tests.study.conftest import parts_of


def linear(color: Any) -> Any:
    """The linear red, green and blue of a colour in sRGB."""
    return np.array([x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in to_rgb(color)])


def contrast_with_white(color: Any) -> float:
    """WCAG 2's contrast, by tables of the standard's own terms."""
    return float(1.05 / (np.dot([0.2126, 0.7152, 0.0722], linear(color)) + 0.05))


def test_methods_keep_their_look_and_place() -> None:
    """The hues are those of Okabe & Ito, which readers without red or green vision tell apart too."""
    names = [*METHODS, *(f"{name}:deciding" for name, one in METHODS.items() if one.shows_layers)]
    looks = {(method_color(name), method_mark(name)) for name in METHODS}
    assert len(looks) == len(METHODS)
    assert len({(method_color(name), method_mark(name)) for name in names[len(METHODS) :]} & looks) == 0
    assert len({color for color, _ in looks} | {method_color("one of my own")}) == 7
    assert [name for name in in_order(names) if name.startswith("attention")][:2] == ["attention", "attention:deciding"]
    # Names keep the hue of their method, and have the contrast that small text needs.
    assert contrast_with_white("0.0") == pytest.approx(21)
    assert min(contrast_with_white(method_color(method)) for method in METHODS) < 3
    for method in METHODS:
        mark, name = to_rgb(method_color(method)), label_color(method)
        assert contrast_with_white(name) >= 4.5
        assert np.dot(mark, name) / np.linalg.norm(mark) / np.linalg.norm(name) == pytest.approx(1)
    assert sorted(in_order(METHODS)) == sorted(METHODS)
    assert in_order(METHODS)[-2:] == ["random", "position"]
    assert in_order(["random", "mine", "alti", "attention"]) == ["attention", "alti", "mine", "random"]
    pairs = pd.DataFrame(combinations(["random", "alti", "attention"], 2), columns=["one", "other"])
    pairs = pairs.assign(model="m", metric="cue_dot", mean=0.5, low=0.4, high=0.6, p=0.0, examples=3, tied=False)
    (panel,) = draw_differences(pairs, "cue_dot").axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["attention", "alti", "random"]


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    """Tables of all methods and two models of 24 layers."""
    draw = np.random.default_rng(0)
    models = ["six-layers", "a model with a long name, as $folders$ have it"]
    numbers: dict[str, Any] = {"examples": 2279, "undefined": 0}

    def rows(keys: dict[str, list[Any]]) -> pd.DataFrame:
        index = pd.MultiIndex.from_product(keys.values(), names=keys.keys())
        mean = draw.uniform(-1, 1, len(index))
        its = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}
        return pd.DataFrame(index=index).reset_index().assign(**its, **numbers)

    all_layers = {"model": models, "method": list(METHODS), "layer": list(range(24))}
    metrics = ["cue_ap", "cue_dot", "blank_out", "value_patching"]
    summary = rows(all_layers | {"metric": metrics, "group": ["all"]}).astype({"layer": "Int64"})
    unlayered = summary["method"].isin([name for name, one in METHODS.items() if not one.layered])
    summary = summary[~unlayered | (summary["layer"] == 23)]
    summary.loc[unlayered, "layer"] = pd.NA
    pairs = pd.DataFrame(combinations(METHODS, 2), columns=["one", "other"])
    layers = pd.DataFrame({"layer": range(24), "compression": 2.0, "lowest": 1.5, "highest": 2.5, "control": 1.0})
    return {
        "summary": summary,
        "differences": pairs.assign(
            model=models[1], metric="cue_ap", mean=-0.123, low=-0.2, high=-0.1, p=0.0, tied=False, **numbers
        ),
        "sanity": rows({"model": models, "method": list(METHODS), "metric": ["sanity_last", "sanity"]}),
        "probing": layers.assign(model=models[1], accuracy=0.95, examples=2279, seeds=5),
        "correlation": rows({"model": [models[1]], "method": list(METHODS)}).rename(columns={"mean": "statistic"}),
    }


@pytest.fixture(scope="module")
def figures(tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    summary, data = tables["summary"], "BLiMP, held out"
    page = tables | {"truth": summary}
    return {
        "summary": draw_summary(summary, "cue_ap"),
        "truth": draw_summary(summary, "value_patching"),
        "differences": draw_differences(tables["differences"], "cue_ap"),
        "probing": draw_probing(tables["probing"], tables["correlation"], data),
        "page": draw_page(page, 0.2, data),
    }


def test_figures_can_be_read_in_one_column(figures: dict[str, Figure]) -> None:
    """Texts are inside, letters are not small, and each model has a column, or the figure is as wide as a page.

    Titles name the model and the number of sentences, and those of the paper the data.
    """
    maker = {"weights": "1" * 16, "dtype": "float32", "device": "cpu", "model": "BertForMaskedLM", "source": ""}
    maker |= dict.fromkeys(("captum_vz", "python", "torch", "transformers", "captum", "numpy"), "1.0")
    settings = {
        "examples": {"count": 2279, "blocks": []},
        "methods": {},
        "metrics": {},
        "provenance": {
            "models": {name: [maker] for name in ("six-layers", "a model with a long name")},
            **{"data": {}, "seeds": {}, "confidence": 0.9, "resamples": 99, "commands": []},
        },
    }
    for name, figure in figures.items():
        sign_figure(figure, settings)
        figure.draw_without_rendering()  # type: ignore[no-untyped-call]
        models = max(1, len(figure.subfigs)) if name != "page" else 2
        assert figure.get_figwidth() <= 2.1 * COLUMN * min(models, 2) / 2, name
        # What a page of A4 holds. The page of all evaluations has more rows than it is made for.
        assert name == "page" or figure.get_figheight() <= 9.7, name
        shown = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text().strip()]
        assert min(text.get_fontsize() for text in shown) >= 6, name
        titles = [text.get_window_extent() for part in parts_of(figure) for text in part.texts]
        for box in (*titles, *filter(None, (panel.get_tightbbox() for panel in figure.axes))):
            assert box.x0 > -1, (name, box)
            assert box.y0 > -1, (name, box)
            assert box.x1 < figure.bbox.x1 + 1, (name, box)
            assert box.y1 < figure.bbox.y1 + 1, (name, box)
        said = " ".join(text.get_text().replace("\n", " ") for text in shown)
        for words in ("2,279 sentences", "90 % intervals"):
            assert words in said, (name, words)
        assert ("BLiMP, held out" in said) == (name in ("probing", "page"))


def test_models_have_one_scale(tables: dict[str, pd.DataFrame]) -> None:
    near = tables["summary"].assign(mean=lambda rows: rows["mean"] * (0.5 + 0.5 * (rows["model"] == "six-layers")))
    near = near.assign(low=near["mean"], high=near["mean"])
    layers, points, others, other_points = draw_summary(near, "cue_ap").axes
    assert layers.get_ylim() == others.get_ylim()
    assert points.get_xlim() == other_points.get_xlim()
    assert points.get_xlim()[1] >= near.query("metric == 'cue_ap' and layer.isna()")["mean"].max()


def test_methods_with_another_truth_stand_apart(tables: dict[str, pd.DataFrame]) -> None:
    """Those whose rows are compared with the truth of all layers, as the metric itself decides it."""
    panel = draw_summary(tables["summary"], "value_patching").axes[1]
    (line,) = (one for one in panel.lines if len(one.get_xdata()) == 2)
    names = [label.get_text() for label in panel.get_yticklabels()]
    above = [name for place, name in enumerate(names) if place < line.get_ydata()[0]]
    assert above == in_order(name for name, one in METHODS.items() if one.layered and not _joins(name))
    assert "truth" not in " ".join(text.get_text() for text in draw_summary(tables["summary"], "cue_ap").findobj(Text))
