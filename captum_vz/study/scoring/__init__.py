"""A batch as methods see it, and the rows of methods that explain a number of the model's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from captum_vz import ALTILogit, LayerAttentionGradient, TokenAttribution, ValueGates, ValueZeroingEffect
from captum_vz.attr import LayerMaps, MapAggregation, MapRun
from captum_vz.attr._base import Described
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import normalize_rows

#: A class of layer maps, or a function with its options, called with the model and the layers.
MapsClass = Callable[..., LayerMaps]

#: A class that joins the maps of many layers, or a function, called with the model and the layers.
JoinedClass = Callable[..., MapAggregation]


class Batch:
    """A model and some of its inputs, with the token that is explained in each.

    Args:
        model: A model of transformers in eval mode, or any that is called with the inputs by keyword.
        tokenizer: Its tokenizer.
        layers: The layers that are explained, in the order in which they run.
        inputs: What the model takes, by keyword; `input_ids` among them.
        token: The position of one token in each example, not negative.
        targets: The class (a token id) that is explained by methods that explain the model's output, one for each
            example. None: the class that the model predicts.
        foils: The class whose logit is subtracted from the target's logit, one for each example. None: no class.
        feature_mask: The feature of each token, `(1 or batch, tokens)`. None: each token is its own feature.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        layers: Sequence[nn.Module],
        inputs: Mapping[str, Tensor],
        token: Sequence[int],
        targets: Sequence[int] | None = None,
        foils: Sequence[int] | None = None,
        feature_mask: Tensor | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.layers = list(layers)
        self.inputs = dict(inputs)
        self.token = list(token)
        self.targets = targets
        self.foils = foils
        self.feature_mask = feature_mask
        self._runs: dict[MapsClass, MapRun] = {}

    def copy(self) -> Batch:
        """The same batch with tensors and lists of its own, so that a method that changes them harms no other one."""
        inputs = {name: x.clone() if isinstance(x, Tensor) else x for name, x in self.inputs.items()}
        targets, foils = (None if one is None else list(one) for one in (self.targets, self.foils))
        mask = None if self.feature_mask is None else self.feature_mask.clone()
        found = Batch(self.model, self.tokenizer, self.layers, inputs, self.token, targets, foils, mask)
        found._runs = self._runs  # the maps that a method computes serve the next one
        return found

    def layer_rows(self, maps: MapsClass) -> list[Tensor]:
        """The row of each example's token in each layer's map, `(batch, tokens)`, in the order of the layers' runs.

        Whole maps are used where another method has computed them. Otherwise only the wanted rows are computed.
        """
        if maps in self._runs:
            examples = torch.arange(len(self.token))
            return [one[examples, self.token] for one in self.whole_maps(maps)]
        run = maps(self.model, self.layers).run(self.inputs, feature_mask=self.feature_mask, token=self.token)
        return [one[:, 0] for _, one in run.maps]

    def whole_maps(self, maps: MapsClass) -> list[Tensor]:
        """All maps `(batch, out, in)`, one for each run of a layer: ALBERT's only layer runs many times."""
        return [one for _, one in self._run(maps).maps]

    def joined_rows(self, kind: JoinedClass, maps: MapsClass, all_layers: bool) -> list[Tensor]:
        """The row of each example's token in the joined maps, up to each layer or through all layers."""
        return kind(self.model, self.layers).join_run(
            self._run(maps), token=self.token, all_layers=all_layers, feature_mask=self.feature_mask
        )

    def joined_maps(self, kind: JoinedClass, maps: MapsClass, all_layers: bool) -> list[Tensor]:
        """The joined maps `(batch, out, in)`, up to each layer or through all layers."""
        return kind(self.model, self.layers).join_run(
            self._run(maps), all_layers=all_layers, feature_mask=self.feature_mask
        )

    def _run(self, maps: MapsClass) -> MapRun:
        if maps not in self._runs:
            self._runs[maps] = maps(self.model, self.layers).run(
                self.inputs, feature_mask=self.feature_mask, find_other_mixing=True
            )
        return self._runs[maps]


def gradient_rows(kind: Any, batch: Batch, **options: Any) -> list[Tensor]:
    """The scores of a Captum method on the word embeddings: the Euclidean norm of each token's vector, as shares."""
    (target, foil), method = explained_classes(batch), TokenAttribution(batch.model, kind, batch.tokenizer, reduce="l2")
    return [normalize_rows(method.attribute(batch.inputs, target=target, foil=foil, **options))]


def attention_gradient_rows(batch: Batch) -> list[Tensor]:
    """Attention times the positive gradient of the target's logit, one row for each layer."""
    target, foil = explained_classes(batch)
    run = LayerAttentionGradient(batch.model, batch.layers).run(
        batch.inputs, token=batch.token, target=target, foil=foil
    )
    return [one[:, 0] for _, one in run.maps]


def effect_rows(batch: Batch, together: bool) -> list[Tensor]:
    """How much the target's logit changes without each token's value: absolute changes, as shares.

    Args:
        batch: The batch.
        together: Whether values are zeroed in all layers at once. Otherwise in one layer after the other.
    """
    target, foil = explained_classes(batch)
    of = [ValueZeroingEffect(batch.model, layer) for layer in ([batch.layers] if together else batch.layers)]
    effects = [one.attribute(batch.inputs, target=target, foil=foil) for one in of]
    return [normalize_rows(one.abs()) for one in effects]


