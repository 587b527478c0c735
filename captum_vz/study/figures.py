"""The figures of a study: metrics over layers, and differences of methods, in columns of print.

Methods have one look in all figures: a colour for a family, and a mark and a place for each method.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from zlib import crc32

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.methods import DECIDING, METHODS
from captum_vz.study.scoring import Metric
from captum_vz.study.scoring.metrics import metric_named
from captum_vz.visualization.pictures.files import Content, Picture, set_content
from captum_vz.visualization.pictures.scales import ink_on, luminance

with needs_extra("captum_vz.study", "study"):
    import pandas as pd
    from pandas import DataFrame

#: The width of one column in print, in inches, the size of the letters in it, in points, and dots per inch.
COLUMN: Final = 3.3
FONT: Final = 6.5
DPI: Final = 200
ROW: Final = 0.12  #: the height of a row with a method's name, in inches
LINES: Final = 1.4  #: the height of a panel of lines, in inches

# The palette of Okabe & Ito (2008), whose hues differ for readers without red or green vision too. Yellow is too light
# for lines on white. Methods of a family differ by their marks.
_PALETTE: Final = {
    "#0072b2": "value-zeroing value-zeroing-rollout value-zeroing-effect value-zeroing-effect-layer "
    "value-zeroing-shapley value-zeroing-integrated value-zeroing-rollout-paper",
    "#e69f00": "attention attention-rollout attention-flow attention-gradient attention-rollout-paper",
    "#009e73": "attention-norm attention-norm-rollout globenc globenc-layer",
    "#cc79a7": "alti alti-layer alti-logit",
    "#d55e00": "saliency input-x-gradient integrated-gradients hidden-token-attribution input-x-gradient-l2 "
    "integrated-gradients-l2 attn-lrp decision",
    "0.35": "random position",
}
_OWN: Final = "#56b4e9"  # methods of the user's own
_MARKS: Final = ("o", "s", "^", "D", "v", "P", "<", ">")
_CONTROLS: Final = {"random": "x", "position": "+"}  # both are seen where their lines are one
#: The colour and the mark of each method.
_LOOKS: Final[Mapping[str, tuple[str, str]]] = {
    name: (color, _CONTROLS.get(name, mark))
    for color, names in _PALETTE.items()
    for name, mark in zip(names.split(), _MARKS, strict=False)
}
_CONTRAST: Final = 4.5  # the least contrast of small text with its ground, by WCAG 2


def counted(number: int, thing: str) -> str:
    """A number of things, such as "1 sentence" or "2,279 sentences"."""
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def draw_summary(summary: DataFrame, metric: str) -> Figure:
    """Draws one metric, each model in a column of print: the methods by layer, and below it in their last layer.

    Methods have the same colour, mark and place in all figures. The names below are the legend of the lines. Bars and
    bands are the intervals of the summary. Filled marks show a single layer, stars for each sentence the layer that
    decides. Hollow marks show methods that join all layers up to this one, whose lines are dashed, and methods without
    layers, whose lines are dotted.

    The group "all" of a `summary` such as :attr:`Study.summary` is drawn, for models with a value. The figure is 3.3
    inches wide, and twice as wide for several models.
    """
    if metric not in set(summary["metric"]):
        raise ValueError(f"metric is {metric!r}: pass one of {', '.join(map(repr, summary['metric'].unique()))}.")
    drawn = summary[(summary["metric"] == metric) & (summary["group"] == "all")]
    measured = drawn.groupby("model")["examples"].transform("sum") > 0  # a model may lack what the metric needs
    drawn = drawn[measured] if measured.any() else drawn
    models = drawn["model"].unique().tolist()
    figure, panels = stacked([LINES + 0.75, max(0.5, ROW * drawn["method"].nunique()) + 0.8], len(models))
    for above, below, model in zip(panels[::2], panels[1::2], models, strict=True):
        of_model = drawn[drawn["model"] == model]
        title, last = metric_title(metric), of_model.groupby("method", sort=False).tail(1)
        last = last.set_index("method", drop=False).loc[in_order(last["method"])].reset_index(drop=True)
        draw_layers(above, of_model)
        above.set_ylabel(title, fontsize=FONT)
        note, single = "hollow: all layers", last["method"].map(is_single_layer) & last["layer"].notna()
        note += "; star: the one that decides" if last["method"].map(_base).ne(last["method"]).any() else ""
        if _metric(metric).two_truths:  # rows that are compared with another truth stand apart
            note = "line: the truth of this layer above, of all layers below"
            last = pd.concat([last[single], last[~single]])
            below.axhline(single.sum() - 0.5, color="black", linewidth=0.6)
        draw_points(below, last)
        below.set_xlabel(title, fontsize=FONT)
        count = counted(int(of_model["examples"].max()), "sentence")
        write_title(above, f"{model}, {title} by layer, {count}")
        write_title(below, f"{model}, {title}, last layer ({note})")
        best = last.dropna(subset=["mean"]).nlargest(3, "mean")
        most = ", ".join(f"{row.method} {row.mean:.2f}" for row in best.itertuples())
        sentence = (
            f"{model}, {title}, {len(last)} methods. In the last layer (rollouts: all layers), the largest are {most}."
        )
        set_table(above, sentence, of_model, ("model", "method", "layer", "mean", "low", "high"))
    share_limits(panels[::2], "y")
    share_limits(panels[1::2], "x")
    return figure


def name_layers(panel: Axes) -> None:
    """Label the horizontal axis with the numbers of layers."""
    panel.set_xlabel("layer", fontsize=FONT)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.tick_params(labelsize=FONT, length=2)


def draw_layers(panel: Axes, rows: DataFrame) -> None:
    """A line for each method over the layers, with bands for the intervals."""
    lines = dict(list(rows.groupby("method", sort=False)))
    last = float(rows["layer"].max()) if rows["layer"].notna().any() else 1.0
    for method in in_order(lines):
        of_method = lines[method]
        look = mark_of(method) | {"linewidth": 1.0}
        if of_method["layer"].isna().any():
            panel.plot([0, last], [of_method["mean"].iloc[0]] * 2, linestyle=":", **look | {"markevery": [-1]})
            continue
        layers = of_method["layer"].astype(int)
        known = METHODS.get(method)
        style = "--" if known is not None and known.joins else "-"
        panel.plot(layers, of_method["mean"], linestyle=style, **look)
        panel.fill_between(
            layers, of_method["low"], of_method["high"], color=method_color(method), alpha=0.15, linewidth=0
        )
    name_layers(panel)


def draw_differences(differences: DataFrame, metric: str) -> Figure:
    """Draws the mean difference of each pair of methods, row minus column, for each model.

    A pair whose difference is not shown is grey, with an equals sign.
    """
    drawn = differences[differences["metric"] == metric]
    if drawn.empty:
        known = ", ".join(map(repr, differences["metric"].unique()))
        raise ValueError(f"metric is {metric!r}: pass one of {known}, of a study with two methods.")
    models = drawn["model"].unique().tolist()
    count = len(set(drawn["one"]) | set(drawn["other"]))
    longest = max(len(line) for name in drawn["one"] for line in name.split("\n"))
    figure, panels = stacked([0.65 + longest * 0.57 * FONT / 72 + 0.155 * count], len(models))
    for panel, model in zip(panels, models, strict=True):
        rows, title = drawn[drawn["model"] == model], f"{model}, {metric_title(metric)}"
        names = in_order([*rows["one"], *rows["other"]])
        gaps, texts = np.full((len(names), len(names)), np.nan), dict[tuple[int, ...], str]()
        for row in rows.itertuples():
            one, other = names.index(str(row.one)), names.index(str(row.other))
            for at, gap in (((one, other), row.mean), ((other, one), -row.mean)):
                gaps[at], texts[at] = (np.nan, "=") if row.tied else (gap, _hundredths(gap))
        limit = float(np.nanmax(np.abs(gaps))) if np.isfinite(gaps).any() else 1.0
        panel.set_facecolor("0.9")
        image = panel.imshow(gaps, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto")
        for place, gap in np.ndenumerate(gaps):
            # Texts are inside their axes, so the layout need not measure them, which takes long.
            look: Any = {"ha": "center", "va": "center", "fontsize": 6, "in_layout": False}
            ink = ink_on(image.to_rgba(gap)) if gap == gap else "k"
            panel.text(place[1], place[0], texts.get(place, ""), color=ink, **look)
        panel.set_xticks(range(len(names)), names, rotation=90)
        panel.set_yticks(range(len(names)), names)
        panel.tick_params(labelsize=FONT, length=0)
        for label, name in zip([*panel.get_yticklabels(), *panel.get_xticklabels()], names * 2, strict=True):
            label.set_color(label_color(name))
        few, most = int(rows["examples"].min()), int(rows["examples"].max())
        sentences = counted(most, "sentence") if few == most else f"{few:,} to {most:,} sentences"
        told = "row minus column, in hundredths; =: no difference is shown (Holm)"
        write_title(panel, f"{title}, {sentences}\n{told}")
        columns = ("one", "other", "mean", "low", "high", "p", "examples", "tied")
        shown = int((~rows["tied"]).sum())
        set_table(panel, f"{title}: {shown} of {len(rows)} pairs of methods are shown to differ.", rows, columns)
    return figure


def _hundredths(gap: float) -> str:
    """A difference as a cell shows it: "12", or ".4" if it is below a hundredth."""
    return f"{100 * gap:.0f}" if abs(gap) >= 0.01 else f"{100 * gap:.1f}".replace("0.", ".")


def stacked(heights: Sequence[float], models: int) -> tuple[Figure, list[Axes]]:
    """A new figure with axes below each other for each model, model after model. Two models are side by side.

    Heights are those of the axes of one model with their names and titles, in inches. Axes have subfigures of their
    own, so that no names narrow another's axes.
    """
    across, down = min(models, 2), -(-models // 2)
    figure: Any = Picture(figsize=(across * COLUMN, down * sum(heights)), dpi=DPI, layout="constrained")
    found = []
    for cell in figure.subfigures(down, across, squeeze=False).flat[:models]:
        parts = cell.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)
        found += [part.subplots() for part in parts[:, 0]]
    return figure, found


def _base(method: str) -> str:
    """The method without ":deciding" in its name."""
    return method.removesuffix(f":{DECIDING}")


def method_color(method: str) -> str:
    """The colour of a method's family."""
    return _LOOKS.get(_base(method), (_OWN, ""))[0]


