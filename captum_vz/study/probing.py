"""What can be read off a model's layers at the target: description length, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from captum_vz._engine import LayerRecord, first_tensor, run_and_record
from captum_vz.metrics import BOUNDARIES, description_length, summarize
from captum_vz.study._extra import pd
from captum_vz.study.encoding import Encoded, pad

if TYPE_CHECKING:
    from pandas import DataFrame

#: Fewer examples cannot be cut into the paper's blocks, the first of which needs two.
FEWEST: Final = round(2 / BOUNDARIES[0])


def target_states(
    model: Any, tokenizer: Any, layers: Sequence[nn.Module], examples: Sequence[Encoded], batch_size: int = 32
) -> Tensor:
    """What each layer returns at each example's target, `(layers, examples, d)`, on the CPU.

    A layer that runs many times (ALBERT's) counts once for each run, as in the methods.
    """
    batches = []
    for start in range(0, len(examples), batch_size):
        batch = examples[start : start + batch_size]
        inputs = pad(tokenizer, batch, model.device)
        targets = torch.tensor([example.target for example in batch], device=model.device)

        def run(inputs: dict[str, Tensor] = inputs) -> Any:
            return model(**inputs)

        def at_target(recording: LayerRecord, targets: Tensor = targets) -> Tensor:
            states = first_tensor(recording.output)
            assert states is not None and states.ndim == 3, f"layer {recording.index} does not return (batch, tokens, d)."
            return states[torch.arange(len(states), device=states.device), targets].float().cpu()

        batches.append(torch.stack([states for _, states in run_and_record(run, layers, at_target)]))
    return torch.cat(batches, dim=1)


def probe(states: Tensor, labels: Sequence[str]) -> DataFrame:
    """The bits that each label costs given each layer's states.

    Args:
        states: `(layers, examples, d)`.
        labels: One for each example, of two kinds at least.

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
        confidence: The share of intervals that hold the truth.
        resamples: How often examples are drawn again for the interval.
    """
    rows = []
    uniform = float(torch.tensor(float(classes)).log2())
    for layer, of_layer in bits.groupby("layer"):
        found = summarize(torch.tensor(of_layer["bits"].to_numpy()), confidence, resamples)
        # Fewer bits, more compression: the ends change places.
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
