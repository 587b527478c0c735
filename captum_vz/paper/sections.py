"""The report's sections on what the paper does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import factorial
from typing import TYPE_CHECKING, Final

from matplotlib.figure import Figure

from captum_vz.paper.drawings import draw_agreement, draw_groups, draw_variants, group_columns, group_title
from captum_vz.paper.further import VARIANTS, Further
from captum_vz.study import metric_named, with_interval

if TYPE_CHECKING:
    from pandas import DataFrame

#: The columns of the table of metrics that remove tokens.
_REMOVING: Final = {
    "comprehensiveness:delete": "compr.",
    "comprehensiveness_normalized:delete": "compr., 0 to 1",
    "sufficiency:delete": "suff.",
    "sufficiency_normalized:delete": "suff., 0 to 1",
    "deletion_normalized:delete": "deletion area, 0 to 1",
    "monotonicity:delete": "monotone",
    "infidelity:delete": "infidelity",
}


def variant_title(name: str) -> str:
    """A way to blank out tokens in words.

    >>> variant_title("blank_out"), variant_title("blank_out:delete:vocabulary:size")
    ('UNK, forms', 'deletion, vocabulary, size')
    """
    words = name.split(":")[1:]
    removal = "deletion" if "delete" in words else "MASK" if "mask" in words else "UNK"
    over = "vocabulary" if "vocabulary" in words else "forms"
    return ", ".join([removal, over, *(["size"] if "size" in words else [])])


def further_figures(further: Further, data: str = "") -> dict[str, Callable[[], Figure]]:
    """The figures of the further tables, by their names. A mean that is undefined in all sentences is not drawn."""
    figures: dict[str, Callable[[], Figure]] = {}
    variants, groups, agreement = (
        one.dropna(subset="mean") for one in (further.variants, further.groups, further.agreement)
    )
    if len(variants):
        figures["variants"] = partial(draw_variants, variants, {name: variant_title(name) for name in VARIANTS}, data)
    for metric in groups["metric"].unique():
        figures[f"groups-{metric}"] = partial(draw_groups, groups, metric, data)
    if len(agreement):
        figures["agreement"] = partial(draw_agreement, agreement, data)
    return figures


def further_sections(further: Further, model: str) -> list[str]:
    """The further sections of one model's report, in Markdown."""
    variants, removing, groups, agreement = (table[table["model"] == model] for table in further.tables().values())
    found = []
    if len(variants):
        found += [*_variants(variants)]
    if len(removing):
        found += [*_removing(removing)]
    if len(groups):
        found += [*_groups(groups)]
    if len(agreement):
        found += [*_agreement(agreement)]
    return found


def probing_section(probing: DataFrame, correlation: DataFrame) -> list[str]:
    """Compression with its range over seeds, the control, the linear probe, and what the correlation can show."""
    if probing.empty:
        return []
    lines = [
        [
            str(row.layer),
            f"{with_interval(row.compression, row.low, row.high)}",
            f"{row.lowest:.2f} to {row.highest:.2f}",
            f"{row.control:.2f} ({row.control_lowest:.2f} to {row.control_highest:.2f})",
            with_interval(row.accuracy, row.accuracy_low, row.accuracy_high),
        ]
        for row in probing.sort_values("layer").itertuples()
    ]
    heads = ["layer", "compression", "over seeds", "shuffled labels", "linear probe, accuracy"]
    text = (
        f"Probes of {probing['seeds'].max()} seeds, {probing['examples'].max()} sentences. Brackets hold intervals "
        "over sentences, the ranges are over seeds. Shuffled labels are the control: what a probe compresses without "
        "any information."
    )
    found = ["### Probing", text, markdown_table(heads, lines)]
    if len(correlation):
        layers, smallest = int(correlation["layers"].max()), correlation["p"].min()
        many = len(correlation)
        found.append(
            f"The correlation of cue alignment with compression is over {layers} layers. Its one-sided p counts the "
            f"orders of the layers, so the smallest that {layers} layers can have is 1/{factorial(layers)}. The "
            f"smallest here is {smallest:.3f}, and {min(1.0, many * smallest):.3f} after Holm's correction for {many} "
            "methods."
        )
    return found


def _variants(rows: DataFrame) -> list[str]:
    """The means of all variants, and what decides which method has the highest."""
    means = rows.pivot(index="method", columns="variant", values="mean")
    shown = [name for name in VARIANTS if name in means]
    methods = list(rows["method"].unique())
    sees = rows.set_index("method")["sees_forms"].replace("no", "").to_dict()
    table = markdown_table(
        ["method", "sees the forms", *map(variant_title, shown)],
        [[method, sees[method], *(_number(means.loc[method, name]) for name in shown)] for method in methods],
    )
    winners = set(rows[rows["rank"] == 1]["method"])
    if not winners:  # no sentence has values
        return ["### Faithfulness in its variants: Spearman with blank-out", table]
    ranks = rows.pivot(index="method", columns="variant", values="rank")
    widest = (ranks.max(axis=1) - ranks.min(axis=1)).idxmax()
    low, high = int(ranks.loc[widest].min()), int(ranks.loc[widest].max())
    text = (
        f"{int(rows['examples'].max())} sentences. A token is replaced by UNK or MASK, or deleted. The probability is "
        "over the two forms of the target or over the vocabulary. The effects keep their sign, or only their size "
        "counts. Intervals are in `variants.csv`, ranks in `variants.png`. A rank is one more than the number of "
        "methods that are higher, sentence by sentence, as in the paired comparisons. Methods that see the forms are "
        "given what the columns 'forms' measure: compare them with each other, or in the columns 'vocabulary'."
    )
    result = (
        f"No method is higher, in one variant or more: {', '.join(sorted(map(str, winners)))}. "
        f"{widest} has the ranks {low} to {high}."
    )
    return ["### Faithfulness in its variants: Spearman with blank-out", text, table, result]