def method_mark(method: str) -> str:
    """The mark of a method, which is unique in its family. A star: the layer that decides."""
    # The mark of a method of the user's own depends on its name only, so that it is the same in every process.
    own = _MARKS[crc32(method.encode()) % len(_MARKS)]
    return "*" if _base(method) != method else _LOOKS.get(method, ("", own))[1]


def label_color(method: str) -> tuple[float, float, float]:
    """The colour of a method for text on white: the same hue, as dark as small letters need."""
    red, green, blue = to_rgb(method_color(method))
    while 1.05 / (luminance((red, green, blue)) + 0.05) < _CONTRAST:
        red, green, blue = 0.95 * red, 0.95 * green, 0.95 * blue
    return red, green, blue


def mark_of(method: str) -> dict[str, Any]:
    """How matplotlib draws a method's mark: filled for a single layer, else hollow."""
    color = method_color(method)
    ink = {"color": color, "markeredgecolor": color, "markerfacecolor": color if is_single_layer(method) else "white"}
    return {"marker": method_mark(method), "markersize": 3.6, "markeredgewidth": 0.9} | ink


def is_single_layer(method: str) -> bool:
    """Whether a registered method shows each layer by itself: it has layers, and does not join them."""
    known = METHODS.get(_base(method))
    return known is not None and known.layered and not known.joins


