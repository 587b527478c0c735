"""Probing: what each layer's state at the target says about the label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pandas as pd
import torch
from torch import Tensor

from captum_vz.metrics import description_length, linear_probe, summarize

if TYPE_CHECKING:
    from pandas import DataFrame


#: The seeds of each layer's probes.
SEEDS: Final = (0, 1, 2, 3, 4)
#: The parts of the examples for the linear probe. Each label needs as many examples.
FOLDS: Final = 5


def probe(states: Tensor, labels: Sequence[str]) -> DataFrame:
    """The bits of each label given each layer's states, from several seeds, with a control and a linear probe.

    Args:
        states: `(layers, examples, d)`.
        labels: One for each example, of at least two kinds.

    Returns:
        Rows with ``layer``, ``place`` (of the example), ``probe``, ``seed`` and ``value``. The probe "labels" has bits,
        see :func:`~captum_vz.metrics.description_length`; "control" the bits of labels that are shuffled by the seed;
        "linear" whether a linear probe reads the label, see :func:`~captum_vz.metrics.linear_probe`.
    """
    names = sorted(set(labels))
    numbers = torch.tensor([names.index(label) for label in labels])
    found = []
    for layer, state in enumerate(states):
        values: list[tuple[str, int, Tensor]] = []
        for seed in SEEDS:
            order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
            values.append(("labels", seed, description_length(state, numbers, len(names), seed=seed).bits))
            values.append(("control", seed, description_length(state, numbers[order], len(names), seed=seed).bits))
        values.append(("linear", 0, linear_probe(state, numbers, folds=FOLDS)))
        found += [
            pd.DataFrame({"layer": layer, "place": range(len(one)), "probe": kind, "seed": seed, "value": one.numpy()})
            for kind, seed, one in values
        ]
    return pd.concat(found, ignore_index=True)


def compressions(values: DataFrame, classes: int, confidence: float = 0.95, resamples: int = 1999) -> DataFrame:
    """The compression of each layer with its interval and its range over seeds, the control, and the linear probe.

    Args:
        values: As :func:`probe` gives it.
        classes: The number K of labels.
        confidence: The confidence level of the intervals.
        resamples: The number of bootstrap resamples of the examples.
    """
    rows = []
    uniform = float(torch.tensor(float(classes)).log2())
    for layer, of_layer in values.groupby("layer"):
        by_probe = dict(list(of_layer.groupby("probe")))
        bits = by_probe["labels"].groupby("place", sort=True)["value"].mean()
        found = summarize(torch.tensor(bits.to_numpy()), confidence, resamples)
        seeds = uniform / by_probe["labels"].groupby("seed")["value"].mean()
        control = uniform / by_probe["control"].groupby("seed")["value"].mean()
        accuracy = summarize(torch.tensor(by_probe["linear"]["value"].to_numpy()), confidence, resamples)
        # Fewer bits mean more compression, so the ends of the interval swap.
        rows.append(
            {
                "layer": layer,
                "compression": uniform / found.mean,
                "low": uniform / found.high,
                "high": uniform / found.low,
                "bits": found.mean * found.examples,
                "examples": found.examples,
                "seeds": len(seeds),
                "lowest": seeds.min(),
                "highest": seeds.max(),
                "control": uniform / by_probe["control"]["value"].mean(),
                "control_lowest": control.min(),
                "control_highest": control.max(),
                "accuracy": accuracy.mean,
                "accuracy_low": accuracy.low,
                "accuracy_high": accuracy.high,
            }
        )
    return pd.DataFrame(rows, columns=PROBING_COLUMNS)


#: The columns of :func:`compressions`.
PROBING_COLUMNS: Final = [
    *("layer", "compression", "low", "high", "bits", "examples", "seeds", "lowest", "highest"),
    *("control", "control_lowest", "control_highest", "accuracy", "accuracy_low", "accuracy_high"),
]
