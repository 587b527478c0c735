"""What the paper's evaluations have found, as tables, a report and figures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from captum_vz.study.figures import draw_summary
from captum_vz.study.methods import METHODS
from captum_vz.study.paper.figures import draw_faithfulness, draw_probing
from captum_vz.study.results import ALL, with_interval
from captum_vz.study.storage.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

REPORT: Final = "report.md"

#: Spearman's correlation with blank-out in the paper's Table 3 (pre-trained models), as third parties quote it. Which
#: of this package's methods a row of that table stands for is assumed.
TABLE_3: Final = {
    "attention-rollout": -0.10,
    "attention-norm-rollout": 0.19,
    "alti": 0.17,
    "value-zeroing-rollout": 0.26,
}


@dataclass(frozen=True)
class Reproduction:
    """What the three evaluations have found. Its string is a report in Markdown.

    Attributes:
        summary: Cue alignment (``cue_dot``, ``cue_ap``) and faithfulness (``blank_out``) of all models, with the
            columns of :attr:`Study.summary <captum_vz.study.Study.summary>`.
        probing: For each ``model`` and ``layer`` the ``compression`` of the labels, its interval (``low``, ``high``),
            the ``bits`` of all labels and the number of ``examples``.
        correlation: For each ``model`` and ``method`` with layers the rank correlation of cue alignment with
            compression over layers, as :class:`~captum_vz.metrics.Correlation` has it, and the number of ``layers``.
        omitted: What could not be done: ``model``, ``what``, ``reason``.
        skipped: Which examples could not be used, and why, see :attr:`Study.skipped <captum_vz.study.Study.skipped>`.
        about: How the examples were selected. The report begins with it.
    """

    summary: DataFrame
    probing: DataFrame
    correlation: DataFrame
    omitted: DataFrame
    skipped: DataFrame
    about: str = ""

    def __str__(self) -> str:
        """A report in Markdown: for each model a table of all evaluations, and one of cue alignment by layer."""
        reports = (self._report(model) for model in self.summary["model"].unique())
        return "\n\n".join([*filter(None, [self.about]), *reports])

    def plot(self, what: str) -> Figure:
        """One evaluation as a figure.

        Args:
            what: "cue_dot" or "cue_ap" (cue alignment), "probing" (with its correlation), or "faithfulness" (with the
                paper's numbers next to these).

        Raises:
            ValueError: Another word, or an evaluation that was omitted for all models.
        """
        figures = self._figures()
        if what not in figures:
            raise ValueError(f"what is {what!r}: pass one of {', '.join(map(repr, figures))}.")
        return figures[what]()

    @property
    def figures(self) -> tuple[str, ...]:
        """What :meth:`plot` can draw."""
        return tuple(self._figures())

    def write(self, folder: Path) -> None:
        """Write the tables, the report, and the figures of probing and faithfulness, each file whole or not at all.

        Raises:
            OSError: A file could not be written: no space, no permission. The message says what to do.
        """
        for name in ("summary", "probing", "correlation", "omitted", "skipped"):
            write_whole(folder / f"{name}.csv", getattr(self, name).to_csv(index=False).encode())
        write_whole(folder / REPORT, f"{self}\n".encode())
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
        correlation = self.correlation[self.correlation["model"] == model]
        omitted = self.omitted[self.omitted["model"] == model]
        skipped = self.skipped[self.skipped["model"] == model]["example"].nunique()
        parts = [
            f"## {model}: {summary['examples'].max()} sentences, {skipped} skipped",
            _ROWS,
            _overview(summary, correlation),
            _notes(summary, correlation),
            *self._by_layer(model, summary),
            *([_SEED] if len(self.probing[self.probing["model"] == model]) else []),
            *_undefined(summary),
            *(f"Without {row.what}: {row.reason}" for row in omitted.itertuples()),
        ]
        return "\n\n".join(parts)

    def _by_layer(self, model: str, summary: DataFrame) -> list[str]:
        """What the table of the layers shows, and the table; nothing if no method has layers."""
        layered = summary[(summary["metric"] == "cue_dot") & summary["layer"].notna()]
        layers = sorted(layered["layer"].unique())
        rows = [
            [str(method), *(f"{mean:.2f}" for mean in of_method.sort_values("layer")["mean"])]
            for method, of_method in layered.groupby("method", sort=False)
        ]
        probing = self.probing[self.probing["model"] == model].sort_values("layer")
        if len(probing):
            rows.append(["*compression*", *(f"{value:.2f}" for value in probing["compression"])])
        also = "; and the compression of the labels given the layer's state at the target" if len(probing) else ""
        title = f"Cue alignment (dot product) in each layer, of rollouts up to this layer{also}."
        return [title, _table(["method", *map(str, layers)], rows)] if rows else []


_ROWS: Final = (
    "Scores of the last layer; rollouts go through all layers. Brackets hold intervals over sentences. "
    "Rows are in the order of the methods, not ranked. Methods whose intervals overlap need the interval of their "
    "difference to be compared."
)
_SEED: Final = (
    "Each layer's probe was trained once, from one seed. The intervals of compression are over sentences, not over "
    "seeds."
)


def _overview(summary: DataFrame, correlation: DataFrame) -> str:
    """All methods of the study, one row each, with their scores in the last layer."""
    by_method = correlation.set_index("method")
    rows = []
    for method, of_method in summary.groupby("method", sort=False):
        last = of_method.groupby("metric").tail(1).set_index("metric")
        cells = [_interval(last, metric, "mean") for metric in ("cue_dot", "cue_ap")]
        cells.append(_interval(by_method, method, "statistic"))
        cells.append(_interval(last, "blank_out", "mean"))
        paper = TABLE_3.get(str(method))
        rows.append([str(method), *cells, "" if paper is None else f"{paper:.2f}"])
    heads = ["method", "cue, dot product", "cue, average precision", "probing", "blank-out", "paper's blank-out"]
    return _table(heads, rows)


def _notes(summary: DataFrame, correlation: DataFrame) -> str:
    """What the columns of the table are, and what a reader must know before comparing its rows."""
    notes = []
    if len(correlation):
        layers = correlation["layers"].max()
        highest = int((correlation["statistic"].round(2) == 1).sum())
        notes.append(
            f"*probing*: Spearman's correlation of dot product and compression over {layers} layers (0 to "
            f"{layers - 1}). {highest} of {len(correlation)} methods reach 1.00."
        )
    if "blank_out" in set(summary["metric"]):
        notes.append("*blank-out*: Spearman's correlation with the effect of blanking out each token.")
        given = [str(name) for name in summary["method"].unique() if METHODS[str(name)].explains_output]
        if given:
            notes.append(
                f"Blank-out compares the two forms of the target word. {', '.join(given)} "
                f"{'is' if len(given) == 1 else 'are'} given these two forms; the other methods are not."
            )
        if set(TABLE_3) & set(summary["method"]):
            notes.append(
                "*paper's blank-out*: its Table 3, for pre-trained models of the BERT family, quoted second-hand. That "
                "its rows are the same methods is assumed."
            )
    return "\n".join(f"- {note}" for note in notes)


def _undefined(summary: DataFrame) -> list[str]:
    """A line for each method with sentences that have no value, because constant scores order nothing."""
    without = summary[summary["undefined"] > 0].groupby(["method", "metric"], sort=False)["undefined"].max()
    return [f"{method}: {count} sentences have no {metric}." for (method, metric), count in without.items()]


def _interval(rows: DataFrame, name: str, value: str) -> str:
    """One cell of a table: a number and its interval; empty if there is none."""
    if name not in rows.index:
        return ""
    row = rows.loc[name]
    return with_interval(row[value], row["low"], row["high"])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with aligned columns."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
