"""Figures of the paper's evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from captum_vz.study.figures import LAST_LAYER, last_layers, method_color, name_layers, name_methods, write_title
from captum_vz.study.scoring.metrics import METRICS
from captum_vz.visualization.pictures.parts.style import FONT_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

_QUOTED: Final = "the paper's Table 3, BERT family (second-hand; that the methods are the same is assumed)"


def draw_faithfulness(summary: DataFrame, paper: Mapping[str, float]) -> Figure:
    """Draws the faithfulness of each method to blanking out: for each model bars with intervals, sorted by mean.

    Args:
        summary: As :attr:`Study.summary` has it, with the metric "blank_out". The group "all" is drawn, in the last
            layer of methods with layers.
        paper: Published values by the names of methods, drawn as diamonds.
    """
    drawn = summary[(summary["metric"] == "blank_out") & (summary["group"] == "all")]
    models = drawn["model"].unique().tolist()
    height = 0.9 + 0.2 * drawn["method"].nunique()
    figure = Figure(figsize=(7, height * len(models) + 0.3), dpi=150, layout="constrained")
    panels = figure.subplots(len(models), 1, squeeze=False)[:, 0]
    for panel, model in zip(panels, models, strict=True):
        of_model = drawn[drawn["model"] == model]
        last = last_layers(of_model)
        _bars(panel, last, "mean")
        quoted = [(paper[method], place) for place, method in enumerate(last["method"]) if method in paper]
        if quoted:
            look = {"marker": "D", "s": 22, "facecolor": "white", "edgecolor": "black", "zorder": 3}
            panel.scatter(*zip(*quoted, strict=True), label=_QUOTED, **look)
        panel.set_xlabel(METRICS["blank_out"].title, fontsize=FONT_SIZE)
        write_title(panel, f"{model}, {LAST_LAYER}")
    named = {label: mark for panel in panels for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if named:
        figure.legend(named.values(), named.keys(), loc="outside lower center", fontsize=FONT_SIZE - 1, frameon=False)
    return figure


def draw_probing(probing: DataFrame, correlation: DataFrame) -> Figure:
    """Draws the compression of the labels in each layer, and its correlation with each method's cue alignment.

    Args:
        probing: ``model``, ``layer``, ``compression``, ``low`` and ``high``.
        correlation: ``model``, ``method``, ``statistic``, ``low``, ``high`` and ``layers``.
    """
    models = probing["model"].unique().tolist()
    height = 0.9 + 0.2 * correlation["method"].nunique()
    figure = Figure(figsize=(9, max(2.6, height) * len(models)), dpi=150, layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    for (left, right), model in zip(panels, models, strict=True):
        rows = probing[probing["model"] == model]
        left.plot(rows["layer"], rows["compression"], color="black", linewidth=1.4, marker=".")
        left.fill_between(rows["layer"], rows["low"], rows["high"], color="black", alpha=0.15, linewidth=0)
        left.axhline(1, color="0.6", linestyle=":")
        name_layers(left)
        left.set_ylabel("compression (1: no information)", fontsize=FONT_SIZE)
        write_title(left, f"{model}, probing")
        of_model = correlation[correlation["model"] == model].sort_values("statistic", na_position="first")
        _bars(right, of_model, "statistic")
        right.set_xlim(-1.05, 1.05)
        layers = rows["layer"].nunique()
        right.set_xlabel(f"Spearman of cue alignment and compression over {layers} layers", fontsize=FONT_SIZE)
        write_title(right, f"{model}, with cue alignment")
    return figure


def _bars(panel: Axes, rows: DataFrame, value: str) -> None:
    """A bar with its interval for each row."""
    for place, row in enumerate(rows.itertuples()):
        panel.barh(place, getattr(row, value), color=method_color(row.method), height=0.7)
        panel.hlines(place, row.low, row.high, color="black", linewidth=1.2)
    name_methods(panel, rows["method"])
    panel.set_axisbelow(True)
    panel.axvline(0, color="black", linewidth=0.8)