def gated_rows(kind: Any, batch: Batch, **options: Any) -> list[Tensor]:
    """The scores of a Captum method on value gates: absolute amounts, as shares. Random numbers have the seed 0."""
    (target, foil), ids = explained_classes(batch), batch.inputs["input_ids"]
    gated, mask = ValueGates(batch.model, batch.layers), batch.feature_mask
    features = torch.arange(ids.shape[1], device=ids.device)[None] if mask is None else mask
    member = features.unique(return_inverse=True)[1].expand_as(ids)  # the gate of each token
    named = {key: x for key, x in batch.inputs.items() if isinstance(x, Tensor) and x.ndim and len(x) == len(ids)}
    pairs = torch.tensor([target, foil or target], device=ids.device).transpose(0, 1)  # (example, 2, axis)

    def logit(gates: Tensor, member: Tensor, pairs: Tensor, *inputs: Tensor) -> Tensor:
        logits = gated(gates.gather(1, member), **batch.inputs | dict(zip(named, inputs, strict=True)))
        of_target, of_foil = (logits[(range(len(logits)), *one.T)] for one in pairs.unbind(1))
        return of_target if foil is None else of_target - of_foil

    options["additional_forward_args"] = (member, pairs, *named.values())
    return [normalize_rows(gate_scores(kind(logit), member, **options).abs()).gather(1, member)]


def gate_scores(method: Any, member: Tensor, **options: Any) -> Tensor:
    """The scores of a Captum method's object for gates that are all 1. Random numbers have the seed 0.

    Args:
        method: The object, of a function whose first argument holds the gates.
        member: The gate of each token, `(examples, tokens)`.
        options: Further arguments of its `attribute`.

    Returns:
        `(examples, gates)`.
    """
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        gates = torch.ones(len(member), int(member.max()) + 1, device=member.device)
        scores: Tensor = method.attribute(gates, **options)
    return scores.detach()


def token_gate_scores(kind: Any, run: Callable[[Tensor], Tensor], features: Tensor, **options: Any) -> Tensor:
    """The scores of the tokens of one text, `(1, tokens)`, by a class of Captum. Those of a feature share a gate.

    Args:
        kind: The class of Captum.
        run: Gates of tokens `(n, tokens)` -> the explained numbers `(n,)`.
        features: The feature of each token, `(1, tokens)`.
        options: Further arguments of `attribute`.
    """
    member = features.unique(return_inverse=True)[1]  # the gate of each token

    def explained(gates: Tensor) -> Tensor:
        return run(gates.gather(1, member.expand(len(gates), -1)))

    return gate_scores(kind(explained), member, **options).gather(1, member)


class GateScores(Described, Attribution):
    """A class of Captum on :class:`~captum_vz.ValueGates`, for one logit of a text.

    Args:
        forward_func: The model.
        layer: The layers whose values are gated.
        kind: The class of Captum.
        attention: "self", or "cross" for the attention of a decoder to its encoder.
    """

    def __init__(self, forward_func: Any, layer: Any, *, kind: Any, attention: str = "self") -> None:
        """See the class for the arguments."""
        super().__init__(forward_func)
        self.layer, self.kind, self.attention = layer, kind, attention

    def attribute(
        self, inputs: Mapping[str, Tensor], target: tuple[int, int], feature_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """The scores of the tokens `input_ids` for the logit `(token, class)`, `(1, tokens)`, with their signs."""
        gated, ids = ValueGates(self.forward_func, self.layer, attention=self.attention), inputs["input_ids"]
        features = torch.arange(ids.shape[1], device=ids.device)[None] if feature_mask is None else feature_mask
        return token_gate_scores(
            self.kind, lambda gates: gated(gates, inputs)[:, target[0], target[1]], features, **options
        )


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
        ArgumentError: A foil is the explained class.
    """
    with torch.no_grad():
        output = batch.model(**batch.inputs)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        answers = hasattr(output, "start_logits")
        raise UnsupportedLayerError(
            f"{type(batch.model).__name__} gives no logits, but the method explains a logit: "
            f"{'use captum_vz.explain, which takes answers.' if answers else 'pass a model with a head.'}"
        )
    places: list[tuple[int, ...]] = [()] * len(logits) if logits.ndim == 2 else [(token,) for token in batch.token]
    targets = batch.targets
    if targets is None:
        targets = [int(row[place].argmax()) for row, place in zip(logits, places, strict=True)]
    foils = batch.foils
    for target, foil in zip(targets, foils or (), strict=foils is not None):
        if target == foil:
            raise ArgumentError("foil is the class that is explained, so all scores would be 0: pass another foil.")
    return _indices(places, targets), None if foils is None else _indices(places, foils)


def _indices(places: list[tuple[int, ...]], classes: Sequence[int]) -> list[tuple[int, ...]]:
    return [(*place, number) for place, number in zip(places, classes, strict=True)]
