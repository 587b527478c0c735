"""What the paper does not have: variants of faithfulness, bounds, paradigms and labels, agreement of the methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import isclass
from math import nan
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
    f"blank_out{removal}{over}{size}"
    for removal in ("", ":mask", ":delete")
    for over in ("", ":vocabulary")
    for size in ("", ":size")
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


class Sampling(NamedTuple):
    """How intervals over sentences are computed."""

    confidence: float = 0.95
    resamples: int = 1999


def further_tables(
    source: tuple[Any, Any],
    study: Study,
    examples: Sequence[Example],
    given: Mapping[str, Method],
    predicts: bool,
    batch_size: int,
    sampling: Sampling,
) -> dict[str, DataFrame]:
    """The further tables of one model, of the last layers of a finished study, whose scores are read.

    - ``variants``: Spearman's correlation with blank-out in each variant, and the ``rank``: one more than the number of
      methods that are higher, sentence by sentence (:func:`~captum_vz.metrics.compare_pairs`).
    - ``removing``: metrics that remove many sets of tokens, with the "best order" and the "worst order".
    - ``groups``: means ``by`` "paradigm" or "label". A ``group`` is one of them, "all" (pooled), or "macro" (the mean
      of the means, without a rank; NaN for a method without a value in one of them).
    - ``agreement``: Spearman's correlation of the rows of two methods, ``one`` and ``other``.

    Args:
        source: The model and its tokenizer.
        study: The study. No method runs again. It keeps the new metrics.
        examples: All its examples.
        given: The methods that this call passes. The study may hold more.
        predicts: Whether the model predicts words, so that tokens can be blanked out.
        batch_size: The number of sentences in a batch.
        sampling: How intervals are computed.
    """
    metrics = [metric for metric in GROUPED if metric in study.settings["metrics"]]
    columns = ["model", "example", "group", "label", "method", "layer", "target", "cue", "content", "tokens", "scores"]
    rows = study.rows([*columns, *metrics]).groupby(["method", "example"], sort=False).tail(1).reset_index(drop=True)
    methods = [method for method in study.settings["methods"] if method in set(rows["method"])]
    found = {"agreement": _agreement(rows, methods, sampling), "groups": _groups(rows, metrics, sampling)}
    if not predicts:
        return found
    made_of = [study.settings["methods"], rows[["method", "example"]].to_numpy().tolist()]

    def kept(table: str, metrics: Any, some: DataFrame) -> DataFrame:
        def made(model: Any, tokenizer: Any) -> DataFrame:
            return _measured(Scorer(model, tokenizer, metrics=metrics, batch_size=batch_size), some, examples)

        return study.keep(table, source, [*made_of, list(metrics)], made)

    variants = [name for name in VARIANTS if lacks(metric_named(name), *source) is None]
    values = kept("variants", variants, rows)
    ranks = {name: _ranks(values, name, sampling) for name in variants}
    table = _long(values, methods, variants, "variant", sampling)
    found["variants"] = table.assign(
        rank=[ranks[row.variant].get(row.method, nan) for row in table.itertuples()],
        sees_forms=[sees_forms(method, given.get(method)) for method in table["method"]],
    )
    removing: dict[str, Metric] = {name: metric_named(name) for name in REMOVING}
    ends = [(what, end) for what in _BOUNDS for end in ("best", "worst")]
    for what, end in ends:
        removing[f"{what} {end}"] = Metric(what, partial(_bound, _BOUNDS[what], end), needs_forms=True)
    values = kept("removing", removing, rows[rows["example"].isin(evenly([one.id for one in examples]))])
    once = values.drop_duplicates("example")
    bounds = [({"method": f"{end} order", "metric": what}, _tensor(once[f"{what} {end}"])) for what, end in ends]
    both = [_long(values, methods, list(REMOVING), "metric", sampling), pd.DataFrame(_entries(bounds, sampling))]
    return found | {"removing": pd.concat(both, ignore_index=True)}


def sees_forms(name: str, method: Method | None) -> str:
    """Whether a method is given the two forms of the target: "yes", "no", "can" (own code that may read them).

    Args:
        name: Its name.
        method: The method. None: it is in the study from an earlier call. If its name is not registered: "unknown".
    """
    method = METHODS.get(name) if method is None else method
    if method is None:
        return "unknown"
    if method.explains_output:
        return "yes"
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


def _entries(named: Sequence[tuple[dict[str, str], Any]], sampling: Sampling) -> list[dict[str, Any]]:
    """Means, intervals and counts of values for each example, and of lists of values by the mean of their means."""
    pooled = iter(summarize_many([values for _, values in named if isinstance(values, Tensor)], *sampling))
    entries = []
    for where, values in named:
        found = (next(pooled) if isinstance(values, Tensor) else macro_summary(values, *sampling))._asdict()
        entries.append(where | {name: found[name] for name in _SUMMARY})
    return entries


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values.to_numpy(dtype="float64"))


def _long(values: DataFrame, methods: Sequence[str], metrics: Sequence[str], column: str, how: Sampling) -> DataFrame:
    of = dict(list(values.groupby("method", sort=False)))
    named = [({"method": one, column: metric}, _tensor(of[one][metric])) for one in methods for metric in metrics]
    return pd.DataFrame(_entries(named, how))


def _ranks(values: DataFrame, metric: str, sampling: Sampling) -> dict[str, int]:
    """For each method one more than the number of methods whose values are higher; empty if none is shown to be."""
    table = values.pivot(index="example", columns="method", values=metric).dropna(axis=1, how="all")
    ranks = dict.fromkeys(map(str, table), 1)
    pairs = compare_pairs({str(method): _tensor(table[method]) for method in table}, *sampling)
    differing = [pair for pair in pairs if not pair.tied]
    for pair in differing:
        ranks[pair.other if pair.mean > 0 else pair.one] += 1
    return ranks if differing else {}


def _groups(rows: DataFrame, metrics: Sequence[str], sampling: Sampling) -> DataFrame:
    """Means by paradigm and by label, pooled, and the mean of the means, over the same groups for all methods."""
    named: list[tuple[dict[str, Any], Any]] = []
    ranks: dict[tuple[str, ...], int] = {}
    for by, column in (("paradigm", "group"), ("label", "label")):
        keys = [str(key) for key in sorted(rows[column].dropna().unique())]
        if len(keys) < 2:
            continue
        of_key = {key: rows[rows[column].astype(str) == key] for key in keys} | {"all": rows}
        for metric in metrics:
            for method, some in rows.groupby("method", sort=False):
                where = {"method": method, "metric": metric, "by": by}
                # Without a value in one of the groups, there is no mean of the means: see macro_summary.
                parts = {key: _tensor(some.loc[some[column].astype(str) == key, metric]) for key in keys}
                named += [(where | {"group": key}, part) for key, part in parts.items()]
                named += [(where | {"group": "all"}, _tensor(some[metric]))]
                named += [(where | {"group": "macro"}, list(parts.values()))]
            for key, some in of_key.items():
                found = _ranks(some, metric, sampling).items()
                ranks |= {(metric, by, key, method): rank for method, rank in found}
    keyed = ["metric", "by", "group", "method"]
    table = pd.DataFrame(_entries(named, sampling), columns=["method", *keyed[:-1], *_SUMMARY])
    of_rows = [ranks.get(key, nan) for key in table[keyed].itertuples(index=False, name=None)]
    return table.assign(rank=pd.Series(of_rows, dtype="float64"))


def _agreement(rows: DataFrame, methods: Sequence[str], sampling: Sampling) -> DataFrame:
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
        pairs = agreement_matrix(padded, keep, *sampling)
    return pd.DataFrame([pair._asdict() for pair in pairs], columns=["one", "other", *_SUMMARY])