def in_order(methods: Iterable[str]) -> list[str]:
    """Methods in their order in all figures: families together, then the user's own methods, controls last."""
    first = [f"{name}{word}" for name in _LOOKS if name not in _CONTROLS for word in ("", f":{DECIDING}")]
    given = list(dict.fromkeys(methods))
    own = [name for name in given if name not in (*first, *_CONTROLS)]
    return [name for name in [*first, *own, *_CONTROLS] if name in given]


def _metric(name: str) -> Metric:
    try:
        return metric_named(name)
    except ArgumentError:  # only its caller knows it
        return Metric(name, len)


def metric_title(metric: str) -> str:
    """The name of a metric in a figure."""
    return _metric(metric).title


def write_title(panel: Axes, title: str) -> None:
    """Write a title as plain text across the figure or subfigure of a panel, in lines of the width of a column."""
    letters = int((COLUMN - 0.15) * 72 / (0.57 * FONT))
    lines = [line for part in title.split("\n") for line in textwrap.wrap(part, letters)]
    figure: Any = panel.figure
    figure.suptitle("\n".join(lines), fontsize=FONT).set_parse_math(False)  # a model's name may hold dollar signs


def set_table(panel: Axes, sentence: str, rows: DataFrame, columns: Sequence[str]) -> None:
    """Describe a panel for readers who cannot see it: a sentence, and the table of its numbers."""
    names = list(columns)
    set_content(panel, Content(sentence, tuple(names), lambda: list(rows[names].itertuples(index=False, name=None))))


def draw_points(panel: Axes, rows: DataFrame, value: str = "mean") -> None:
    """A point with its interval in each row, and the methods' names, the first at the top, in their colours."""
    for place, row in enumerate(rows.itertuples()):
        method = str(row.method)
        if row.low == row.low:  # a single example has no interval
            panel.hlines(place, row.low, row.high, color=method_color(method), linewidth=1.1)
        panel.plot(getattr(row, value), place, linestyle="", **mark_of(method))
    panel.set_yticks(range(len(rows)), rows["method"])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.tick_params(labelsize=FONT, length=2)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", alpha=0.3, linewidth=0.5)
    panel.set_axisbelow(True)
    for label, method in zip(panel.get_yticklabels(), rows["method"], strict=True):
        label.set_color(label_color(method))


def share_limits(panels: Sequence[Axes], axis: str) -> None:
    """Give panels one scale on their axis "x" or "y", so that they can be compared by eye."""
    limits = [getattr(panel, f"get_{axis}lim")() for panel in panels]
    for panel in panels:
        getattr(panel, f"set_{axis}lim")(min(low for low, _ in limits), max(high for _, high in limits))
