"""Metrics of rows of scores, which are in memory or were read from a study's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.study.examples import Example
from captum_vz.study.examples.encoding import BadExampleError, Encoded, fill_batches
from captum_vz.study.scoring.metrics import EvaluationBatch, Metric, stacked
from captum_vz.study.scoring.rows import Row, reason_of, skipped_row


class Measurer:
    """Computes metrics of rows of scores.

    Args:
        metrics: The metrics by their names.
        load: Gives the model and its tokenizer. It is called only for metrics that need them.
        encode: Gives the tokens of an example. With `needs_forms=True`, an example without two forms is an error.
        sizes: The most sentences in a batch, and the most tokens.
        content_only: Whether cue alignment is over the content tokens only.
        removal: The token in the place of a removed token.
        score: See :class:`~captum_vz.study.EvaluationBatch`.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        load: Callable[[], tuple[Any, Any]],
        encode: Callable[..., Encoded],
        sizes: tuple[int, int],
        content_only: bool,
        removal: str,
        score: Callable[[str, Sequence[Example], Any], Sequence[Row]],
    ) -> None:
        self.metrics = metrics
        self.load = load
        self.encode = encode
        self.sizes = sizes
        self.content_only = content_only
        self.removal = removal
        self.score = score

    def measure(self, examples: Mapping[str, Example], rows: Sequence[Row]) -> list[Row]:
        """Write the metrics into rows of scores.

        Args:
            examples: The examples by their ids.
            rows: Rows with scores. Each gets an entry for each metric: a number, NaN where the metric is undefined, or
                None where it was skipped.

        Returns:
            A row for each metric that was skipped, with the reason.
        """
        by_example: dict[str, dict[str, list[Row]]] = {}
        for row in rows:
            row |= dict.fromkeys(self.metrics)
            by_example.setdefault(row["example"], {}).setdefault(row["method"], []).append(row)
        skipped: list[Row] = []

        def needs(name: str) -> tuple[bool, bool, bool]:
            metric = self.metrics[name]
            return metric.needs_cue, metric.needs_forms, metric.needs_model

        for (cue, forms, model), names in groupby(sorted(self.metrics, key=needs), key=needs):
            alike = list(names)
            usable, encoded = [], {}
            for id in by_example:
                try:
                    encoded[id] = self._usable(examples[id], next(iter(by_example[id].values()))[0], cue, forms, model)
                    usable.append(id)
                except BadExampleError as error:
                    skipped += [skipped_row(str(error), examples[id], None, name, self.metrics) for name in alike]

            def length(id: str) -> int:
                return len(next(iter(by_example[id].values()))[0]["scores"])

            for some in fill_batches(sorted(usable, key=length), length, *self.sizes):
                skipped += self._batch({id: examples[id] for id in some}, by_example, encoded, alike)
        return skipped

    def _usable(self, example: Example, row: Row, cue: bool, forms: bool, model: bool) -> Encoded | None:
        """The tokens of an example, if a metric needs the model; an error if the metric cannot use the example."""
        if cue and not row["cue"]:
            raise BadExampleError("there is no cue")
        if cue and self.content_only and row["target"] in row["cue"]:
            raise BadExampleError("the cue is the token that is explained, which content_only ignores")
        return self.encode(example, needs_forms=forms) if model else None

    def _batch(
        self,
        examples: Mapping[str, Example],
        rows: Mapping[str, Mapping[str, list[Row]]],
        encoded: Mapping[str, Encoded | None],
        names: Sequence[str],
    ) -> Iterator[Row]:
        ids = list(examples)
        first = [next(iter(rows[id].values()))[0] for id in ids]
        tokens = [one for id in ids if (one := encoded[id]) is not None]
        how = self.content_only, self.removal, self.score
        batch = EvaluationBatch(list(examples.values()), first, tokens, self.load, *how)
        for method in dict.fromkeys(method for id in ids for method in rows[id]):
            batch.method = method
            # Equal scores, which are not read, stand for a missing example.
            equal = batch.attended / batch.attended.sum(-1, keepdim=True)
            scores = stacked([rows[id].get(method, []) for id in ids], equal)
            for name in names:
                try:
                    values = _checked(name, self.metrics[name], batch, scores)
                except Exception as error:
                    # One example may be the reason, or need less memory, so each is tried alone.
                    for id in ids:
                        if len(ids) > 1:
                            of_one = {id: {method: rows[id][method]}} if method in rows[id] else {}
                            if of_one:
                                yield from self._batch({id: examples[id]}, of_one, encoded, [name])
                        else:
                            yield skipped_row(reason_of(error), examples[id], method, name, self.metrics)
                    continue
                for place, id in enumerate(ids):
                    for layer, row in enumerate(rows[id].get(method, [])):
                        row[name] = float(values[layer, place])


def _checked(name: str, metric: Metric, batch: EvaluationBatch, scores: Tensor) -> Tensor:
    """The values of a metric, `(layers, batch)`."""
    found = metric.values(batch, scores.clone())  # a metric that changes its rows harms no other one
    shape = tuple(scores.shape[:2])
    try:
        values = torch.as_tensor(found).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _wrong(name, batch, f"an object of type {type(found).__name__}", shape) from error
    if tuple(values.shape) != shape or values.is_complex():
        raise _wrong(name, batch, f"{tuple(values.shape)} of {values.dtype}", shape)
    if values.isinf().any():
        raise _wrong(name, batch, "infinity", shape)
    return values.double()


def _wrong(name: str, batch: EvaluationBatch, came: str, shape: tuple[int, ...]) -> ArgumentError:
    named = ", ".join(repr(example.id) for example in batch.examples[:3])
    return ArgumentError(
        f"metric {name!r}, example {named}: the metric returned {came}; expected finite numbers or NaN (layers, batch) "
        f"of shape {shape}."
    )
