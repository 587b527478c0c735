"""A summary as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from captum_vz.study.methods import METHODS
from captum_vz.study.scoring.metrics import METRICS
from captum_vz.visualization.pictures.description import Content, set_content
from captum_vz.visualization.pictures.parts.picture import Picture
from captum_vz.visualization.pictures.parts.style import FONT_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

#: What the right-hand panels show.
LAST_LAYER: Final = "last layer (rollouts: all layers)"


def draw_summary(summary: DataFrame, metric: str) -> Figure:
    """Draws one metric: for each model a row, on the left each method by layer, on the right its last layer.

    A method has the same colour on both sides. Bars and bands are the intervals of the summary. Methods that join
    layers are dashed lines, methods without layers are dotted lines.

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
    figure = Picture(figsize=(9, max(2.6, height) * len(models)), dpi=150, layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False, sharey=False)
    for (left, right), model in zip(panels, models, strict=True):
        of_model = drawn[drawn["model"] == model]
        _by_layer(left, of_model)
        _at_the_end(right, of_model)
        left.set_ylabel(metric_title(metric), fontsize=FONT_SIZE)
        right.set_xlabel(metric_title(metric), fontsize=FONT_SIZE)
        write_title(left, f"{model}, by layer, {int(of_model['examples'].max())} sentences")
        write_title(right, f"{model}, {LAST_LAYER}")
        set_content(left, _content(of_model, str(model), metric_title(metric)))
    return figure


def _content(rows: DataFrame, model: str, title: str) -> Content:
    """The drawn means in words and as a table."""
    best = last_layers(rows).dropna(subset=["mean"]).iloc[::-1].head(3)
    most = ", ".join(f"{row.method} {row.mean:.2f}" for row in best.itertuples())
    sentence = f"{model}, {title}, {len(rows['method'].unique())} methods. In the {LAST_LAYER}, the largest are {most}."
    columns = ("model", "method", "layer", "mean", "low", "high")
    return Content(sentence, columns, lambda: list(rows[list(columns)].itertuples(index=False, name=None)))


def metric_title(metric: str) -> str:
    """The name of a metric in a figure."""
    return METRICS[metric].title if metric in METRICS else metric


def write_title(panel: Axes, title: str) -> None:
    """Write a title as plain text."""
    panel.set_title(title, fontsize=FONT_SIZE + 2).set_parse_math(False)  # a model's name may hold dollar signs


def name_layers(panel: Axes) -> None:
    """Label the horizontal axis with the numbers of layers."""
    panel.set_xlabel("layer", fontsize=FONT_SIZE)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.tick_params(labelsize=FONT_SIZE)


def name_methods(panel: Axes, methods: Sequence[str]) -> None:
    """Label the vertical axis with the names of methods."""
    panel.set_yticks(range(len(methods)), methods, fontsize=FONT_SIZE)
    panel.tick_params(labelsize=FONT_SIZE)
    panel.grid(axis="x", alpha=0.3)


def last_layers(rows: DataFrame) -> DataFrame:
    """For each method the row of its last layer, or its only row, sorted by mean."""
    return rows.groupby("method", sort=False).tail(1).sort_values("mean", na_position="first")


def _by_layer(panel: Axes, rows: DataFrame) -> None:
    for method, of_method in rows.groupby("method", sort=False):
        look: dict[str, Any] = {"color": method_color(method), "linewidth": 1.4}
        if of_method["layer"].isna().any():
            panel.axhline(of_method["mean"].iloc[0], linestyle=":", **look)
            continue
        layers = of_method["layer"].astype(int)
        known = METHODS.get(str(method))
        style = "--" if known is not None and known.joined else "-"
        panel.plot(layers, of_method["mean"], linestyle=style, marker=".", **look)
        panel.fill_between(layers, of_method["low"], of_method["high"], color=look["color"], alpha=0.15, linewidth=0)
    name_layers(panel)


def _at_the_end(panel: Axes, rows: DataFrame) -> None:
    last = last_layers(rows)
    for place, row in enumerate(last.itertuples()):
        known = row.low == row.low  # a single example has no interval
        whisker = [[max(0.0, row.mean - row.low)], [max(0.0, row.high - row.mean)]] if known else None
        panel.errorbar(row.mean, place, xerr=whisker, fmt="o", markersize=4, capsize=2, color=method_color(row.method))
    name_methods(panel, last["method"])
    for label, method in zip(panel.get_yticklabels(), last["method"], strict=True):
        label.set_color(label_color(method))


# Ten dark hues, then ten light ones, without the greys. Grey is for methods that do not look at the model.
_HUES: Final = [
    *(colormaps["tab20"](hue) for hue in (*range(0, 20, 2), *range(1, 20, 2)) if hue not in (14, 15)),
    *(colormaps["tab20b"](hue) for hue in (4, 8, 16)),  # a dark green, a brown, a dark purple
]
_GREYS: Final = {"random": "0.6", "position": "0.4"}
# The least contrast of small text with its ground, by WCAG 2.
_CONTRAST: Final = 4.5


def method_color(method: str) -> Any:
    """The colour of a method, the same in every figure."""
    if method in _GREYS:
        return _GREYS[method]
    known = [name for name, one in METHODS.items() if name not in _GREYS and not one.own]
    # The place of a method of the user's own depends on its name only, so that it is the same in every process.
    place = known.index(method) if method in known else crc32(method.encode())
    return _HUES[place % len(_HUES)]


def label_color(method: str) -> tuple[float, float, float]:
    """The colour of a method for text on white: the same hue, as dark as small letters need."""
    color = to_rgb(method_color(method))
    while 1.05 / (_luminance(color) + 0.05) < _CONTRAST:
        red, green, blue = color
        color = (0.95 * red, 0.95 * green, 0.95 * blue)
    return color


def _luminance(color: tuple[float, float, float]) -> float:
    """The relative luminance of a colour in sRGB, as WCAG 2 defines it."""
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
