"""What the paper's evaluations have found, as tables, a report and figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import factorial, nan
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame

from captum_vz.study import sign_figure, with_interval, write_whole
from captum_vz.study.figures import metric_title
from paper.figures import draw_page, draw_probing

#: The truths that methods are compared with, and the heads of their columns.
TRUTHS: Final = {
    "value_patching": "values, overlap",
    "value_patching_top": "values, largest",
    "activation_patching": "states, overlap",
    "activation_patching_top": "states, largest",
}
#: The metrics of the sanity checks: the last layer is random, and all layers are.
CHECKS: Final = ("sanity_last", "sanity")
NEAR_ZERO: Final = 0.2  #: the size of a mean correlation below which a method passes, with the whole interval
#: Spearman's correlation with blank-out in the paper's Table 3 (pre-trained models), as third parties quote it. Which
#: of this package's methods a row of that table stands for is assumed.
TABLE_3: Final = {
    "attention-rollout": -0.10,
    "attention-norm-rollout": 0.19,
    "alti": 0.17,
    "value-zeroing-rollout-paper": 0.26,
}
RULE: Final = (
    "Paired comparisons: two methods differ if the bootstrap interval of their mean difference excludes 0, and "
    "Wilcoxon's signed-rank test rejects after Holm's correction for all pairs of the metric. `differences.csv` "
    "has all of them."
)


@dataclass(frozen=True)
class Reproduction:
    """What the evaluations of all models have found. Its string is a report in Markdown.

    The tables have the names of their files, and a column ``model``. ``summary`` (cue alignment and faithfulness),
    ``differences`` and ``skipped`` are as :class:`~captum_vz.study.Study` has them, and so are ``truth``,
    ``truth_differences`` and ``truth_skipped`` of the controls. ``omitted`` says what could not be done. ``probing``
    has the compression of each layer, ``correlation`` that of cue alignment with it. Tables without rows are missing.
    """

    tables: Mapping[str, DataFrame]
    about: str = ""  # how the examples were selected; the report begins with it
    title: str = ""  # the name of the data, for the titles of figures
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)  # on pairs of methods and skipped sentences
    truth_lines: Sequence[str] = ()  # the same of the controls
    repeat: Sequence[str] = ()  # what a reader needs to repeat the evaluations; the report ends with it
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of each model's study, for figures
    controls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the same of the controls

    def __str__(self) -> str:
        """A report in Markdown: for each model its tables; the controls and a comparison of the models follow."""
        models = self.tables["summary"]["model"].unique()
        parts = [self.about, *map(self._report, models)]
        parts += _sanity(self.tables["sanity"]) if "sanity" in self.tables else []
        parts += _truth(self.tables["truth"], self.truth_lines) if "truth" in self.tables else []
        parts += _models(self.tables) if len(models) > 1 else []
        parts += ["## To repeat this", _listed(self.repeat)] if self.repeat else []
        return "\n\n".join(filter(None, parts))

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
        every = {name: one[one["model"] == model] for name, one in self.tables.items()}
        of = {name: table for name, table in every.items() if len(table)}
        summary, skipped = of["summary"][of["summary"]["group"] == "all"], of.get("skipped", _NO_SKIPS)
        useless = skipped[skipped["method"].isna() & skipped["metric"].isna()]["example"].nunique()
        undefined = summary.groupby(["method", "metric"], sort=False)["undefined"].max()  # of constant scores
        parts = [
            f"## {model}: {summary['examples'].max()} sentences, {useless} skipped",
            "Scores of the last layer; rollouts go through all layers. Brackets hold intervals over sentences. Rows "
            "are in the order of the methods, not ranked. Methods are compared sentence by sentence below the table.",
            _overview(summary, of.get("correlation", _NO_CORRELATION)),
            _listed(_notes(summary, of)),
            *([RULE, _listed(self.lines[model])] if self.lines.get(model) else []),
            *_by_layer(summary, of.get("probing")),
            *(_probing(of["probing"], of.get("correlation")) if "probing" in of else []),
            *(f"{who[0]}: {count} sentences have no {who[1]}." for who, count in undefined.items() if count),
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


def _probing(probing: DataFrame, correlation: DataFrame | None) -> list[str]:
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
    if correlation is not None:
        layers, smallest, many = int(correlation["layers"].max()), correlation["p"].min(), len(correlation)
        found.append(
            f"The correlation of cue alignment with compression is over {layers} layers. Its one-sided p counts the "
            f"orders of the layers, so the smallest that {layers} layers can have is 1/{factorial(layers)}. The "
            f"smallest here is {smallest:.3f}, and {min(1.0, many * smallest):.3f} after Holm's correction for {many} "
            "methods."
        )
    return found


def _sanity(sanity: DataFrame) -> Iterator[str]:
    yield "## Sanity checks"
    yield (
        "Spearman's correlation of the scores of the last layer with those for copies with random layers, "
        f"{int(sanity['examples'].max())} sentences of the grammar: the last layer alone, and all layers at once. "
        f"Near 0 passes: *yes* if the whole interval of the mean is between -{NEAR_ZERO} and {NEAR_ZERO} when all "
        "layers are random, *no* if none of it is, else *open*."
    )
    columns = list(product(sanity["model"].unique(), ("last layer", "all layers", "passes")))
    table = pd.DataFrame("-", sanity["method"].unique(), pd.MultiIndex.from_tuples(columns))
    for (method, model), checks in sanity.groupby(["method", "model"]):
        first, last = (checks.set_index("metric").loc[name] for name in CHECKS)
        if last["mean"] == last["mean"]:
            told = with_interval(last["mean"], last["low"], last["high"])
            table.loc[method, (model, slice(None))] = [number(first["mean"]), told, passes(last["low"], last["high"])]
    yield markdown_table(["method", *map(", ".join, columns)], table)


def passes(low: float, high: float) -> str:
    """Whether a correlation is near 0, by its interval. An interval on both sides of :data:`NEAR_ZERO` leaves it open.

    >>> passes(-0.1, 0.1), passes(0.1, 0.3), passes(0.3, 0.5), passes(float("nan"), float("nan"))
    ('yes', 'open', 'no', 'open')
    """
    if max(-low, high) < NEAR_ZERO:
        return "yes"
    return "no" if max(low, -high) > NEAR_ZERO else "open"


def _truth(truth: DataFrame, lines: Sequence[str]) -> Iterator[str]:
    whole = truth[truth["group"] == "all"]
    yield "## A controlled truth: patching from the sentence whose cue has the other number"
    yield (
        "Value patching: a token's truth is the share of the difference of the two forms' logits that is lost if its "
        "value in a layer comes from the other sentence, in all layers up to this one for methods that join layers. "
        "Activation patching: if its state before the layer does, before the first layer for methods that join "
        "layers, where the cue has all of it. Falls below 0 count as 0. *overlap*: the sum of the smaller of truth "
        "and score, which favours rows on few tokens. *largest*: how often the largest score is on the token with "
        "the largest truth. Last layer of methods with layers; `truth.csv` has all layers."
    )
    for model, of_model in whole.groupby("model", sort=False):
        yield f"{model}:"
        yield markdown_table(["method", *TRUTHS.values()], interval_cells(of_model, list(TRUTHS)), missing="-")
    usable = whole.groupby("model", sort=False)["examples"].max()
    counts = ", ".join(f"{model} {int(count)}" for model, count in usable.items())
    yield (
        f"Sentences with a truth: {counts}. All are of the package's grammar, where each cue has its other number. "
        "Other data may differ. `truth_differences.csv` has all pairs of methods."
    )
    yield _listed(lines)


def _models(tables: Mapping[str, DataFrame]) -> Iterator[str]:
    """For each metric a table: the mean of each method in each model, in the last layer, and how many sentences."""
    yield "## All models side by side"
    both = pd.concat([tables[name] for name in ("summary", "truth") if name in tables], ignore_index=True)
    models = list(tables["summary"]["model"].unique())
    for metric, rows in both[both["group"] == "all"].groupby("metric", sort=False):
        last = rows.groupby(["model", "method"], sort=False).tail(1)
        table = last.pivot(index="method", columns="model", values="mean").reindex(columns=models)
        counts = rows.groupby("model")["examples"].max()
        heads = [f"{model} ({int(counts.get(model, 0)):,} sentences)" for model in models]
        yield f"{metric_title(str(metric))}:"
        yield markdown_table(["method", *heads], table.loc[rows["method"].unique()], missing="-")


def markdown_table(heads: Sequence[str], table: DataFrame, missing: str = "") -> str:
    """A table in Markdown with aligned columns: its index, and its cells, texts or numbers."""
    cells = table.map(lambda one: one if isinstance(one, str) else number(one) or missing)
    rows = zip(table.index.astype(str), *(cells[name] for name in cells), strict=True)
    # A bar or a line's end in a name would end its cell.
    lines = [[" ".join(cell.split("\n")).replace("|", "\\|") for cell in line] for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def number(value: float) -> str:  # a cell; empty if there is no number
    return "" if value != value else f"{value:.2f}"


def interval_cells(rows: DataFrame, metrics: Sequence[str]) -> DataFrame:
    """The means of the last layers with their intervals as text: methods by metrics, NaN if there is none."""
    last = rows.groupby(["method", "metric"], sort=False).tail(1)
    cells = last.assign(cell=list(map(with_interval, last["mean"], last["low"], last["high"])))
    table = cells.pivot(index="method", columns="metric", values="cell")
    return table.reindex(index=rows["method"].unique(), columns=metrics)


def _listed(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
