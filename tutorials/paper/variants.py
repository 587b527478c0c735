"""What the paper does not have: the variants of faithfulness by blank-out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isclass
from itertools import product
from math import nan
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import torch
from torch import Tensor

from captum_vz.metrics import Summary, compare_pairs, summarize_many
from captum_vz.study import METHODS, Example, Method, Scorer, Study, lacks, metric_named

if TYPE_CHECKING:
    from pandas import DataFrame

#: All ways to blank out tokens, and to read their effects, by the names of their metrics.
VARIANTS: Final = tuple(
    "".join(["blank_out", *parts]) for parts in product(("", ":mask", ":delete"), ("", ":vocabulary"), ("", ":size"))
)


def variant_title(name: str) -> str:
    """What a variant replaces tokens by, what probabilities are over, and whether only the size of an effect counts."""
    words = name.split(":")[1:]
    return ", ".join(words) if words else "UNK, forms"


def variants_table(
    source: tuple[Any, Any],
    study: Study,
    examples: Sequence[Example],
    given: Mapping[str, Method],
    batch_size: int,
    resamples: int,
) -> DataFrame:
    """Spearman's correlation with blank-out in each variant, of the last layers of a finished study.

    The ``rank`` is one more than the number of methods that are higher, sentence by sentence
    (:func:`~captum_vz.metrics.compare_pairs`). No method runs again: the study keeps the scores, and the new metrics.
    `examples` are all its examples, and `given` the methods that this call passes.
    """
    columns = ["model", "example", "group", "label", "method", "layer", "target", "cue", "content", "tokens", "scores"]
    rows = study.rows(columns).groupby(["method", "example"], sort=False).tail(1).reset_index(drop=True)
    variants = [name for name in VARIANTS if lacks(metric_named(name), *source) is None]

    def made(model: Any, tokenizer: Any) -> DataFrame:
        """The variants of stored rows of scores."""
        records = rows.to_dict("records")
        for row in records:
            row |= {name: list(row[name]) for name in ("cue", "content", "scores")} | {"skipped": None}
        Scorer(model, tokenizer, metrics=variants, batch_size=batch_size).measure(examples, records)
        return pd.DataFrame(records, columns=["example", "method", *variants])

    made_of = [study.settings["methods"], rows[["method", "example"]].to_numpy().tolist(), variants]
    values = study.keep("variants", source, made_of, made)
    methods = [method for method in study.settings["methods"] if method in set(rows["method"])]
    of = dict(list(values.groupby("method", sort=False)))
    named = list(product(methods, variants))
    summaries = summarize_many([_tensor(of[method][name]) for method, name in named], resamples=resamples)
    table = pd.DataFrame(
        [(*where, *one) for where, one in zip(named, summaries, strict=True)],
        columns=["method", "variant", *Summary._fields],
    )
    ranks = {name: _ranks(values, name, resamples) for name in variants}
    return table.assign(
        rank=[ranks[row.variant].get(row.method, nan) for row in table.itertuples()],
        sees_forms=[sees_forms(method, given.get(method)) for method in table["method"]],
    )


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


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values.to_numpy(dtype="float64"))


def _ranks(values: DataFrame, metric: str, resamples: int) -> dict[str, int]:
    """For each method one more than the number of methods whose values are higher; empty if none is shown to be."""
    table = values.pivot(index="example", columns="method", values=metric).dropna(axis=1, how="all")
    ranks = dict.fromkeys(map(str, table), 1)
    pairs = compare_pairs({str(method): _tensor(table[method]) for method in table}, resamples=resamples)
    differing = [pair for pair in pairs if not pair.tied]
    for pair in differing:
        ranks[pair.other if pair.mean > 0 else pair.one] += 1
    return ranks if differing else {}
