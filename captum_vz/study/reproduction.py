"""What the paper's evaluations have found, as tables, a report and figures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from captum_vz.study.figures import draw_faithfulness, draw_probing, draw_summary
from captum_vz.study.files import write_whole
from captum_vz.study.results import ALL

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

#: Spearman's correlation with blank-out in the paper's Table 3 (pre-trained models), as third parties quote it.
TABLE_3: Final = {
    "attention-rollout": -0.10,
    "attention-norm-rollout": 0.19,
    "alti": 0.17,
    "value-zeroing-rollout": 0.26,
}


@dataclass(frozen=True)
class Reproduction:
    """What the three evaluations have found: its string is a report in Markdown.

    Attributes:
        summary: Cue alignment (``cue_dot``, ``cue_ap``) and faithfulness (``blank_out``), as
            :attr:`Study.summary <captum_vz.study.Study.summary>` has them, of all models.
        probing: For each ``model`` and ``layer`` the ``compression`` of the labels, its interval (``low``, ``high``),
            the ``bits`` of all labels and the number of ``examples``.
        correlation: For each ``model`` and ``method`` with layers the rank correlation of cue alignment with
            compression over layers, as :class:`~captum_vz.metrics.Correlation` has it.
        left_out: What could not be done: ``model``, ``what``, ``reason``.
        skipped: Which examples could not be used, and why, see :attr:`Study.skipped <captum_vz.study.Study.skipped>`.
    """

    summary: DataFrame
    probing: DataFrame
    correlation: DataFrame
    left_out: DataFrame
    skipped: DataFrame

    def __str__(self) -> str:
        """A report in Markdown: for each model a table of all evaluations, and one of cue alignment by layer."""
        return "\n\n".join(self._report(model) for model in self.summary["model"].unique())

    def plot(self, what: str) -> Figure:
        """One evaluation as a figure.

        Args:
            what: "cue_dot" or "cue_ap", cue alignment; "probing", with its correlation; or "faithfulness", with the
                paper's figures beside ours.

        Raises:
            ValueError: Another word, or an evaluation that was left out of all models.
        """
        figures = self._figures()
        if what not in figures:
            raise ValueError(f"what is {what!r}: pass one of {', '.join(map(repr, figures))}.")
        return figures[what]()

    def write(self, folder: Path) -> None:
        """Write the tables, the report, and the figures of probing and faithfulness, each file whole or not at all.

        Raises:
            OSError: One could not be written: no space, no right. The message says what to do.
        """
        for name in ("summary", "probing", "correlation", "left_out", "skipped"):
            write_whole(folder / f"{name}.csv", getattr(self, name).to_csv(index=False).encode())
        write_whole(folder / "report.md", f"{self}\n".encode())
        for name, draw in self._figures().items():
            if name in ("probing", "faithfulness"):  # cue alignment is drawn in the folder of each model's study
                picture = io.BytesIO()
                draw().savefig(picture, format="png")
                write_whole(folder / f"{name}.png", picture.getvalue())

    def _figures(self) -> dict[str, Callable[[], Figure]]:
        figures: dict[str, Callable[[], Figure]] = {
            metric: partial(draw_summary, self.summary, metric) for metric in ("cue_dot", "cue_ap")
        }
        if len(self.probing):
            figures["probing"] = partial(draw_probing, self.probing, self.correlation)
        if "blank_out" in set(self.summary["metric"]):
            figures["faithfulness"] = partial(draw_faithfulness, self.summary, TABLE_3)
        return figures

    def _report(self, model: str) -> str:
        summary = self.summary[(self.summary["model"] == model) & (self.summary["group"] == ALL)]
        aside = self.left_out[self.left_out["model"] == model]
        skipped = self.skipped[self.skipped["model"] == model]["example"].nunique()
        parts = [
            f"## {model}: {summary['examples'].max()} sentences, {skipped} skipped",
            "In the last layer, rollouts through all layers; in brackets, intervals over sentences." + _COLUMNS,
            self._overview(model, summary),
            "Cue alignment (dot product) in each layer, of rollouts up to it; and how far the layer's state at the "
            "target compresses the labels.",
            self._by_layer(model, summary),
            *_undefined(summary),
            *(f"Without {row.what}: {row.reason}" for row in aside.itertuples()),
        ]
        return "\n\n".join(parts)

    def _overview(self, model: str, summary: DataFrame) -> str:
        correlation = self.correlation[self.correlation["model"] == model].set_index("method")
        rows = []
        for method, of_method in summary.groupby("method", sort=False):
            last = of_method.groupby("metric").tail(1).set_index("metric")
            cells = [_interval(last, metric, "mean") for metric in ("cue_dot", "cue_ap")]
            cells.append(_interval(correlation, method, "statistic"))
            cells.append(_interval(last, "blank_out", "mean"))
            paper = TABLE_3.get(str(method))
            rows.append([str(method), *cells, "" if paper is None else f"{paper:.2f}"])
        heads = ["method", "cue, dot product", "cue, average precision", "probing", "blank-out", "paper's blank-out"]
        return _table(heads, rows)

    def _by_layer(self, model: str, summary: DataFrame) -> str:
        layered = summary[(summary["metric"] == "cue_dot") & summary["layer"].notna()]
        layers = sorted(layered["layer"].unique())
        rows = [
            [str(method), *(f"{mean:.2f}" for mean in of_method.sort_values("layer")["mean"])]
            for method, of_method in layered.groupby("method", sort=False)
        ]
        probing = self.probing[self.probing["model"] == model].sort_values("layer")
        if len(probing):
            rows.append(["*compression*", *(f"{value:.2f}" for value in probing["compression"])])
        return _table(["method", *map(str, layers)], rows)


_COLUMNS: Final = (
    " *probing*: Spearman's correlation of dot product and compression over layers. *blank-out*: Spearman's "
    "correlation with what blanking out each token does. *paper's blank-out*: its Table 3, for pre-trained models of "
    "the BERT family, second-hand."
)


def _undefined(summary: DataFrame) -> list[str]:
    """What to say of methods some of whose sentences have no value, for constant scores order nothing."""
    without = summary[summary["undefined"] > 0].groupby(["method", "metric"], sort=False)["undefined"].max()
    return [f"{method}: {count} sentences have no {metric}." for (method, metric), count in without.items()]


def _interval(rows: DataFrame, name: str, value: str) -> str:
    """One cell of a table: a number and its interval; nothing if there is none."""
    if name not in rows.index:
        return ""
    row = rows.loc[name]
    return f"{row[value]:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown that can be read as it stands."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
