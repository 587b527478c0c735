"""What the paper's evaluations have found, as tables, a report and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.figure import Figure

from captum_vz.paper.controls import NEAR_ZERO, Controls
from captum_vz.paper.figures import Measures, draw_faithfulness, draw_page, draw_probing
from captum_vz.paper.further import Further
from captum_vz.paper.sections import failed_lines, further_figures, further_sections, markdown_table, probing_section
from captum_vz.study import safe_name, sign_figure, tied_pairs, with_interval, write_whole
from captum_vz.study.figures import draw_summary, write_figure

if TYPE_CHECKING:
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
        probing: For each ``model`` and ``layer`` the ``compression`` of the labels with its interval over examples
            (``low``, ``high``), its range over ``seeds`` (``lowest``, ``highest``), the ``bits`` of all labels, the
            same for shuffled labels (``control``), and the ``accuracy`` of a linear probe with its interval.
        correlation: For each ``model`` and ``method`` with layers the rank correlation of cue alignment with
            compression over layers, as :class:`~captum_vz.metrics.Correlation` has it, and the number of ``layers``.
        omitted: What could not be done: ``model``, ``what``, ``reason``.
        skipped: Which examples could not be used, and why, see :attr:`Study.skipped <captum_vz.study.Study.skipped>`.
        differences: Which methods differ on the same examples, see
            :attr:`Study.differences <captum_vz.study.Study.differences>`.
        about: How the examples were selected. The report begins with it.
        controls: Sanity checks, truths by patching, and the findings that hold in all models.
        further: Tables that the paper does not have: variants of faithfulness, bounds, paradigms, agreement.
        repeat: What a reader needs to repeat the evaluations, a line for each thing. The report ends with it.
        settings: The settings of the studies, for the foot of each figure.
        title: The name of the data, for the titles of figures.
    """

    summary: DataFrame
    probing: DataFrame
    correlation: DataFrame
    omitted: DataFrame
    skipped: DataFrame
    differences: DataFrame
    about: str = ""
    controls: Controls = field(default_factory=Controls)
    further: Further = field(default_factory=Further)
    repeat: tuple[str, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ()
    title: str = ""

    def __str__(self) -> str:
        """A report in Markdown: for each model a table of all evaluations, and one of cue alignment by layer.

        The controls and a comparison of the models follow.
        """
        reports = (self._report(model) for model in self.summary["model"].unique())
        across = self.controls.sections(self.summary)
        repeat = ["## To repeat this\n\n" + "\n".join(f"- {line}" for line in self.repeat)] if self.repeat else []
        return "\n\n".join([*filter(None, [self.about]), *reports, *across, *repeat])

    def plot(self, what: str) -> Figure:
        """One evaluation as a figure.

        Args:
            what: "page" (all evaluations on one page), "cue_dot" or "cue_ap" (cue alignment), "probing" (with its
                correlation), "faithfulness" (with the paper's numbers next to these), "variants" (ranks in the
                variants of blank-out), "groups-cue_dot", "groups-cue_ap" or "groups-blank_out" (by paradigm and
                label), "agreement" (of the methods), "sanity-MODEL" for each model, or "truth" (by value patching).

        Raises:
            ValueError: Another word, or an evaluation that was omitted for all models.
        """
        figures = self._figures()
        if what not in figures:
            raise ValueError(f"what is {what!r}: pass one of {', '.join(map(repr, figures))}.")
        controls, own = self.controls.settings_of(what), self.settings
        return sign_figure(figures[what](), *(own if what == "page" or not controls else ()), *controls)

    @property
    def figures(self) -> tuple[str, ...]:
        """What :meth:`plot` can draw."""
        return tuple(self._figures())

    def write(self, folder: Path) -> None:
        """Write the tables, the report and the figures except cue alignment, each file whole or not at all.

        Each figure is a PNG file and a PDF file.

        Raises:
            OSError: A file could not be written: no space, no permission. The message says what to do.
        """
        for name in ("summary", "probing", "correlation", "omitted", "skipped", "differences"):
            write_whole(folder / f"{name}.csv", getattr(self, name).to_csv(index=False).encode())
        for name, table in (self.further.tables() | self.controls.tables()).items():
            write_whole(folder / f"{name}.csv", table.to_csv(index=False).encode())
        write_whole(folder / REPORT, f"{self}\n".encode())
        for name in self.figures:
            if name in ("cue_dot", "cue_ap"):  # cue alignment is drawn in the folder of each model's study
                continue
            write_figure(self.plot(name), folder / safe_name(name), ("png", "pdf"))

    def _figures(self) -> dict[str, Callable[[], Figure]]:
        figures: dict[str, Callable[[], Figure]] = {
            metric: partial(draw_summary, self.summary, metric, self.title) for metric in ("cue_dot", "cue_ap")
        }
        level = self.settings[0]["provenance"]["confidence"] if self.settings else None
        controls = self.controls
        measures = Measures(self.summary, controls.truth, controls.sanity, self.further.variants, NEAR_ZERO, level)
        figures["page"] = partial(draw_page, measures, self.title)
        if len(self.probing):
            figures["probing"] = partial(draw_probing, self.probing, self.correlation, self.title)
        if "blank_out" in set(self.summary["metric"]):
            figures["faithfulness"] = partial(draw_faithfulness, self.summary, TABLE_3, self.title)
        return figures | further_figures(self.further, self.title) | self.controls.figures()

    def _report(self, model: str) -> str:
        summary = self.summary[(self.summary["model"] == model) & (self.summary["group"] == "all")]
        correlation = self.correlation[self.correlation["model"] == model]
        omitted = self.omitted[self.omitted["model"] == model]
        skipped = self.skipped[self.skipped["model"] == model]
        useless = skipped[skipped["method"].isna() & skipped["metric"].isna()]["example"].nunique()
        parts = [
            f"## {model}: {summary['examples'].max()} sentences, {useless} skipped",
            _ROWS,
            _overview(summary, correlation),
            _notes(summary, correlation, self.further.variants[self.further.variants["model"] == model]),
            *_ties(self.differences[self.differences["model"] == model]),
            *self._by_layer(model, summary),
            *probing_section(self.probing[self.probing["model"] == model], correlation),
            *further_sections(self.further, model),
            *_undefined(summary),
            *failed_lines(skipped),
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
        return [title, markdown_table(["method", *map(str, layers)], rows)] if rows else []


_ROWS: Final = (
    "Scores of the last layer; rollouts go through all layers. Brackets hold intervals over sentences. "
    "Rows are in the order of the methods, not ranked. Methods are compared sentence by sentence below the table."
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
    return markdown_table(heads, rows)


def _notes(summary: DataFrame, correlation: DataFrame, variants: DataFrame) -> str:
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
        told = []
        for which, one, many in (
            ("yes", "is given these two forms", "are given these two forms"),
            ("can", "is your own code, and can read them", "are your own code, and can read them"),
            ("unknown", "comes from an earlier start, and may", "come from earlier starts, and may"),
        ):
            names = variants[variants["sees_forms"] == which]["method"].unique()
            if len(names):
                told.append(f"{', '.join(map(str, names))} {one if len(names) == 1 else many}")
        if told:
            notes.append(
                f"Blank-out compares the two forms of the target word. {'; '.join(told)}; the other methods are not "
                "given them."
            )
        if set(TABLE_3) & set(summary["method"]):
            notes.append(
                "*paper's blank-out*: its Table 3, for pre-trained models of the BERT family, quoted second-hand. That "
                "its rows are the same methods is assumed."
            )
    return "\n".join(f"- {note}" for note in notes)


def _ties(differences: DataFrame) -> list[str]:
    """What the paired comparisons say: their rule, and for each metric the pairs that are not shown to."""
    if differences.empty:
        return []
    rule = (
        "Paired comparisons: two methods differ if the bootstrap interval of their mean difference excludes 0, and "
        "Wilcoxon's signed-rank test rejects after Holm's correction for all pairs of the metric. `differences.csv` "
        "has all of them."
    )
    lines = []
    for metric, rows in differences.groupby("metric", sort=False):
        ties, few = tied_pairs(rows), f"{int(rows['examples'].max()):,} sentences"
        told = f": {', '.join(ties)}" if 0 < len(ties) < len(rows) else ""
        lines.append(f"- {metric}: {len(ties)} of {len(rows)} pairs are not shown to differ ({few}){told}.")
    return [rule, "\n".join(lines)]


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
