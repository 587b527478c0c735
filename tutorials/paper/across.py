"""What the report says of the controls, and of all models side by side; and what all of its tables share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Final

import pandas as pd

from captum_vz.study import with_interval
from captum_vz.study.figures import last_layers, metric_title

if TYPE_CHECKING:
    from pandas import DataFrame

#: The truths that methods are compared with, and the heads of their columns.
TRUTHS: Final = {
    "value_patching": "values, overlap",
    "value_patching_top": "values, largest",
    "activation_patching": "states, overlap",
    "activation_patching_top": "states, largest",
}
#: The metrics of the sanity checks: the last layer is random, and all layers are.
CHECKS: Final = ("sanity_last", "sanity")
#: The size of a mean correlation below which a method passes, with the whole interval.
NEAR_ZERO: Final = 0.2


def markdown_table(heads: Sequence[str], table: DataFrame, digits: int = 2, missing: str = "") -> str:
    """A table in Markdown with aligned columns: its index, and its cells, texts or numbers."""
    cells = table.map(lambda one: one if isinstance(one, str) else number(one, digits) or missing)
    rows = zip(table.index.astype(str), *(cells[name] for name in cells), strict=True)
    # A bar or a line's end in a name would end its cell.
    lines = [[" ".join(cell.split("\n")).replace("|", "\\|") for cell in line] for line in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def number(value: float, digits: int = 2) -> str:
    """A cell; empty if there is no number."""
    return "" if value != value else f"{value:.{digits}f}"


def interval_cells(rows: DataFrame, metrics: Sequence[str]) -> DataFrame:
    """The means of the last layers with their intervals as text: methods by metrics, NaN if there is none."""
    last = rows.groupby(["method", "metric"], sort=False).tail(1)
    cells = last.assign(cell=list(map(with_interval, last["mean"], last["low"], last["high"])))
    return cells.pivot(index="method", columns="metric", values="cell").reindex(
        index=rows["method"].unique(), columns=metrics
    )


def failed_lines(skipped: DataFrame, kinds: Sequence[str] = ("method", "metric")) -> Iterator[str]:
    """A line for each method or metric that has no number for some sentences, with the most frequent reason."""
    for who in kinds:
        for name, some in skipped[skipped[who].notna()].groupby(who, sort=False):
            count = some["example"].nunique()
            yield f"{name}: {count} sentences skipped, most often because: {some['skipped'].mode()[0]}"


def across_sections(tables: Mapping[str, DataFrame]) -> list[str]:
    """The report's sections on the controls, and on all models side by side, in Markdown."""
    summary, sanity, truth = (tables.get(name, pd.DataFrame()) for name in ("summary", "sanity", "truth"))
    return [
        *(_sanity(sanity) if len(sanity) else []),
        *(_truth(truth, tables.get("truth_differences"), tables.get("truth_skipped")) if len(truth) else []),
        *(_models(summary, truth) if summary["model"].nunique() > 1 else []),
    ]


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


def _truth(truth: DataFrame, differences: DataFrame | None, skipped: DataFrame | None) -> Iterator[str]:
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
        if differences is not None and model in set(differences["model"]):  # with two methods
            pairs = differences[differences["model"] == model]
            ties = pairs.groupby("metric", sort=False)["tied"].agg(["sum", "size"])
            told = "; ".join(f"{TRUTHS[str(metric)]} {row['sum']} of {row['size']}" for metric, row in ties.iterrows())
            few = f"{int(pairs['examples'].max()):,} sentences"
            yield f"Pairs that are not shown to differ ({few}): {told}. `truth_differences.csv` has all of them."
    usable = whole.groupby("model", sort=False)["examples"].max()
    counts = ", ".join(f"{model} {int(count)}" for model, count in usable.items())
    yield (
        f"Sentences with a truth: {counts}. All are of the package's grammar, where each cue has its other number. "
        "Other data may differ."
    )
    if skipped is not None:  # of one method, the reason is the same for all truths
        yield from failed_lines(skipped, ["method"])


def _models(summary: DataFrame, truth: DataFrame) -> Iterator[str]:
    """For each metric a table: the mean of each method in each model, in the last layer.

    Heads have the number of sentences, because the truths are known for fewer than the other metrics.
    """
    yield "## All models side by side"
    both = pd.concat([summary, truth], ignore_index=True)
    models = list(summary["model"].unique())
    for metric, rows in both[both["group"] == "all"].groupby("metric", sort=False):
        means = pd.concat([last_layers(of_model) for _, of_model in rows.groupby("model", sort=False)])
        table = means.pivot(index="method", columns="model", values="mean").reindex(columns=models)
        counts = rows.groupby("model")["examples"].max()
        heads = [f"{model} ({int(counts.get(model, 0)):,} sentences)" for model in models]
        yield f"{metric_title(str(metric))}:"
        yield markdown_table(["method", *heads], table.loc[rows["method"].unique()], missing="-")
