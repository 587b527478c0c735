"""What the paper does not have: the variants of faithfulness by blank-out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import isclass
from itertools import product
from math import nan
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
import torch

from captum_vz.metrics import compare_pairs, summarize_many
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


def variant_values(source: tuple[Any, Any], study: Study, examples: Sequence[Example], batch_size: int) -> DataFrame:
    """The variants of the last layers of a finished study, whose scores are read: ``example``, ``method``, variants."""
    columns = ["model", "example", "method", "layer", "target", "cue", "content", "tokens", "scores"]
    last = study.rows(columns).groupby(["method", "example"], sort=False).tail(1)
    records: Any = last.to_dict("records")
    for row in records:
        row |= {name: list(row[name]) for name in ("cue", "content", "scores")} | {"skipped": None}
    variants = [name for name in VARIANTS if lacks(metric_named(name), *source) is None]
    Scorer(*source, metrics=variants, batch_size=batch_size).measure(examples, records)
    return pd.DataFrame(records, columns=["example", "method", *variants])


def variants_table(values: DataFrame, given: Mapping[str, Method], resamples: int) -> DataFrame:
    """Spearman's correlation with blank-out in each variant, and the ``rank``.

    A rank is one more than the number of methods that are higher, sentence by sentence
    (:func:`~captum_vz.metrics.compare_pairs`). `given` are the methods that this call passes.
    """
    variants, of_method = list(values.columns.drop(["example", "method"])), values.groupby("method", sort=False)
    ranks = {name: _ranks(values, name, resamples) for name in variants}
    pairs = list(product(of_method.groups, variants))
    numbers = summarize_many([_tensor(of_method.get_group(one)[name]) for one, name in pairs], resamples=resamples)
    rows = [
        {"method": one, "variant": name, **number._asdict(), "rank": ranks[name].get(str(one), nan)}
        for (one, name), number in zip(pairs, numbers, strict=True)
    ]
    return pd.DataFrame(rows).assign(sees_forms=[sees_forms(str(one), given.get(str(one))) for one, _ in pairs])


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


def _tensor(values: Any) -> torch.Tensor:
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
