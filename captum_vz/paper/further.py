"""What the paper does not have: variants of faithfulness, bounds, paradigms and labels, agreement of the methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from inspect import isclass
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import torch
from torch import Tensor

from captum_vz.metrics import (
    Difference,
    agreement_matrix,
    compare_pairs,
    comprehensiveness_bounds,
    macro_summary,
    sufficiency_bounds,
    summarize_many,
)
from captum_vz.study import (
    METHODS,
    EvaluationBatch,
    Example,
    Method,
    Metric,
    Scorer,
    Study,
    lacks,
    metric_named,
)

if TYPE_CHECKING:
    from pandas import DataFrame

#: Metrics that remove many sets of tokens are computed for at most so many sentences.
MOST_SENTENCES: Final = 400

#: The metrics by paradigm and label.
GROUPED: Final = ("cue_dot", "cue_ap", "blank_out")

#: What removes tokens, on some of the sentences, by deletion.
REMOVING: Final = (
    "comprehensiveness:delete",
    "comprehensiveness_normalized:delete",
    "sufficiency:delete",
    "sufficiency_normalized:delete",
    "deletion_normalized:delete",
    "monotonicity:delete",
    "infidelity:delete",
)
_BOUNDS: Final = {"comprehensiveness:delete": comprehensiveness_bounds, "sufficiency:delete": sufficiency_bounds}

_SUMMARY: Final = ["mean", "low", "high", "examples", "undefined"]


#: All ways to blank out tokens, and to read their effects, by the names of their metrics.
VARIANTS: Final = tuple(
    f"blank_out{removal}{over}{size}"
    for removal in ("", ":mask", ":delete")
    for over in ("", ":vocabulary")
    for size in ("", ":size")
)


def _empty(*columns: str) -> Callable[[], DataFrame]:
    return lambda: pd.DataFrame(columns=["model", *columns])


@dataclass(frozen=True)
class Further:
    """Tables beyond the paper's evaluations, of the last layer of each method.

    Attributes:
        variants: Spearman's correlation with blank-out in each variant: ``model``, ``method``, ``variant`` (the name of
            a metric), ``mean``, its interval, the numbers of ``examples`` and ``undefined`` ones, and the ``rank``: one
            more than the number of methods that are higher, sentence by sentence
            (:func:`~captum_vz.metrics.compare_pairs`). Methods that do not differ are not told apart. ``sees_forms``:
            see :func:`sees_forms`.
        removing: The same for metrics that remove many sets of tokens, with ``metric`` in the place of ``variant`` and
            without ranks. The methods "best order" and "worst order" are the bounds.
        groups: As `variants`, with ``metric``, ``by`` ("paradigm" or "label"), and ``group``: one of them, "all" (the
            pooled mean) or "macro" (the mean of the means, without a rank; NaN for a method without a value in one of
            them).
        agreement: Spearman's correlation of the rows of two methods, ``one`` and ``other``.
    """

    variants: DataFrame = field(default_factory=_empty("method", "variant", *_SUMMARY, "rank", "sees_forms"))
    removing: DataFrame = field(default_factory=_empty("method", "metric", *_SUMMARY))
    groups: DataFrame = field(default_factory=_empty("method", "metric", "by", "group", *_SUMMARY, "rank"))
    agreement: DataFrame = field(default_factory=_empty("one", "other", *_SUMMARY))

    @classmethod
    def joined(cls, parts: Sequence[Further]) -> Further:
        """The tables of several models as one."""
        found: dict[str, DataFrame] = {}
        for one in fields(cls):
            tables = [table for part in parts if len(table := getattr(part, one.name))]
            if tables:
                found[one.name] = pd.concat(tables, ignore_index=True)
        return cls(**found)

    def tables(self) -> dict[str, DataFrame]:
        """All tables by their names."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def further_tables(
    name: str,
    source: tuple[Any, Any],
    study: Study,
    examples: Sequence[Example],
    given: Mapping[str, Method],
    *,
    predicts: bool,
    batch_size: int = 32,
    confidence: float = 0.95,
    resamples: int = 1999,
) -> Further:
    """The further tables of one model, from the rows of scores of its finished study.

    Args:
        name: The name of the model.
        source: The model and its tokenizer.
        study: The study, whose scores are read. No method runs again. It keeps the new metrics.
        examples: All its examples.
        given: The methods that this call passes. The study may hold more.
        predicts: Whether the model predicts words, so that tokens can be blanked out.
        batch_size: The number of sentences in a batch.
        confidence: The confidence level of the intervals.
        resamples: The number of bootstrap resamples of the examples.
    """
    rows = _last_layers(study)
    methods = [method for method in study.settings["methods"] if method in set(rows["method"])]
    of = partial(summarize_many, confidence=confidence, resamples=resamples)
    macro = partial(macro_summary, confidence=confidence, resamples=resamples)
    pairs = partial(compare_pairs, confidence=confidence, resamples=resamples)
    found = {"agreement": _agreement(rows, methods, confidence, resamples), "groups": _groups(rows, of, macro, pairs)}
    if predicts:
        made_of = [study.settings["methods"], rows[["method", "example"]].to_numpy().tolist()]

        def kept(table: str, metrics: Any, some: DataFrame) -> DataFrame:
            def made(model: Any, tokenizer: Any) -> DataFrame:
                scorer = Scorer(model, tokenizer, metrics=metrics, batch_size=batch_size)
                return _measured(scorer, some, examples)

            return study.keep(table, source, [*made_of, list(metrics)], made)

        variants = [name for name in VARIANTS if lacks(metric_named(name), *source) is None]
        values = kept("variants", variants, rows)
        ranks = {name: _ranks(values, name, pairs) for name in variants}
        table = _long(values, methods, variants, "variant", of)
        found["variants"] = table.assign(
            rank=[ranks[row.variant].get(row.method) for row in table.itertuples()],
            sees_forms=[sees_forms(method, given.get(method)) for method in table["method"]],
        )
        chosen = set(evenly([example.id for example in examples], MOST_SENTENCES))
        few = rows[rows["example"].isin(chosen)]
        metrics = {metric: metric_named(metric) for metric in REMOVING}
        for what, bounds in _BOUNDS.items():
            for end in ("best", "worst"):
                metrics[f"{what} {end}"] = Metric(what, partial(_bound, bounds, end), needs_forms=True)
        found["removing"] = _with_bounds(kept("removing", metrics, few), methods, of)
    return Further(**{key: table.assign(model=name)[["model", *table.columns]] for key, table in found.items()})