def _removing(rows: DataFrame) -> list[str]:
    """Metrics that remove many tokens, with the best and the worst order."""
    means = rows.pivot(index="method", columns="metric", values="mean")
    intervals = rows.assign(width=(rows["high"] - rows["low"]) / 2).groupby("metric")["width"].max()
    methods = [*(name for name in rows["method"].unique() if not name.endswith(" order")), "best order", "worst order"]
    table = markdown_table(
        ["method", *_REMOVING.values()],
        [[method, *(_number(means.loc[method, name], 3) for name in _REMOVING)] for method in methods],
    )
    known = {name: width for name, width in intervals.items() if width == width}  # one sentence has no interval
    widest = ", ".join(f"{title} ±{known[name]:.3f}" for name, title in _REMOVING.items() if name in known)
    text = (
        f"{int(rows['examples'].max())} sentences, evenly spaced; tokens are deleted. Sufficiency and infidelity are "
        "better if lower, all other columns if higher. On the scale from 0 to 1, 0 is the worst order of the tokens "
        "and 1 the best: exact for up to 8 content tokens, by greedy search beyond. Monotonicity is 1 for an order "
        "without a single exception. Infidelity asks for additive scores, the others for their order only."
        + (f" The widest intervals: {widest}." if widest else "")
    )
    return ["### Removing the best tokens", text, table]


def _groups(rows: DataFrame) -> list[str]:
    """For each metric the means by paradigm and label, with ranks."""
    parts = [
        "### By paradigm and by label",
        "Means, and in parentheses the rank: one more than the number of methods that are higher, sentence by "
        "sentence, as in the paired comparisons. *mean of N paradigms* counts each the same, and has no ranks. A "
        "method without values in one of them has none. Paradigms that no method could explain have no column and do "
        "not count. Intervals are in `groups.csv`.",
    ]
    for metric, some in rows.groupby("metric", sort=False):
        columns = group_columns(some)
        means = some.pivot(index="method", columns=["by", "group"], values="mean")[columns]
        ranks = some.pivot(index="method", columns=["by", "group"], values="rank")[columns]
        sizes = some.groupby(["by", "group"])["examples"].max()
        heads = [f"{group_title(group, columns)} ({sizes[by, group]})" for by, group in columns]
        lines = [
            [
                str(method),
                *(
                    "-" if mean != mean else f"{mean:.2f}" if rank != rank else f"{mean:.2f} ({int(rank)})"
                    for mean, rank in zip(means.loc[method], ranks.loc[method], strict=True)
                ),
            ]
            for method in some["method"].unique()
        ]
        parts += [f"{metric_named(str(metric)).title}:", markdown_table(["method", *heads], lines)]
    return parts


def _agreement(rows: DataFrame) -> list[str]:
    """The pairs of methods that agree most and least."""
    ordered = rows.dropna(subset="mean").sort_values("mean", ascending=False)
    if ordered.empty:
        return []
    told = []
    for name, some in (("most", ordered.head(3)), ("least", ordered.tail(3))):
        pairs = (f"{row.one} and {row.other} {with_interval(row.mean, row.low, row.high)}" for row in some.itertuples())
        told.append(f"- {name}: {', '.join(pairs)}")
    text = (
        f"Spearman's correlation of two methods' rows over content tokens, {int(rows['examples'].max())} sentences. "
        "All pairs are in `agreement.csv` and `agreement.png`. That methods agree does not say that they are right."
    )
    return ["### Do the methods agree?", text, "\n".join(told)]


def failed_lines(skipped: DataFrame) -> list[str]:
    """A line for each method or metric that has no number for some sentences, with the most frequent reason.

    Args:
        skipped: As :attr:`Study.skipped <captum_vz.study.Study.skipped>` has it.
    """
    lines = []
    for who in ("method", "metric"):
        for name, some in skipped[skipped[who].notna()].groupby(who, sort=False):
            count = some["example"].nunique()
            lines.append(f"{name}: {count} sentences skipped, most often because: {some['skipped'].mode()[0]}")
    return lines


def _number(value: float, digits: int = 2) -> str:
    return "" if value != value else f"{value:.{digits}f}"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with aligned columns."""
    # A bar or a line's end in a name would end its cell.
    lines = [[" ".join(cell.split("\n")).replace("|", "\\|") for cell in line] for line in (heads, *rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
