"""The summary of a study: means of metrics with their intervals, and paired differences of methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from captum_vz.errors import needs_extra
from captum_vz.metrics import compare_pairs
from captum_vz.metrics.intervals import summarize_many
from captum_vz.study.folder import ALL
from captum_vz.study.folder.reading import Values, parts_of

with needs_extra("captum_vz.study", "study"):
    import pandas as pd

if TYPE_CHECKING:
    from pandas import DataFrame

#: The values of each model.
Found = Mapping[str, Values]


def collect(folder: Path, settings: Mapping[str, Any]) -> dict[str, Values]:
    """The values of all models of a study."""
    return {model: Values(folder, settings, list(parts_of(folder, settings, model))) for model in settings["models"]}


def skipped_rows(found: Found) -> DataFrame:
    """The rows without numbers, see :attr:`Study.skipped`."""
    tables = [one.reasons.assign(model=name) for name, one in found.items()]
    return pd.concat(tables, ignore_index=True)[["model", "example", "group", "method", "metric", "skipped"]]


def summarise(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy summary of a study, see :attr:`Study.summary`."""
    metrics, lines, vectors = list(settings["metrics"]), [], []
    groups = sorted({example.group for one in found.values() for example in one.examples})
    for name, one in found.items():
        group_of = np.array([example.group for example in one.examples], dtype=object)
        for place, method in enumerate(settings["methods"]):
            for layer in _layers(one, place):
                for group in [ALL, *(groups if len(groups) > 1 else [])]:
                    inside = np.ones(len(one.examples), dtype=bool) if group == ALL else group_of == group
                    for k, metric in enumerate(metrics):
                        known = one.known[place, layer, k] & inside
                        skipped = int((inside & ~known & one.computed[place, k]).sum())
                        vectors.append(torch.from_numpy(one.numbers[place, layer, k][known]))
                        lines.append((name, method, layer - 1 if layer else pd.NA, group, metric, skipped))
    summaries = summarize_many(vectors, confidence, resamples)
    table = pd.DataFrame([line[:-1] for line in lines], columns=["model", "method", "layer", "group", "metric"])
    numbers = pd.DataFrame(summaries, columns=["mean", "std", "low", "high", "examples", "undefined"])
    return table.join(numbers).assign(skipped=[line[-1] for line in lines]).astype({"layer": "Int64"})


def paired_differences(found: Found, settings: Mapping[str, Any], confidence: float, resamples: int) -> DataFrame:
    """The tidy table of paired differences, see :attr:`Study.differences`."""
    lines = []
    for model, one in found.items():
        for k, metric in enumerate(settings["metrics"]):
            last = {}
            for place, method in enumerate(settings["methods"]):
                values = np.full(len(one.examples), np.nan)
                for layer in _layers(one, place):
                    values = np.where(one.known[place, layer, k], one.numbers[place, layer, k], values)
                if not np.isnan(values).all():
                    last[method] = torch.from_numpy(values)
            for difference in compare_pairs(last, confidence, resamples):
                lines.append({"model": model, "metric": metric} | difference._asdict())
    names = ["model", "metric", "one", "other", "mean", "low", "high", "p", "examples", "tied"]
    return pd.DataFrame(lines, columns=names)


def _layers(values: Values, method: int) -> list[int]:
    """The places of a method's layers. A method that has no value has one line, as one without layers."""
    return list(np.flatnonzero(values.known[method].any((1, 2)))) or [0]