def sees_forms(name: str, method: Method | None) -> str:
    """Whether a method is given the two forms of the target: "yes", "no", "can" (own code that may read them).

    Args:
        name: Its name.
        method: The method. None: it is in the study from an earlier call. If its name is not registered: "unknown".
    """
    registered = METHODS.get(name)
    method = registered if method is None else method
    if method is None:
        return "unknown"
    if method.explains_output:
        return "yes"
    of_package = not method.own and (registered is not None or any(method is one for one in METHODS.values()))
    # A class or an object gets the forms only if its `attribute` takes them. Functions get the whole batch.
    return "no" if of_package or isclass(method.source) or hasattr(method.source, "attribute") else "can"


def evenly(items: Sequence[str], most: int) -> list[str]:
    """At most so many of the items, evenly spaced.

    >>> evenly(["a", "b", "c", "d"], 2)
    ['a', 'c']
    """
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def _last_layers(study: Study) -> DataFrame:
    """The rows of the last layer of each method, or its only row."""
    wanted = ["model", "example", "group", "label", "method", "layer", "target", "cue", "content", "tokens", "scores"]
    metrics = [metric for metric in GROUPED if metric in study.settings["metrics"]]
    rows = study.rows([*wanted, *metrics])
    return rows.groupby(["method", "example"], sort=False).tail(1).reset_index(drop=True)


def _measured(scorer: Scorer, rows: DataFrame, examples: Sequence[Example]) -> DataFrame:
    """Metrics of stored rows of scores."""
    records = rows.to_dict("records")
    for row in records:
        row |= {name: list(row[name]) for name in ("cue", "content", "scores")} | {"skipped": None}
    scorer.measure(examples, records)
    return pd.DataFrame(records, columns=["example", "method", *scorer.metrics])


def _bound(bounds: Any, end: str, batch: EvaluationBatch, rows: Tensor) -> Tensor:
    limit: Tensor = getattr(batch.bounds(bounds, "delete"), end)
    return limit.expand(len(rows), -1)


def _entries(named: Sequence[tuple[dict[str, str], Any]], of: Any, macro: Any = None) -> list[dict[str, Any]]:
    """Means, intervals and counts of values for each example, and of lists of values by the mean of their means."""
    pooled = iter(of([values for _, values in named if isinstance(values, Tensor)]))
    entries = []
    for where, values in named:
        found = (next(pooled) if isinstance(values, Tensor) else macro(values))._asdict()
        entries.append(where | {name: found[name] for name in _SUMMARY})
    return entries


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values.to_numpy(dtype="float64"))


