"""Description length of the labels given each layer's state at the target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from captum_vz._engine import LayerPass, LayerRecord, first_tensor
from captum_vz.errors import UnsupportedLayerError
from captum_vz.metrics import BOUNDARIES, description_length, summarize
from captum_vz.metrics.extra import study_extra
from captum_vz.study.examples.encoding import Encoded, pad

with study_extra("captum_vz.study"):
    import pandas as pd

if TYPE_CHECKING:
    from pandas import DataFrame

#: The smallest number of examples for the paper's blocks, because the first block needs two.
FEWEST: Final = round(2 / BOUNDARIES[0])


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


def probe(states: Tensor, labels: Sequence[str]) -> DataFrame:
    """The bits of each label given each layer's states.

    Args:
        states: `(layers, examples, d)`.
        labels: One for each example, of at least two kinds.

    Returns:
        Rows with ``layer``, ``place`` (of the example) and ``bits``, see
        :func:`~captum_vz.metrics.description_length`.
    """
    names = sorted(set(labels))
    numbers = torch.tensor([names.index(label) for label in labels])
    bits = [description_length(layer, numbers, len(names)).bits for layer in states]
    return pd.concat(
        [
            pd.DataFrame({"layer": layer, "place": range(len(labels)), "bits": values.numpy()})
            for layer, values in enumerate(bits)
        ],
        ignore_index=True,
    )


def compressions(bits: DataFrame, classes: int, confidence: float = 0.95, resamples: int = 1999) -> DataFrame:
    """The compression of each layer with its interval over examples: ``layer``, ``compression``, ``low``, ``high``.

    Args:
        bits: As :func:`probe` gives it.
        classes: The number K of labels.
        confidence: The confidence level of the intervals.
        resamples: The number of bootstrap resamples of the examples.
    """
    rows = []
    uniform = float(torch.tensor(float(classes)).log2())
    for layer, of_layer in bits.groupby("layer"):
        found = summarize(torch.tensor(of_layer["bits"].to_numpy()), confidence, resamples)
        # Fewer bits mean more compression, so the ends of the interval swap.
        rows.append(
            {
                "layer": layer,
                "compression": uniform / found.mean,
                "low": uniform / found.high,
                "high": uniform / found.low,
                "bits": found.mean * found.examples,
                "examples": found.examples,
            }
        )
    return pd.DataFrame(rows)
