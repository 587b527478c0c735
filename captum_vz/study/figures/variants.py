"""The stability of a ranking as a figure: the rank of each method in each variant of a metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from captum_vz.study.figures.summary import label_color, method_color, write_title
from captum_vz.visualization.pictures.description import Content, set_content
from captum_vz.visualization.pictures.parts.picture import Picture
from captum_vz.visualization.pictures.parts.style import FONT_SIZE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


def draw_variants(variants: DataFrame, titles: Mapping[str, str]) -> Figure:
    """Draws the rank of each method in each variant of blank-out, 1 for the highest mean: for each model a panel.

    The names stand at both ends of the lines, in the order of the first and of the last variant. Lines that cross show
    that the order of two methods depends on the variant.

    Args:
        variants: ``model``, ``method``, ``variant``, ``mean`` and ``examples``.
        titles: The names of the variants in the figure, in the order in which they are drawn.
    """
    models = variants["model"].unique().tolist()
    height = 1.5 + 0.19 * variants["method"].nunique()
    figure = Picture(figsize=(7, height * len(models)), dpi=150, layout="constrained")
    for panel, model in zip(figure.subplots(len(models), 1, squeeze=False)[:, 0], models, strict=True):
        _ranks(panel, variants[variants["model"] == model], str(model), titles)
    return figure


def _ranks(panel: Axes, rows: DataFrame, model: str, titles: Mapping[str, str]) -> None:
    means = rows.pivot(index="method", columns="variant", values="mean")
    shown = [name for name in titles if name in means]
    ranks = means[shown].rank(ascending=False, method="first")
    last = len(shown) - 1
    for method, line in ranks.iterrows():
        look: dict[str, Any] = {"color": label_color(str(method)), "fontsize": FONT_SIZE - 1, "va": "center"}
        panel.plot(range(len(shown)), line, color=method_color(str(method)), marker="o", markersize=3.5, linewidth=1.3)
        panel.text(-0.2, line.iloc[0], str(method), ha="right", **look)
        panel.text(last + 0.2, line.iloc[-1], str(method), ha="left", **look)
    panel.set_ylim(len(ranks) + 0.6, -0.6)
    panel.set_xlim(-0.4, last + 0.4)
    # Neighbours that are removed in the same way name it once.
    kinds = [titles[name].partition(", ")[0] for name in shown]
    ticks = [titles[name].partition(", ")[2].replace("vocabulary", "vocab.").replace(", ", "\n") for name in shown]
    panel.set_xticks(range(len(shown)), ticks, fontsize=FONT_SIZE - 1)
    for kind in dict.fromkeys(kinds):
        first, count = kinds.index(kind), kinds.count(kind)
        panel.text(first + (count - 1) / 2, 0.2, kind, ha="center", va="bottom", fontsize=FONT_SIZE, weight="bold")
        if first:
            panel.axvline(first - 0.5, color="0.8", linewidth=0.8)
    panel.set_yticks([])
    for side in ("left", "right", "top"):
        panel.spines[side].set_visible(False)
    sentences = int(rows["examples"].max())
    write_title(panel, f"{model}: rank by Spearman with blank-out, {sentences} sentences (top: highest mean)")
    columns = ("method", "variant", "mean", "low", "high", "examples", "undefined")
    firsts = ", ".join(f"{titles[name]}: {means[name].idxmax()}" for name in shown)
    sentence = f"{model}, the method with the highest mean in each variant of blank-out: {firsts}."
    set_content(panel, Content(sentence, columns, lambda: list(rows[list(columns)].itertuples(index=False, name=None))))
