"""The methods by their names, and what each of them says of one batch, with what they share computed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from torch import Tensor, nn

from captum_vz import (
    ALTI,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionNorm,
    PositionAttribution,
    RandomAttribution,
    Rollout,
    TokenAttribution,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz.attr import LayerMaps, MapAggregation, MapRun
from captum_vz.functional import normalize_rows

# What a method gives: for each layer, or once, the row of each example's target, `(batch, tokens)`.
Rows = list[Tensor]


@dataclass(frozen=True)
class Method:
    """One row of the registry.

    Attributes:
        title: What it is called in a figure.
        rows: Its rows for a batch.
        layered: Whether it has rows for each layer (of a rollout: up to each layer). The others have one for all.
        joins: Whether it joins whole maps of layers, which are then there for the methods that need rows of them.
        slow: Whether it is left out unless it is asked for: by gradients, or by a flow for each pair of tokens.
    """

    title: str
    rows: Callable[[Batch], Rows]
    layered: bool = False
    joins: bool = False
    slow: bool = False


class Batch:
    """A model and some of its inputs, with the token that is explained in each.

    Args:
        model: A model of transformers in eval mode, or any that is called with the inputs by keyword.
        tokenizer: Its tokenizer.
        layers: The layers that are explained, in the order in which they run.
        inputs: What the model takes, by keyword; `input_ids` among them.
        target: The position of one token in each example, not negative.
        answers: The token id (or class) that gradients explain, one an example. None: the model's own answer.
        foils: The one whose logit is subtracted from it, one an example. None: none.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        layers: Sequence[nn.Module],
        inputs: Mapping[str, Tensor],
        target: Sequence[int],
        answers: Sequence[int] | None = None,
        foils: Sequence[int] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.layers = list(layers)
        self.inputs = dict(inputs)
        self.target = list(target)
        self.answers = answers
        self.foils = foils
        self._whole: dict[str, MapRun] = {}

    def rows(self, methods: Sequence[str]) -> dict[str, Rows]:
        """For each method its rows `(batch, tokens)`, one for each layer or one for all; not negative, summing to 1."""
        first = sorted(methods, key=lambda name: not METHODS[name].joins)
        found = {name: METHODS[name].rows(self) for name in first}
        return {name: found[name] for name in methods}

    def layer_rows(self, maps: str) -> Rows:
        """The targets' rows of the layers' maps, in the order in which the layers ran."""
        if maps in self._whole:
            return [self._target_rows(one) for _, one in self._whole[maps].maps]
        method = MAPS[maps](self.model, self.layers)
        return [one[:, 0] for _, one in method.run(self.inputs, token=self.target).maps]

    def joined_rows(self, method: MapAggregation, maps: str, all_layers: bool) -> Rows:
        """The targets' rows of the layers' maps joined as `method` joins them, up to each layer or through all."""
        if maps not in self._whole:
            self._whole[maps] = MAPS[maps](self.model, self.layers).run(self.inputs, find_other_mixing=True)
        return method.join_run(self._whole[maps], token=self.target, all_layers=all_layers)

    def _target_rows(self, one: Tensor) -> Tensor:
        return one[torch.arange(len(one), device=one.device), self.target]


def _layer_rows(maps: str, batch: Batch) -> Rows:
    return batch.layer_rows(maps)


def _joined_rows(kind: Callable[..., MapAggregation], maps: str, all_layers: bool, batch: Batch) -> Rows:
    return batch.joined_rows(kind(batch.model, batch.layers), maps, all_layers)


def _without_model(kind: Any, batch: Batch) -> Rows:
    causal = any(getattr(module, "is_causal", False) for module in batch.layers[0].modules())  # in transformers
    rows: Tensor = kind(causal=causal).attribute(batch.inputs, token=batch.target)
    return [rows]


def _gradients(kind: Any, options: Mapping[str, Any], batch: Batch) -> Rows:
    """A Captum method on the word embeddings: the Euclidean norm of each token's vector, as shares of their sum."""
    answers, foils, position = _question(batch)
    method = TokenAttribution(batch.model, kind, batch.tokenizer, reduce="l2")
    target, foil = _index(position, answers), None if foils is None else _index(position, foils)
    scores = method.attribute(batch.inputs, target=target, foil=foil, **options)
    return [normalize_rows(scores)]


def _effects(together: bool, batch: Batch) -> Rows:
    """What the answer loses with each token's value, in all layers at once or in each: its size, as shares of all."""
    answers, foils, position = _question(batch)

    target, foil = _index(position, answers), None if foils is None else _index(position, foils)
    chosen: list[Any] = [batch.layers] if together else list(batch.layers)
    effects = [
        ValueZeroingEffect(batch.model, layer).attribute(batch.inputs, target=target, foil=foil) for layer in chosen
    ]
    return [normalize_rows(one.abs()) for one in effects]


