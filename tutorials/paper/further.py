"""What the paper does not have: variants of faithfulness, bounds, paradigms and labels, agreement of the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import isclass
from itertools import product
from math import nan
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from captum_vz.metrics import (
    agreement_matrix,
    compare_pairs,
    comprehensiveness_bounds,
    macro_summary,
    sufficiency_bounds,
    summarize_many,
)
from captum_vz.study import METHODS, EvaluationBatch, Example, Method, Metric, Scorer, Study, lacks, metric_named

if TYPE_CHECKING:
    from pandas import DataFrame

#: Metrics that remove many sets of tokens are computed for at most so many sentences, evenly spaced.
MOST_SENTENCES: Final = 400
#: The metrics by paradigm and label.
GROUPED: Final = ("cue_dot", "cue_ap", "blank_out")
#: All ways to blank out tokens, and to read their effects, by the names of their metrics.
VARIANTS: Final = tuple(
    "".join(["blank_out", *parts]) for parts in product(("", ":mask", ":delete"), ("", ":vocabulary"), ("", ":size"))
)
#: What removes tokens, by deletion, and the heads of its columns.
REMOVING: Final = {
    "comprehensiveness:delete": "compr.",
    "comprehensiveness_normalized:delete": "compr., 0 to 1",
    "sufficiency:delete": "suff.",
    "sufficiency_normalized:delete": "suff., 0 to 1",
    "deletion_normalized:delete": "deletion area, 0 to 1",
    "monotonicity:delete": "monotone",
    "infidelity:delete": "infidelity",
}
_BOUNDS: Final = {"comprehensiveness:delete": comprehensiveness_bounds, "sufficiency:delete": sufficiency_bounds}
_SUMMARY: Final = ["mean", "low", "high", "examples", "undefined"]


def further_tables(
    source: tuple[Any, Any],
    study: Study,
    examples: Sequence[Example],
    given: Mapping[str, Method],
    predicts: bool,
    batch_size: int,
    resamples: int,
) -> dict[str, DataFrame]:
    """The further tables of one model, of the last layers of a finished study, whose scores are read.

    - ``variants``: Spearman's correlation with blank-out in each variant, and the ``rank``: one more than the number of
      methods that are higher, sentence by sentence (:func:`~captum_vz.metrics.compare_pairs`).
    - ``removing``: metrics that remove many sets of tokens, with the "best order" and the "worst order".
    - ``groups``: means ``by`` "paradigm" or "label". A ``group`` is one of them, "all" (pooled), or "macro" (the mean
      of the means, without a rank; NaN for a method without a value in one of them).
    - ``agreement``: Spearman's correlation of the rows of two methods, ``one`` and ``other``.

    No method runs again: the study keeps the scores, and the new metrics. `examples` are all its examples, and `given`
    the methods that this call passes.
    """
    metrics = [metric for metric in GROUPED if metric in study.settings["metrics"]]
    columns = ["model", "example", "group", "label", "method", "layer", "target", "cue", "content", "tokens", "scores"]
    rows = study.rows([*columns, *metrics]).groupby(["method", "example"], sort=False).tail(1).reset_index(drop=True)
    methods = [method for method in study.settings["methods"] if method in set(rows["method"])]
    found = {"agreement": _agreement(rows, methods, resamples), "groups": groups_of(rows, metrics, resamples)}
    if not predicts:
        return found

    def kept(table: str, metrics: Any, some: DataFrame) -> DataFrame:
        """Metrics of stored rows of scores, which the study keeps."""

        def made(model: Any, tokenizer: Any) -> DataFrame:
            records = some.to_dict("records")
            for row in records:
                row |= {name: list(row[name]) for name in ("cue", "content", "scores")} | {"skipped": None}
            Scorer(model, tokenizer, metrics=metrics, batch_size=batch_size).measure(examples, records)
            return pd.DataFrame(records, columns=["example", "method", *metrics])

        made_of = [study.settings["methods"], rows[["method", "example"]].to_numpy().tolist(), list(metrics)]
        return study.keep(table, source, made_of, made)

    def of_methods(values: DataFrame, metrics: Sequence[str], column: str) -> DataFrame:
        of = dict(list(values.groupby("method", sort=False)))
        named = [({"method": one, column: metric}, of[one][metric]) for one in methods for metric in metrics]
        return _summaries(named, resamples)

    variants = [name for name in VARIANTS if lacks(metric_named(name), *source) is None]
    values = kept("variants", variants, rows)
    ranks = {name: _ranks(values, name, resamples) for name in variants}
    table = of_methods(values, variants, "variant")
    found["variants"] = table.assign(
        rank=[ranks[row.variant].get(row.method, nan) for row in table.itertuples()],
        sees_forms=[sees_forms(method, given.get(method)) for method in table["method"]],
    )
    removing: dict[str, Metric] = {name: metric_named(name) for name in REMOVING}
    ends = list(product(_BOUNDS, ("best", "worst")))
    for what, end in ends:
        removing[f"{what} {end}"] = Metric(what, partial(_bound, _BOUNDS[what], end), needs_forms=True)
    values = kept("removing", removing, rows[rows["example"].isin(evenly([one.id for one in examples]))])
    once = values.drop_duplicates("example")
    bounds = [({"method": f"{end} order", "metric": what}, once[f"{what} {end}"]) for what, end in ends]
    both = [of_methods(values, list(REMOVING), "metric"), _summaries(bounds, resamples)]
    return found | {"removing": pd.concat(both, ignore_index=True)}


def sees_forms(name: str, method: Method | None) -> str:
    """Whether a method is given the two forms of the target: "yes", "no", "can" (own code that may read them).

    A method from an earlier call is None here; "unknown": its name is not registered.
    """
    method = METHODS.get(name) if method is None else method
    if method is None or method.explains_output:
        return "unknown" if method is None else "yes"
    # A class or an object gets the forms only if its `attribute` takes them. Functions get the whole batch.
    given = not method.own or isclass(method.source) or hasattr(method.source, "attribute")
    return "no" if given else "can"


def evenly(items: Sequence[str], most: int = MOST_SENTENCES) -> list[str]:
    """At most so many of the items, evenly spaced.

    >>> evenly(["a", "b", "c", "d"], 2)
    ['a', 'c']
    """
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def _bound(bounds: Any, end: str, batch: EvaluationBatch, rows: Tensor) -> Tensor:
    limit: Tensor = getattr(batch.bounds(bounds, "delete"), end)
    return limit.expand(len(rows), -1)


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values.to_numpy(dtype="float64"))


def _summaries(named: Sequence[tuple[dict[str, str], Any]], resamples: int) -> DataFrame:
    """Means, intervals and counts of values for each example, and of lists of values by the mean of their means."""
    pooled = [_tensor(values) for _, values in named if not isinstance(values, list)]
    each = iter(summarize_many(pooled, resamples=resamples))
    found = [
        macro_summary([_tensor(one) for one in values], resamples=resamples) if isinstance(values, list) else next(each)
        for _, values in named
    ]
    rows = [where | one._asdict() for (where, _), one in zip(named, found, strict=True)]
    return pd.DataFrame(rows, columns=[*(named[0][0] if named else ()), *_SUMMARY])


def _ranks(values: DataFrame, metric: str, resamples: int) -> dict[str, int]:
    """For each method one more than the number of methods whose values are higher; empty if none is shown to be."""
    table = values.pivot(index="example", columns="method", values=metric).dropna(axis=1, how="all")
    ranks = dict.fromkeys(map(str, table), 1)
    pairs = compare_pairs({str(method): _tensor(table[method]) for method in table}, resamples=resamples)
    differing = [pair for pair in pairs if not pair.tied]
    for pair in differing:
        ranks[pair.other if pair.mean > 0 else pair.one] += 1
    return ranks if differing else {}


def groups_of(rows: DataFrame, metrics: Sequence[str], resamples: int) -> DataFrame:
    """Means by paradigm and by label, pooled, and the mean of the means, over the same groups for all methods."""
    named: list[tuple[dict[str, Any], Any]] = []
    ranks: dict[tuple[str, ...], int] = {}
    for (by, column), metric in product((("paradigm", "group"), ("label", "label")), metrics):
        keys = sorted(rows[column].dropna().unique())
        if len(keys) < 2:
            continue
        of_key = {str(key): rows[rows[column] == key] for key in keys} | {"all": rows}
        for key, some in of_key.items():
            found = _ranks(some, metric, resamples).items()
            ranks |= {(method, metric, by, key): rank for method, rank in found}
        for method in rows["method"].unique():
            parts = {key: some.loc[some["method"] == method, metric] for key, some in of_key.items()}
            # Without a value in one of the groups, there is no mean of the means: see macro_summary.
            every = parts | {"macro": [part for key, part in parts.items() if key != "all"]}
            for key, part in every.items():
                named.append(({"method": method, "metric": metric, "by": by, "group": key}, part))
    table = _summaries(named, resamples)
    keyed = zip(*(table[name] for name in ("method", "metric", "by", "group") if name in table), strict=True)
    return table.assign(rank=pd.Series([ranks.get(key, nan) for key in keyed], dtype="float64"))


def _agreement(rows: DataFrame, methods: Sequence[str], resamples: int) -> DataFrame:
    """The rank correlations of all pairs of methods, over content tokens of the sentences that all could explain."""
    table = rows.pivot(index="example", columns="method", values="scores")[list(methods)].dropna()
    pairs: list[Any] = []
    if len(table) and len(methods) > 1:
        padded = {
            method: pad_sequence([torch.tensor(one, dtype=torch.float64) for one in table[method]], batch_first=True)
            for method in methods
        }
        keep = torch.zeros_like(padded[methods[0]], dtype=torch.bool)
        content = rows.drop_duplicates("example").set_index("example")["content"].loc[table.index]
        for place, positions in enumerate(content):
            keep[place, list(positions)] = True
        pairs = agreement_matrix(padded, keep, resamples=resamples)
    return pd.DataFrame([pair._asdict() for pair in pairs], columns=["one", "other", *_SUMMARY])
