"""The figures of a study: metrics over layers, sanity checks, and differences of methods. `style` has their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from captum_vz.errors import needs_extra
from captum_vz.methods import METHODS
from captum_vz.study.figures.style import (
    FONT,
    LAST_LAYER,
    ROW,
    draw_points,
    in_order,
    is_single_layer,
    known_metric,
    label_color,
    label_ends,
    last_layers,
    length_of,
    mark_of,
    method_color,
    metric_title,
    new_figure,
    panel_title,
    set_table,
    share_limits,
    stacked,
    whole_figure,
    write_title,
)
from captum_vz.visualization.pictures.scales import ink_on

with needs_extra("captum_vz.study", "study"):
    import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

#: How numbers in cells look. They are inside their axes, so the layout need not measure them, which takes long.
IN_CELLS: Final[dict[str, Any]] = {"ha": "center", "va": "center", "fontsize": 6, "in_layout": False}


def draw_summary(summary: DataFrame, metric: str, data: str = "") -> Figure:
    """Draws one metric, each model in a column of print: the methods by layer, and below it in their last layer.

    Methods have the same colour, mark and place in all figures. Bars and bands are the intervals of the summary.
    Filled marks show a single layer. Hollow marks show methods that join all layers up to this one, whose lines are
    dashed, and methods without layers, whose lines are dotted.

    Args:
        summary: As :attr:`Study.summary` has it; the group "all" is drawn, of models with a value.
        metric: One of its metrics.
        data: The name of the data, for the titles.

    Returns:
        A matplotlib figure, 3.3 inches wide; of several models, twice as wide.

    Raises:
        ValueError: The summary has no such metric.
    """
    if metric not in set(summary["metric"]):
        raise ValueError(f"metric is {metric!r}: pass one of {', '.join(map(repr, summary['metric'].unique()))}.")
    drawn = summary[(summary["metric"] == metric) & (summary["group"] == "all")]
    measured = drawn.groupby("model")["examples"].transform("sum") > 0  # a model may lack what the metric needs
    drawn = drawn[measured] if measured.any() else drawn
    models = drawn["model"].unique().tolist()
    rows = ROW * drawn["method"].nunique()
    above_height, below_height = max(1.4, rows + 0.1), max(0.5, rows)
    panels = stacked([above_height + 0.75, below_height + 0.8], models=len(models))
    ends = []
    for above, below, model in zip(panels[::2], panels[1::2], models, strict=True):
        of_model = drawn[drawn["model"] == model]
        ends.append(draw_layers(above, of_model))
        above.set_ylabel(metric_title(metric), fontsize=FONT)
        note = _draw_last(below, last_layers(of_model), metric)
        below.set_xlabel(metric_title(metric), fontsize=FONT)
        count = f"{int(of_model['examples'].max()):,} sentences"
        write_title(above, panel_title(model, data, f"{metric_title(metric)} by layer", count))
        write_title(below, panel_title(model, data, f"{metric_title(metric)}, {LAST_LAYER} ({note})"))
        _describe(above, of_model, str(model), metric_title(metric))
    share_limits(panels[::2], "y")
    share_limits(panels[1::2], "x")
    for above, of_panel in zip(panels[::2], ends, strict=True):
        label_ends(above, of_panel, above_height)
    return whole_figure(panels)


def _draw_last(panel: Axes, rows: DataFrame, metric: str) -> str:
    """Draw the last layer, and say what the marks mean. Rows that are compared with another truth stand apart."""
    known = known_metric(metric)
    if known is None or not known.two_truths:
        draw_points(panel, rows)
        return "hollow: all layers"
    single = rows["method"].map(is_single_layer)
    draw_points(panel, pd.concat([rows[single], rows[~single]]))
    panel.axhline(single.sum() - 0.5, color="black", linewidth=0.6)
    return "line: the truth of this layer above, of all layers below"


def _describe(panel: Axes, rows: DataFrame, model: str, title: str) -> None:
    """Put the drawn means into words and a table."""
    best = last_layers(rows).dropna(subset=["mean"]).nlargest(3, "mean")
    most = ", ".join(f"{row.method} {row.mean:.2f}" for row in best.itertuples())
    sentence = (
        f"{model}, {title}, {len(rows['method'].unique())} methods. In the last layer (rollouts: all layers), the "
        f"largest are {most}."
    )
    set_table(panel, sentence, rows, ("model", "method", "layer", "mean", "low", "high"))


def name_layers(panel: Axes) -> None:
    """Label the horizontal axis with the numbers of layers."""
    panel.set_xlabel("layer", fontsize=FONT)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.tick_params(labelsize=FONT, length=2)


def draw_layers(panel: Axes, rows: DataFrame) -> dict[str, tuple[float, float]]:
    """A line for each method over the layers, with bands for the intervals.

    Args:
        panel: The axes.
        rows: The rows of one model and metric in a summary.

    Returns:
        The last layer and the mean in it of each method: where its line ends.
    """
    ends = {}
    lines = dict(list(rows.groupby("method", sort=False)))
    last = float(rows["layer"].max()) if rows["layer"].notna().any() else 1.0
    for method in in_order(lines):
        of_method = lines[method]
        ends[method] = (last, float(np.nan_to_num(of_method["mean"].iloc[-1])))
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
    return ends


def draw_sanity(checks: DataFrame, model: str, data: str = "", near: float = 0.2) -> Figure:
    """Draws the correlation of each method's scores with its scores for copies with random layers.

    Bands are the intervals over sentences. The names of the methods stand at the ends of their lines.

    Args:
        checks: As :func:`~captum_vz.study.sanity_checks` gives it.
        model: The name of the model, for the title.
        data: The name of the data, for the title.
        near: The correlation below which a method passes, with its whole interval.
    """
    lines = {str(method): rows for method, rows in checks.groupby("method", sort=False)}
    most = int(checks["random"].max())
    height = max(1.6, ROW * len(lines) + 0.2)
    figure = new_figure(height + 0.75)
    panel = figure.subplots()
    for method in in_order(lines):
        rows, color = lines[method], method_color(method)
        panel.plot([0, *rows["random"]], [1, *rows["mean"]], linewidth=1.0, **mark_of(method))
        panel.fill_between(rows["random"], rows["low"], rows["high"], color=color, alpha=0.15, linewidth=0)
    panel.axhspan(-near, near, color="0.93", zorder=0)
    panel.set_ylim(min(-0.3, float(checks["low"].min()) - 0.05), 1.08)
    ends = {method: (most, float(np.nan_to_num(lines[method]["mean"].iloc[-1]))) for method in in_order(lines)}
    label_ends(panel, ends, height)
    panel.tick_params(labelsize=FONT, length=2)
    panel.set_xticks(range(most + 1))
    panel.set_xlabel("random layers, from the last on", fontsize=FONT)
    panel.set_ylabel("Spearman with the trained model", fontsize=FONT)
    count = int(checks["examples"].max())
    about = panel_title(model, data, "sanity checks", f"{count} sentences")
    write_title(panel, f"{about}\npassed: the interval at the right is in the grey band (±{near:g})")
    last = checks[checks["random"] == most]
    told = ", ".join(f"{row.method} {row.mean:.2f}" for row in last.itertuples())
    sentence = f"{model}, correlation with the scores for a copy whose {most} layers are random: {told}."
    set_table(panel, sentence, checks, ("method", "random", "mean", "low", "high", "examples", "undefined"))
    return figure


def draw_differences(differences: DataFrame, metric: str, data: str = "") -> Figure:
    """Draws the mean difference of each pair of methods, row minus column, for each model.

    A pair whose difference is not shown is grey, with an equals sign.

    Args:
        differences: As :attr:`Study.differences` has it.
        metric: One of its metrics.
        data: The name of the data, for the titles.

    Raises:
        ValueError: There is no such metric, or there are no pairs.
    """
    drawn = differences[differences["metric"] == metric]
    if drawn.empty:
        known = ", ".join(map(repr, differences["metric"].unique()))
        raise ValueError(f"metric is {metric!r}: pass one of {known}, of a study with two methods.")
    models = drawn["model"].unique().tolist()
    count = len(set(drawn["one"]) | set(drawn["other"]))
    panels = stacked([0.65 + length_of(drawn["one"]) + 0.155 * count], models=len(models))
    for panel, model in zip(panels, models, strict=True):
        _matrix(panel, drawn[drawn["model"] == model], panel_title(str(model), data, metric_title(metric)))
    return whole_figure(panels)


def _matrix(panel: Axes, rows: DataFrame, title: str) -> None:
    names = in_order([*rows["one"], *rows["other"]])
    gaps, texts = np.full((len(names), len(names)), np.nan), np.full((len(names), len(names)), "", dtype=object)
    for row in rows.itertuples():
        one, other = names.index(str(row.one)), names.index(str(row.other))
        if row.tied:
            texts[one, other] = texts[other, one] = "="
        else:
            gaps[one, other], gaps[other, one] = row.mean, -row.mean
            texts[one, other], texts[other, one] = _hundredths(row.mean), _hundredths(-row.mean)
    limit = float(np.nanmax(np.abs(gaps))) if np.isfinite(gaps).any() else 1.0
    draw_grid(panel, gaps, texts, names, names, "PuOr", (-limit, limit))
    few, most = int(rows["examples"].min()), int(rows["examples"].max())
    counts = f"{most:,}" if few == most else f"{few:,} to {most:,}"
    write_title(
        panel, f"{title}, {counts} sentences\nrow minus column, in hundredths; =: no difference is shown (Holm)"
    )
    columns = ("one", "other", "mean", "low", "high", "p", "examples", "tied")
    shown = int((~rows["tied"]).sum())
    set_table(panel, f"{title}: {shown} of {len(rows)} pairs of methods are shown to differ.", rows, columns)


def _hundredths(gap: float) -> str:
    """A difference as a cell shows it: "12", or ".4" if it is below a hundredth.

    >>> _hundredths(0.123), _hundredths(-0.004), _hundredths(-1.2)
    ('12', '-.4', '-120')
    """
    return f"{100 * gap:.0f}" if abs(gap) >= 0.01 else f"{100 * gap:.1f}".replace("0.", ".")


def draw_grid(
    panel: Axes,
    values: np.ndarray,
    texts: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    colors: Any,
    limits: tuple[float, float],
) -> None:
    """A matrix with a text in each cell. Names of methods have the methods' colours.

    Args:
        panel: The axes.
        values: What the colours show, `(rows, columns)`. NaN is grey.
        texts: For each row the texts of its cells.
        rows: The names of the rows.
        columns: The names of the columns.
        colors: A colour map of matplotlib, or its name.
        limits: The values of the first and the last colour.
    """
    panel.set_facecolor("0.9")
    drawn = panel.imshow(values, cmap=colors, vmin=limits[0], vmax=limits[1], aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        ink = ink_on(drawn.to_rgba(value)) if value == value else "k"
        panel.text(column, row, texts[row][column], color=ink, **IN_CELLS)
    panel.set_xticks(range(len(columns)), columns, rotation=90)
    panel.set_yticks(range(len(rows)), rows)
    panel.tick_params(labelsize=FONT, length=0)
    for labels, names in ((panel.get_yticklabels(), rows), (panel.get_xticklabels(), columns)):
        for label, name in zip(labels, names, strict=True):
            if name in rows:
                label.set_color(label_color(name))