def _long(values: DataFrame, methods: Sequence[str], metrics: Sequence[str], column: str, of: Any) -> DataFrame:
    by_method = dict(list(values.groupby("method", sort=False)))
    named = [
        ({"method": method, column: metric}, _tensor(by_method[method][metric]))
        for method in methods
        for metric in metrics
    ]
    return pd.DataFrame(_entries(named, of))


def _with_bounds(values: DataFrame, methods: Sequence[str], of: Any) -> DataFrame:
    """The metrics of all methods, and rows for the best and the worst order."""
    table = _long(values, methods, REMOVING, "metric", of)
    once = values.drop_duplicates("example")
    bounds = [
        ({"method": f"{end} order", "metric": what}, _tensor(once[f"{what} {end}"]))
        for what in _BOUNDS
        for end in ("best", "worst")
    ]
    return pd.concat([table, pd.DataFrame(_entries(bounds, of))], ignore_index=True)


def _ranks(values: DataFrame, metric: str, pairs: Callable[[Any], list[Difference]]) -> dict[str, int]:
    """For each method one more than the number of methods whose values are higher; empty if none is shown to be."""
    table = values.pivot(index="example", columns="method", values=metric).dropna(axis=1, how="all")
    ranks = dict.fromkeys(map(str, table), 1)
    differing = [pair for pair in pairs({str(method): _tensor(table[method]) for method in table}) if not pair.tied]
    for pair in differing:
        ranks[pair.other if pair.mean > 0 else pair.one] += 1
    return ranks if differing else {}


def _groups(rows: DataFrame, of: Any, macro: Any, pairs: Any) -> DataFrame:
    """Means by paradigm and by label, pooled, and the mean of the means, over the same groups for all methods."""
    named: list[tuple[dict[str, str], Any]] = []
    keys = {column: sorted(rows[column].dropna().unique()) for column in ("group", "label")}
    for metric in (metric for metric in GROUPED if metric in rows):
        for method, some in rows.groupby("method", sort=False):
            for by, column in (("paradigm", "group"), ("label", "label")):
                if len(keys[column]) < 2:
                    continue
                # Without a value in one of the groups, there is no mean of the means: see macro_summary.
                parts = {str(key): _tensor(some.loc[some[column] == key, metric]) for key in keys[column]}
                where = {"method": method, "metric": metric, "by": by}
                named += [(where | {"group": key}, part) for key, part in parts.items()]
                named.append((where | {"group": "all"}, _tensor(some[metric])))
                named.append((where | {"group": "macro"}, list(parts.values())))
    keyed = ["metric", "by", "group", "method"]
    table = pd.DataFrame(_entries(named, of, macro), columns=["method", *keyed[:-1], *_SUMMARY])
    ranks: dict[tuple[str, ...], int] = {}
    for metric, by, group in table[keyed[:-1]].drop_duplicates().itertuples(index=False):
        column = {"paradigm": "group", "label": "label"}[by]
        some = rows if group == "all" else rows[rows[column].astype(str) == group]
        if group != "macro":
            ranks |= {(metric, by, group, method): rank for method, rank in _ranks(some, metric, pairs).items()}
    return table.assign(rank=[ranks.get(key) for key in table[keyed].itertuples(index=False, name=None)])


def _agreement(rows: DataFrame, methods: Sequence[str], confidence: float, resamples: int) -> DataFrame:
    """The rank correlations of all pairs of methods, over content tokens of the sentences that all could explain."""
    table = rows.pivot(index="example", columns="method", values="scores")[list(methods)].dropna()
    content = rows.drop_duplicates("example").set_index("example")["content"].loc[table.index]
    longest = max((len(scores) for scores in table[methods[0]]), default=0)
    keep = torch.zeros(len(table), longest, dtype=torch.bool)
    for place, positions in enumerate(content):
        keep[place, list(positions)] = True
    padded: Mapping[str, Tensor] = {
        method: torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(scores, dtype=torch.float64) for scores in table[method]], batch_first=True
        )
        for method in methods
        if len(table)
    }
    pairs = agreement_matrix(padded, keep, confidence, resamples) if len(padded) > 1 else []
    return pd.DataFrame([pair._asdict() for pair in pairs], columns=["one", "other", *_SUMMARY])
