"""Tables of numbers as figures: the differences of methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.figure import Figure

from captum_vz.study.figures.style import (
    FONT,
    in_order,
    label_color,
    length_of,
    metric_title,
    panel_title,
    set_table,
    stacked,
    whole_figure,
    write_title,
)
from captum_vz.visualization.pictures.scales import ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

#: How numbers in cells look. They are inside their axes, so the layout need not measure them, which takes long.
IN_CELLS: Final[dict[str, Any]] = {"ha": "center", "va": "center", "fontsize": 6, "in_layout": False}


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
