"""Paired differences of methods as a figure: a matrix for each model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from captum_vz.study.figures.summary import metric_title, write_title
from captum_vz.visualization.pictures.description import Content, set_content
from captum_vz.visualization.pictures.parts.picture import Picture
from captum_vz.visualization.pictures.parts.style import FONT_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


def draw_differences(differences: DataFrame, metric: str) -> Figure:
    """Draws the mean difference of each pair of methods, row minus column, for each model.

    Methods are in the order of their means. A pair that does not differ is grey, with an equals sign.

    Args:
        differences: As :attr:`Study.differences` has it.
        metric: One of its metrics.

    Raises:
        ValueError: There is no such metric, or there are no pairs.
    """
    drawn = differences[differences["metric"] == metric]
    if drawn.empty:
        known = ", ".join(map(repr, differences["metric"].unique()))
        raise ValueError(f"metric is {metric!r}: pass one of {known}, of a study with two methods.")
    models = drawn["model"].unique().tolist()
    count = len(set(drawn["one"]) | set(drawn["other"]))
    side = max(3.2, 1.4 + 0.42 * count)
    figure = Picture(figsize=(side + 0.8, (side + 0.3) * len(models)), dpi=150, layout="constrained")
    for panel, model in zip(figure.subplots(len(models), 1, squeeze=False)[:, 0], models, strict=True):
        _matrix(panel, drawn[drawn["model"] == model], str(model), metric)
    return figure


def order_by_wins(differences: DataFrame) -> list[str]:
    """The methods of one model and metric, from the highest mean to the lowest."""
    names = list(dict.fromkeys([*differences["one"], *differences["other"]]))
    gain = dict.fromkeys(names, 0.0)
    for row in differences.itertuples():
        if row.mean == row.mean:
            gain[str(row.one)] += row.mean
            gain[str(row.other)] -= row.mean
    return sorted(names, key=lambda name: -gain[name])


def _matrix(panel: Axes, rows: DataFrame, model: str, metric: str) -> None:
    names = order_by_wins(rows)
    gaps = np.full((len(names), len(names)), np.nan)
    tied = np.zeros_like(gaps, dtype=bool)
    for row in rows.itertuples():
        one, other = names.index(str(row.one)), names.index(str(row.other))
        gaps[one, other], gaps[other, one] = row.mean, -row.mean
        tied[one, other] = tied[other, one] = row.tied
    shown = np.where(tied, np.nan, gaps)
    limit = float(np.nanmax(np.abs(shown))) if np.isfinite(shown).any() else 1.0
    panel.set_facecolor("0.9")
    image = panel.imshow(shown, cmap="PuOr", vmin=-limit, vmax=limit, aspect="equal")
    for (row, column), gap in np.ndenumerate(gaps):
        if row == column or gap != gap:
            continue
        dark = not tied[row, column] and abs(gap) > 0.6 * limit
        text = "=" if tied[row, column] else f"{gap:+.2f}"
        panel.text(column, row, text, ha="center", va="center", fontsize=FONT_SIZE - 2, color="w" if dark else "k")
    panel.set_xticks(range(len(names)), names, rotation=90, fontsize=FONT_SIZE)
    panel.set_yticks(range(len(names)), names, fontsize=FONT_SIZE)
    bar = panel.figure.colorbar(image, ax=panel, shrink=0.6)
    bar.ax.tick_params(labelsize=FONT_SIZE - 1)
    bar.set_label("mean difference, row minus column", fontsize=FONT_SIZE)
    few, most = int(rows["examples"].min()), int(rows["examples"].max())
    write_title(panel, f"{model}, {metric_title(metric)}\n{_range(few, most)} sentences; = : no difference (Holm)")
    ties = int(rows["tied"].sum())
    columns = ("one", "other", "mean", "low", "high", "p", "examples", "tied")
    sentence = f"{model}, {metric_title(metric)}: {ties} of {len(rows)} pairs of methods do not differ."
    set_content(panel, Content(sentence, columns, lambda: list(rows[list(columns)].itertuples(index=False, name=None))))


def _range(few: int, most: int) -> str:
    return f"{most}" if few == most else f"{few} to {most}"
