"""What the paper's evaluations have found, as tables, a report and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import factorial, nan
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame

from captum_vz.study import sign_figure, tied_pairs, with_interval, write_whole
from paper.across import NEAR_ZERO, across_sections, failed_lines, interval_cells, markdown_table
from paper.figures import draw_page, draw_probing

#: Spearman's correlation with blank-out in the paper's Table 3 (pre-trained models), as third parties quote it. Which
#: of this package's methods a row of that table stands for is assumed.
TABLE_3: Final = {
    "attention-rollout": -0.10,
    "attention-norm-rollout": 0.19,
    "alti": 0.17,
    "value-zeroing-rollout-paper": 0.26,
}


@dataclass(frozen=True)
class Reproduction:
    """What the evaluations of all models have found. Its string is a report in Markdown.

    Attributes:
        tables: Tables by the names of their files, each with a column ``model``. ``summary`` (cue alignment and
            faithfulness), ``differences`` and ``skipped`` are as :class:`~captum_vz.study.Study` has them, and so are
            ``truth``, ``truth_differences`` and ``truth_skipped`` of the controls. ``omitted`` says what could not be
            done. ``probing`` has the compression of each layer, ``correlation`` that of cue alignment with it. Tables
            without rows are missing.
        about: How the examples were selected. The report begins with it.
        title: The name of the data, for the titles of figures.
        repeat: What a reader needs to repeat the evaluations, a line for each thing. The report ends with it.
        settings: The settings of each model's study, for the foot of each figure, and `controls` of its controls.
    """

    tables: Mapping[str, DataFrame]
    about: str = ""
    title: str = ""
    repeat: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    controls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        """A report in Markdown: for each model its tables; the controls and a comparison of the models follow."""
        reports = (self._report(model) for model in self.tables["summary"]["model"].unique())
        repeat = ["## To repeat this\n\n" + "\n".join(f"- {line}" for line in self.repeat)] if self.repeat else []
        about = [self.about] if self.about else []
        return "\n\n".join([*about, *reports, *across_sections(self.tables), *repeat])

    @property
    def figures(self) -> tuple[str, ...]:
        """What :meth:`plot` can draw. "page" has all evaluations on one page."""
        return ("page", "probing") if "probing" in self.tables else ("page",)

    def plot(self, what: str) -> Figure:
        """One of :attr:`figures`. A `ValueError` says that it is none, or that it was omitted for all models."""
        if what not in self.figures:
            raise ValueError(f"what is {what!r}: pass one of {', '.join(map(repr, self.figures))}.")
        own, tables = list(self.settings.values()), self.tables
        if what == "page":
            return sign_figure(draw_page(tables, NEAR_ZERO, self.title), *own, *self.controls.values())
        correlation = tables.get("correlation", _NO_CORRELATION)
        return sign_figure(draw_probing(tables["probing"], correlation, self.title), *own)

    def write(self, folder: Path) -> None:
        """Write the tables, the report and the figures. Each study draws its own metrics in its folder."""
        for name, table in self.tables.items():
            write_whole(folder / f"{name}.csv", table.to_csv(index=False).encode())
        write_whole(folder / "report.md", f"{self}\n".encode())
        for name in self.figures:
            figure = self.plot(name)
            for kind in ("png", "pdf"):
                figure.savefig(folder / f"{name}.{kind}")

    def _report(self, model: str) -> str:
        of = {name: one[one["model"] == model] for name, one in self.tables.items() if "model" in one}
        of = {name: table for name, table in of.items() if len(table)}
        summary = of["summary"][of["summary"]["group"] == "all"]
        skipped = of.get("skipped", _NO_SKIPS)
        useless = skipped[skipped["method"].isna() & skipped["metric"].isna()]["example"].nunique()
        parts = [
            f"## {model}: {summary['examples'].max()} sentences, {useless} skipped",
            "Scores of the last layer; rollouts go through all layers. Brackets hold intervals over sentences. Rows "
            "are in the order of the methods, not ranked. Methods are compared sentence by sentence below the table.",
            _overview(summary, of.get("correlation", _NO_CORRELATION)),
            "\n".join(f"- {note}" for note in _notes(summary, of)),
            *(_ties(of["differences"]) if "differences" in of else []),
            *_by_layer(summary, of.get("probing")),
            *(_probing(of["probing"], of) if "probing" in of else []),
            *(
                f"{method}: {count} sentences have no {metric}."
                for (method, metric), count in summary.groupby(["method", "metric"], sort=False)["undefined"]
                .max()
                .items()
                if count  # constant scores order nothing
            ),
            *failed_lines(skipped),
            *(f"Without {row.what}: {row.reason}" for row in of.get("omitted", _NO_SKIPS).itertuples()),
        ]
        return "\n\n".join(filter(None, parts))


_NO_SKIPS: Final = DataFrame(columns=["model", "example", "method", "metric", "skipped"])
_NO_CORRELATION: Final = DataFrame(columns=["model", "method", "statistic", "low", "high", "p", "layers"])


def _overview(summary: DataFrame, correlation: DataFrame) -> str:
    """All methods of the study, one row each, with their scores in the last layer."""
    cells = interval_cells(summary, ["cue_dot", "cue_ap", "blank_out"])
    rows = correlation.set_index("method")[["statistic", "low", "high"]]
    cells.insert(2, "probing", pd.Series({row[0]: with_interval(*row[1:]) for row in rows.itertuples()}, dtype=object))
    cells["paper"] = [TABLE_3.get(method, nan) for method in cells.index]
    heads = ["method", "cue, dot product", "cue, average precision", "probing", "blank-out", "paper's blank-out"]
    return markdown_table(heads, cells)


def _notes(summary: DataFrame, of: Mapping[str, DataFrame]) -> Iterator[str]:
    """What the columns of the table are, and what a reader must know before comparing its rows."""
    if (correlation := of.get("correlation")) is not None:
        layers = correlation["layers"].max()
        highest = int((correlation["statistic"].round(2) == 1).sum())
        yield (
            f"*probing*: Spearman's correlation of dot product and compression over {layers} layers (0 to "
            f"{layers - 1}). {highest} of {len(correlation)} methods reach 1.00."
        )
    if "blank_out" not in set(summary["metric"]):
        return
    yield (
        "*blank-out*: Spearman's correlation with the effect of blanking out each token on the target's two forms. "
        "Methods that explain the output, such as value-zeroing-effect, are given these forms."
    )
    if set(TABLE_3) & set(summary["method"]):
        yield (
            "*paper's blank-out*: its Table 3, for pre-trained models of the BERT family, quoted second-hand. That its "
            "rows are the same methods is assumed."
        )


def _ties(differences: DataFrame) -> list[str]:
    """What the paired comparisons say: their rule, and for each metric the pairs that are not shown to differ."""
    rule = (
        "Paired comparisons: two methods differ if the bootstrap interval of their mean difference excludes 0, and "
        "Wilcoxon's signed-rank test rejects after Holm's correction for all pairs of the metric. `differences.csv` "
        "has all of them."
    )
    lines = []
    for metric, rows in differences.groupby("metric", sort=False):
        ties, sentences = tied_pairs(rows), f"{int(rows['examples'].max()):,} sentences"
        told = f": {', '.join(ties)}" if 0 < len(ties) < len(rows) else ""
        lines.append(f"- {metric}: {len(ties)} of {len(rows)} pairs are not shown to differ ({sentences}){told}.")
    return [rule, "\n".join(lines)]


def _by_layer(summary: DataFrame, probing: DataFrame | None) -> list[str]:
    """What the table of the layers shows, and the table; nothing if no method has layers."""
    layered = summary[(summary["metric"] == "cue_dot") & summary["layer"].notna()]
    if layered.empty:
        return []
    table = layered.pivot(index="method", columns="layer", values="mean").loc[layered["method"].unique()]
    also = ""
    if probing is not None:
        table.loc["*compression*"] = probing.set_index("layer")["compression"]
        also = "; and the compression of the labels given the layer's state at the target"
    title = f"Cue alignment (dot product) in each layer, of rollouts up to this layer{also}."
    return [title, markdown_table(["method", *map(str, table)], table)]


def _probing(probing: DataFrame, of: Mapping[str, DataFrame]) -> list[str]:
    """Compression with its range over seeds, the control, the linear probe, and what the correlation can show."""
    lines = {
        row.layer: (
            with_interval(row.compression, row.low, row.high),
            f"{row.lowest:.2f} to {row.highest:.2f}",
            f"{row.control:.2f} ({row.control_lowest:.2f} to {row.control_highest:.2f})",
            with_interval(row.accuracy, row.accuracy_low, row.accuracy_high),
        )
        for row in probing.sort_values("layer").itertuples()
    }
    heads = ["layer", "compression", "over seeds", "shuffled labels", "linear probe, accuracy"]
    text = (
        f"Probes of {probing['seeds'].max()} seeds, {probing['examples'].max()} sentences. Brackets hold intervals "
        "over sentences, the ranges are over seeds. Shuffled labels are the control: what a probe compresses without "
        "any information."
    )
    found = ["### Probing", text, markdown_table(heads, DataFrame(lines).T)]
    if (correlation := of.get("correlation")) is not None:
        layers, smallest, many = int(correlation["layers"].max()), correlation["p"].min(), len(correlation)
        found.append(
            f"The correlation of cue alignment with compression is over {layers} layers. Its one-sided p counts the "
            f"orders of the layers, so the smallest that {layers} layers can have is 1/{factorial(layers)}. The "
            f"smallest here is {smallest:.3f}, and {min(1.0, many * smallest):.3f} after Holm's correction for {many} "
            "methods."
        )
    return found
