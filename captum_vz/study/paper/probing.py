"""Probing: what each layer's state at the target says about the label."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from captum_vz._engine import LayerPass, LayerRecord, first_tensor
from captum_vz.errors import UnsupportedLayerError
from captum_vz.metrics import description_length, linear_probe, summarize
from captum_vz.metrics.extra import study_extra
from captum_vz.study.examples.encoding import Encoded, pad

with study_extra("captum_vz.study"):
    import pandas as pd

if TYPE_CHECKING:
    from pandas import DataFrame


def target_states(
    model: Any, tokenizer: Any, layers: Sequence[nn.Module], examples: Sequence[Encoded], batch_size: int = 32
) -> Tensor:
    """The output of each layer at each example's target, `(layers, examples, d)`, on the CPU.

    A layer that runs many times (in ALBERT) counts once for each run, as in the methods.
    """
    batches = []
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        inputs = pad(tokenizer, batch, model.device)
        targets = torch.tensor([example.target for example in batch], device=model.device)

        def at_target(record: LayerRecord, targets: Tensor = targets) -> Tensor:
            states = first_tensor(record.output)
            if states is None or states.ndim != 3:
                raise UnsupportedLayerError(
                    f"Layer {record.index} ({record.name}) does not return a tensor (batch, tokens, d), so "
                    "its states cannot be probed."
                )
            return states[torch.arange(len(states), device=states.device), targets].float().cpu()

        this = LayerPass(layers, at_target)
        this.run(partial(model, **inputs))
        batches.append(torch.stack([states for _, states in this.results]))
    return torch.cat(batches, dim=1)


#: The seeds of each layer's probes.
SEEDS: Final = (0, 1, 2, 3, 4)


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
        values.append(("linear", 0, linear_probe(state, numbers)))
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
