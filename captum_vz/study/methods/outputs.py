"""Methods that explain a class of the model's output: gradients, Value Zeroing's effect, and ALTI-Logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz import ALTILogit, LayerAttentionGradient, TokenAttribution, ValueZeroingEffect
from captum_vz.errors import UnsupportedLayerError
from captum_vz.functional import normalize_rows
from captum_vz.study.methods.batch import Batch


def gradient_rows(kind: Any, batch: Batch, **options: Any) -> list[Tensor]:
    """The scores of a Captum method on the word embeddings: the Euclidean norm of each token's vector, as shares."""
    target, foil = explained_classes(batch)
    method = TokenAttribution(batch.model, kind, batch.tokenizer, reduce="l2")
    return [normalize_rows(method.attribute(batch.inputs, target=target, foil=foil, **options))]


def attention_gradient_rows(batch: Batch) -> list[Tensor]:
    """Attention times the positive gradient of the target's logit, one row for each layer."""
    target, foil = explained_classes(batch)

    def logit(output: Any) -> Tensor:
        read = _at(output.logits, target)
        return read if foil is None else read - _at(output.logits, foil)

    method = LayerAttentionGradient(batch.model, batch.layers, objective=logit)
    return [one[:, 0] for _, one in method.run(batch.inputs, token=batch.token).maps]


def effect_rows(batch: Batch, together: bool) -> list[Tensor]:
    """How much the target's logit changes without each token's value: absolute changes, as shares.

    Args:
        batch: The batch.
        together: Whether values are zeroed in all layers at once. Otherwise in one layer after the other.
    """
    target, foil = explained_classes(batch)
    chosen: list[Any] = [batch.layers] if together else list(batch.layers)
    effects = [
        ValueZeroingEffect(batch.model, layer).attribute(batch.inputs, target=target, foil=foil) for layer in chosen
    ]
    return [normalize_rows(one.abs()) for one in effects]


def effect_of_layer(model: Any, layers: Sequence[Any], layer: int = -1) -> ValueZeroingEffect:
    """The effect of the values of one layer."""
    return ValueZeroingEffect(model, layers[layer])


def alti_logit_rows(batch: Batch) -> list[Tensor]:
    """How much each token adds to the target's logit through attention: absolute amounts, as shares."""
    target, foil = explained_classes(batch)
    added = ALTILogit(batch.model, batch.layers).attribute(batch.inputs, target=target, foil=foil)
    return [normalize_rows(added.abs())]


def explained_classes(batch: Batch) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]] | None]:
    """The indices of the target's logit and of the foil's in the output, one for each example.

    An index is `(class,)` where the logits are `(batch, classes)`, and `(token, class)` where they have a token axis.

    Raises:
        UnsupportedLayerError: The model returns no logits.
    """
    with torch.no_grad():
        logits = getattr(batch.model(**batch.inputs), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        raise UnsupportedLayerError(
            f"{type(batch.model).__name__} gives no logits, but the method explains a logit. Pass a model with a head."
        )
    places: list[tuple[int, ...]] = [()] * len(logits) if logits.ndim == 2 else [(token,) for token in batch.token]
    targets = batch.targets
    if targets is None:
        targets = [int(row[place].argmax()) for row, place in zip(logits, places, strict=True)]
    foils = batch.foils
    return _indices(places, targets), None if foils is None else _indices(places, foils)


def _indices(places: list[tuple[int, ...]], classes: Sequence[int]) -> list[tuple[int, ...]]:
    return [(*place, number) for place, number in zip(places, classes, strict=True)]


def _at(logits: Tensor, indices: list[tuple[int, ...]]) -> Tensor:
    """The logit at one index for each example, `(batch,)`."""
    return torch.stack([row[index] for row, index in zip(logits, indices, strict=True)])