def _index(position: Tensor | None, classes: Tensor) -> list[tuple[int, ...]]:
    """Where the logits of each example's class stand in the output."""
    each = classes[:, None] if position is None else torch.stack([position, classes], 1)
    return [tuple(one) for one in each.tolist()]


def _question(batch: Batch) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The classes to explain, those they are compared with, and the tokens at which they are read, `(batch,)` each."""
    with torch.no_grad():
        logits = getattr(batch.model(**batch.inputs), "logits", None)
    assert isinstance(logits, Tensor) and logits.ndim in (2, 3), (
        f"{type(batch.model).__name__} gives no logits, and an output is explained: pass a model with a head."
    )
    device = logits.device
    answers, foils = (None if ids is None else torch.tensor(ids, device=device) for ids in (batch.answers, batch.foils))
    position = None if logits.ndim == 2 else torch.tensor(batch.target, device=device)
    if answers is None:
        read = logits if position is None else logits[torch.arange(len(logits), device=device), position]
        answers = read.argmax(-1)
    return answers, foils, position


#: The layer methods that others are made of. With 64 probes the relative standard deviation of a score is at most about
#: half of sqrt(2 / 64), or 0.09.
MAPS: Final[dict[str, Callable[..., LayerMaps]]] = {
    "value-zeroing": ValueZeroing,
    "attention": LayerAttention,
    "attention-norm": LayerAttentionNorm,
    "encoder-norm": partial(LayerAttentionNorm, include="encoder"),
    "alti": LayerALTI,
    "hidden-token-attribution": partial(HiddenTokenAttribution, probes=64),
}


def _layers(title: str, maps: str, slow: bool = False) -> Method:
    return Method(title, partial(_layer_rows, maps), layered=True, slow=slow)


def _rollout(title: str, kind: Callable[..., MapAggregation], maps: str) -> Method:
    return Method(title, partial(_joined_rows, kind, maps, True), layered=True, joins=True)


def _norm_rollout(model: Any, layers: list[nn.Module]) -> MapAggregation:
    """Norms of what the attention alone sums, to which the residual connection is added as it is to weights."""
    return Rollout(LayerAttentionNorm(model, layers), residual=0.5)


def _captum(title: str, kind: Any, **options: Any) -> Method:
    return Method(title, partial(_gradients, kind, options), slow=True)


#: All methods by their names. A new one is a new row.
METHODS: Final[dict[str, Method]] = {
    "value-zeroing": _layers("Value Zeroing", "value-zeroing"),
    "value-zeroing-rollout": _rollout("Value Zeroing, rollout", ValueZeroingRollout, "value-zeroing"),
    "attention": _layers("attention", "attention"),
    "attention-rollout": _rollout("attention rollout", AttentionRollout, "attention"),
    "attention-norm": _layers("attention norm", "attention-norm"),
    "attention-norm-rollout": _rollout("attention norm, rollout", _norm_rollout, "attention-norm"),
    "globenc": _rollout("GlobEnc", GlobEnc, "encoder-norm"),
    "globenc-layer": _layers("GlobEnc, a layer", "encoder-norm"),
    "alti": _rollout("ALTI", ALTI, "alti"),
    "alti-layer": _layers("ALTI, a layer", "alti"),
    "value-zeroing-effect": Method("Value Zeroing's effect", partial(_effects, True)),
    "value-zeroing-effect-layer": Method("Value Zeroing's effect, a layer", partial(_effects, False), layered=True),
    "attention-flow": Method(
        "attention flow",
        partial(_joined_rows, AttentionFlow, "attention", False),
        joins=True,
        slow=True,
    ),
    "saliency": _captum("saliency", Saliency, abs=False),
    "input-x-gradient": _captum("input × gradient", InputXGradient),
    "integrated-gradients": _captum(
        "integrated gradients", IntegratedGradients, baselines="pad", n_steps=50, internal_batch_size=256
    ),
    "hidden-token-attribution": _layers("hidden token attribution", "hidden-token-attribution", slow=True),
    "random": Method("random", partial(_without_model, RandomAttribution)),
    "position": Method("position", partial(_without_model, PositionAttribution)),
}

#: What is compared if nothing else is said: all but gradients and flow.
DEFAULT_METHODS: Final = tuple(name for name, method in METHODS.items() if not method.slow)


def check_methods(methods: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: all but gradients and flow.

    Raises:
        ValueError: A name that is none of :data:`METHODS`, or none at all.
    """
    if methods is None:
        return DEFAULT_METHODS
    names = (methods,) if isinstance(methods, str) else tuple(dict.fromkeys(methods))
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise ValueError(f"methods is {list(names)}: pass some of {', '.join(METHODS)}.")
    return names


def part_of(model: Any) -> Any:
    """The model; of one with encoder and decoder, the encoder."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if both else model
