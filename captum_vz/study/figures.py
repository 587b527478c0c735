"""A summary as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from captum_vz.study.judging import METRICS
from captum_vz.study.methods import METHODS
from captum_vz.visualization.maps import FONT_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


_QUOTED: Final = "the paper's Table 3, pre-trained models of the BERT family (second-hand)"


def draw_summary(summary: DataFrame, metric: str) -> Figure:
    """Draws one metric: for each model a row, on the left each method by layer, on the right what it comes to.

    A method has one colour on both sides, where its name is written on the right. Bars and bands are the intervals of
    the summary. What joins layers is dashed, what has no layers is a dotted line.

    Args:
        summary: As :attr:`Study.summary` has it; the group "all" is drawn.
        metric: One of its metrics.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: The summary has no such metric.
    """
    if metric not in set(summary["metric"]):
        raise ValueError(f"metric is {metric!r}: pass one of {', '.join(map(repr, summary['metric'].unique()))}.")
    drawn = summary[(summary["metric"] == metric) & (summary["group"] == "all")]
    models = drawn["model"].unique().tolist()
    methods = drawn["method"].unique().tolist()
    height = 0.9 + 0.2 * len(methods)
    figure = Figure(figsize=(9, max(2.6, height) * len(models)), dpi=150, layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False, sharey=False)
    for (left, right), model in zip(panels, models, strict=True):
        of_model = drawn[drawn["model"] == model]
        _by_layer(left, of_model)
        _at_the_end(right, of_model)
        left.set_ylabel(METRICS[metric].title, fontsize=FONT_SIZE)
        right.set_xlabel(METRICS[metric].title, fontsize=FONT_SIZE)
        _title(left, f"{model}, by layer")
        _title(right, f"{model}, last layer")
    return figure


def draw_faithfulness(summary: DataFrame, paper: Mapping[str, float]) -> Figure:
    """Draws how faithful each method is to blanking out: for each model bars with intervals, the highest on top.

    Args:
        summary: As :attr:`Study.summary` has it, with the metric "blank_out"; the group "all" is drawn, of methods with
            layers the last one.
        paper: What others have found, by the names of methods; marked beside the bars.
    """
    drawn = summary[(summary["metric"] == "blank_out") & (summary["group"] == "all")]
    models = drawn["model"].unique().tolist()
    height = 0.9 + 0.2 * drawn["method"].nunique()
    figure = Figure(figsize=(7, height * len(models) + 0.3), dpi=150, layout="constrained")
    panels = figure.subplots(len(models), 1, squeeze=False)[:, 0]
    for panel, model in zip(panels, models, strict=True):
        of_model = drawn[drawn["model"] == model]
        last = _last_layers(of_model)
        _bars(panel, last, "mean")
        quoted = [(paper[method], place) for place, method in enumerate(last["method"]) if method in paper]
        if quoted:
            look = {"marker": "D", "s": 22, "facecolor": "white", "edgecolor": "black", "zorder": 3}
            panel.scatter(*zip(*quoted, strict=True), label=_QUOTED, **look)
        panel.set_xlabel(METRICS["blank_out"].title, fontsize=FONT_SIZE)
        _title(panel, f"{model}, last layer")
    named = {label: mark for panel in panels for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if named:
        figure.legend(named.values(), named.keys(), loc="outside lower center", fontsize=FONT_SIZE - 1, frameon=False)
    return figure


def draw_probing(probing: DataFrame, correlation: DataFrame) -> Figure:
    """Draws how far each layer compresses the labels, and how that goes with each method's cue alignment.

    Args:
        probing: ``model``, ``layer``, ``compression``, ``low`` and ``high``.
        correlation: ``model``, ``method``, ``statistic``, ``low`` and ``high``.
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
        _name_layers(left)
        left.set_ylabel("compression (1: nothing to be read)", fontsize=FONT_SIZE)
        _title(left, f"{model}, probing")
        of_model = correlation[correlation["model"] == model].sort_values("statistic", na_position="first")
        _bars(right, of_model, "statistic")
        right.set_xlim(-1.05, 1.05)
        right.set_xlabel("Spearman of cue alignment and compression over layers", fontsize=FONT_SIZE)
        _title(right, f"{model}, with cue alignment")
    return figure


def _title(panel: Axes, title: str) -> None:
    panel.set_title(title, fontsize=FONT_SIZE + 2).set_parse_math(False)  # a model's name may hold dollar signs


def _name_layers(panel: Axes) -> None:
    panel.set_xlabel("layer", fontsize=FONT_SIZE)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.tick_params(labelsize=FONT_SIZE)


def _name_methods(panel: Axes, methods: Sequence[str]) -> None:
    panel.set_yticks(range(len(methods)), methods, fontsize=FONT_SIZE)
    panel.tick_params(labelsize=FONT_SIZE)
    panel.grid(axis="x", alpha=0.3)


def _last_layers(rows: DataFrame) -> DataFrame:
    """Each method's row of its last layer, or its only one, the highest last."""
    return rows.groupby("method", sort=False).tail(1).sort_values("mean", na_position="first")


def _bars(panel: Axes, rows: DataFrame, value: str) -> None:
    """A bar with its interval for each row."""
    for place, row in enumerate(rows.itertuples()):
        panel.barh(place, getattr(row, value), color=_color(row.method), height=0.7)
        panel.hlines(place, row.low, row.high, color="black", linewidth=1.2)
    _name_methods(panel, rows["method"])
    panel.set_axisbelow(True)
    panel.axvline(0, color="black", linewidth=0.8)


def _by_layer(panel: Axes, rows: DataFrame) -> None:
    for method, of_method in rows.groupby("method", sort=False):
        look: dict[str, Any] = {"color": _color(method), "linewidth": 1.4}
        if of_method["layer"].isna().any():
            panel.axhline(of_method["mean"].iloc[0], linestyle=":", **look)
            continue
        layers = of_method["layer"].astype(int)
        style = "--" if METHODS[method].joins else "-"
        panel.plot(layers, of_method["mean"], linestyle=style, marker=".", **look)
        panel.fill_between(layers, of_method["low"], of_method["high"], color=look["color"], alpha=0.15, linewidth=0)
    _name_layers(panel)


def _at_the_end(panel: Axes, rows: DataFrame) -> None:
    last = _last_layers(rows)
    for place, row in enumerate(last.itertuples()):
        known = row.low == row.low  # of a single example there is no interval
        whisker = [[row.mean - row.low], [row.high - row.mean]] if known else None
        panel.errorbar(row.mean, place, xerr=whisker, fmt="o", markersize=4, capsize=2, color=_color(row.method))
    _name_methods(panel, last["method"])
    for label, method in zip(panel.get_yticklabels(), last["method"], strict=True):
        label.set_color(_color(method))


# Ten hues dark, then light, without the greys, which belong to what knows nothing of the model.
_HUES: Final = [hue for hue in (*range(0, 20, 2), *range(1, 20, 2)) if hue not in (14, 15)]
_GREYS: Final = {"random": "0.6", "position": "0.4"}


def _color(method: str) -> Any:
    """Of each method its own, in every figure."""
    if method in _GREYS:
        return _GREYS[method]
    place = [name for name in METHODS if name not in _GREYS].index(method)
    return colormaps["tab20"](_HUES[place % len(_HUES)])
