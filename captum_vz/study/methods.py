"""The methods that can be compared, by their names, and what they say about a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency, ShapleyValueSampling
from torch import Tensor, nn

from captum_vz import (
    ALTI,
    ALTILogit,
    AttentionFlow,
    AttentionRollout,
    GlobEnc,
    HiddenTokenAttribution,
    LayerALTI,
    LayerAttention,
    LayerAttentionGradient,
    LayerAttentionNorm,
    PositionAttribution,
    RandomAttribution,
    Rollout,
    TokenAttribution,
    ValueGates,
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz._names import chosen_names
from captum_vz.attr import LayerMaps, MapAggregation, MapRun
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import normalize_rows

#: A class of layer maps, or a function with its options, called with the model and the layers.
MapsClass = Callable[..., LayerMaps]

#: A class that joins the maps of many layers, or a function, called with the model and the layers.
JoinedClass = Callable[..., MapAggregation]

#: What joined maps add for the residual connection: half of each row, nothing, or the choice of the method's paper.
RESIDUALS: Final = (0.5, None, "paper")
#: The residual of methods whose maps hold the residual connection, and of methods that join no maps.
INSIDE: Final = "inside"


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


def encoder_of(model: Any) -> Any:
    """The encoder of a model that has an encoder and a decoder; any other model as it is."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if both else model


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


def effect_of_layer(model: Any, layers: Sequence[Any], layer: int = -1) -> ValueZeroingEffect:
    """The effect of the values of one layer."""
    return ValueZeroingEffect(model, layers[layer])


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

    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        gates = torch.ones(len(ids), int(member.max()) + 1, device=ids.device)
        options["additional_forward_args"] = (member, pairs, *named.values())
        return [normalize_rows(kind(logit).attribute(gates, **options).detach().abs()).gather(1, member)]


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


@dataclass(frozen=True)
class Method:
    """One row of the registry.

    Attributes:
        title: Its name in a sentence or a figure.
        rows: Computes its rows for a batch: for each layer, or once, the row of each example's token,
            `(batch, tokens)`, not negative, summing to 1.
        layered: Whether there are rows for each layer; of joined maps, up to each layer.
        maps: The class of the layer maps that the method shows or joins. None: it has no layer maps.
        joined: The class that joins these maps. None: the method shows each layer's map by itself.
        explains_output: Whether it explains a class of the model's output. In a study it is then given the two forms
            of the target word. The others explain a token's state, and are given no forms.
        slow: Whether `methods=None` leaves it out, because it takes gradients, or a flow for each pair of tokens, or
            refuses most kinds of models.
        of_text: What :func:`~captum_vz.generation.attribute_generation` takes for generated text, if there is neither
            `joined` nor `maps`. Methods that explain an output explain the logit of each new token. None: the method
            cannot explain generated text.
        options: Further arguments of `attribute` for generated text.
        version: Names the code of a method of your own. None: a digest of its source does.
        own: Whether it is a method of your own, not of this package.
        source: The class, object or function that it was made of. None: `rows`.
        residual: What `joined` adds to each map for the residual connection: 0.5 or None, see
            :func:`~captum_vz.functional.add_residual`. "inside": the maps hold it, or no maps are joined.
    """

    title: str
    rows: Callable[[Batch], list[Tensor]]
    layered: bool = False
    maps: MapsClass | None = None
    joined: JoinedClass | None = None
    explains_output: bool = False
    slow: bool = False
    of_text: Any = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    version: str | None = None
    own: bool = False
    source: Any = None
    residual: float | str | None = INSIDE

    def with_residual(self, residual: Any) -> Method:
        """The method with another `residual`; "paper": its own. Methods whose maps hold the residual are unchanged."""
        if isinstance(residual, bool) or residual not in RESIDUALS:
            raise ArgumentError(f"residual is {residual!r}: pass 0.5, None or 'paper'.")
        if self.residual == INSIDE or residual in ("paper", self.residual):
            return self
        assert self.joined is not None and self.maps is not None
        kind = partial(self.joined, residual=residual)
        rows = partial(Batch.joined_rows, kind=kind, maps=self.maps, all_layers=self.layered)
        return replace(self, rows=rows, joined=kind, residual=residual)

    @property
    def generative(self) -> Any:
        """What :func:`~captum_vz.generation.attribute_generation` takes; None if it cannot run this method."""
        return self.joined or self.maps or self.of_text

    def scope(self, layer: int) -> str:
        """What is shown if `layer` is asked for, such as "layer 3" or "layers 0 to 3, residual 0.5"."""
        added = residual_text(self.residual)
        if not self.layered:
            found = "" if self.maps is None and not self.explains_output else "all layers"
        else:
            found = f"layers 0 to {layer}" if self.joined is not None and layer else f"layer {layer}"
        return ", ".join(filter(None, [found, added]))


def residual_text(residual: float | str | None) -> str:
    """What joined maps add for the residual connection, in words; empty if the maps hold it."""
    if residual == INSIDE:
        return ""
    return "no residual" if residual is None else f"residual {residual}"


def layer_method(title: str, maps: MapsClass, slow: bool = False) -> Method:
    """A method with one map for each layer."""
    return Method(title, lambda batch: batch.layer_rows(maps), layered=True, maps=maps, slow=slow)


def _joined(title: str, kind: JoinedClass, maps: MapsClass, residual: Any = INSIDE, layered: bool = True) -> Method:
    """A method that joins the layers' maps, up to each layer or, which is slow, only through all layers."""
    rows = partial(Batch.joined_rows, kind=kind, maps=maps, all_layers=layered)
    return Method(title, rows, layered=layered, maps=maps, joined=kind, slow=not layered, residual=residual)


def _effect(title: str, together: bool) -> Method:
    rows, of_text = partial(effect_rows, together=together), ValueZeroingEffect if together else effect_of_layer
    return Method(title, rows, layered=not together, explains_output=True, of_text=of_text)


def _gradient(title: str, kind: Any, reduce: Any = "sum", **options: Any) -> Method:
    """A Captum method on the word embeddings. For generated text, `reduce` joins the entries of each token's vector."""
    of_text = partial(TokenAttribution, method=kind, reduce=reduce)
    rows = partial(gradient_rows, kind, **options)
    return Method(title, rows, explains_output=True, slow=True, of_text=of_text, options=options)


def baseline_method(title: str, kind: Any) -> Method:
    """A method that does not look at the model."""

    def rows(batch: Batch) -> list[Tensor]:
        causal = any(getattr(module, "is_causal", False) for module in batch.layers[0].modules())  # in transformers
        return [kind(causal=causal).attribute(batch.inputs, feature_mask=batch.feature_mask, token=batch.token)]

    return Method(title, rows, of_text=kind)


def _norm_rollout(model: Any, layers: Any, residual: Any = 0.5) -> Rollout:
    """Norms of what the attention alone sums. The residual connection is added as for attention weights."""
    return Rollout(LayerAttentionNorm(model, layers), residual=residual)


_shapley: Final = partial(gated_rows, ShapleyValueSampling, n_samples=25, perturbations_per_eval=16)
_integrated: Final = partial(gated_rows, IntegratedGradients, n_steps=50, internal_batch_size=256)
_encoder_norm: Final = partial(LayerAttentionNorm, include="encoder")
# With 64 probes the relative standard deviation of a score is at most about half of sqrt(2 / 64), or 0.09.
_hidden: Final = partial(HiddenTokenAttribution, probes=64)

#: All methods by their names. To add a method, add one row.
METHODS: Final[dict[str, Method]] = {
    "value-zeroing": layer_method("Value Zeroing", ValueZeroing),
    "value-zeroing-rollout": _joined("Value Zeroing, rollout", ValueZeroingRollout, ValueZeroing, None),
    "attention": layer_method("attention", LayerAttention),
    "attention-rollout": _joined("attention rollout", AttentionRollout, LayerAttention, 0.5),
    "attention-norm": layer_method("attention norm", LayerAttentionNorm),
    "attention-norm-rollout": _joined("attention norm, rollout", _norm_rollout, LayerAttentionNorm, 0.5),
    "globenc": _joined("GlobEnc", GlobEnc, _encoder_norm),
    "globenc-layer": layer_method("GlobEnc, a layer", _encoder_norm),
    "alti": _joined("ALTI", ALTI, LayerALTI),
    "alti-layer": layer_method("ALTI, a layer", LayerALTI),
    "value-zeroing-effect": _effect("Value Zeroing's effect", together=True),
    "value-zeroing-effect-layer": _effect("Value Zeroing's effect, a layer", together=False),
    "value-zeroing-shapley": Method("Value Zeroing, Shapley", _shapley, explains_output=True, slow=True),
    "value-zeroing-integrated": Method("Value Zeroing, integrated", _integrated, explains_output=True, slow=True),
    "attention-flow": _joined("attention flow", AttentionFlow, LayerAttention, 0.5, layered=False),
    "attention-gradient": Method(
        "attention × gradient",
        attention_gradient_rows,
        layered=True,
        explains_output=True,
        slow=True,
        of_text=LayerAttentionGradient,
    ),
    "saliency": _gradient("saliency", Saliency, reduce="l2", abs=False),
    "input-x-gradient": _gradient("input × gradient", InputXGradient),
    "integrated-gradients": _gradient(
        "integrated gradients", IntegratedGradients, baselines="pad", n_steps=50, internal_batch_size=256
    ),
    "hidden-token-attribution": layer_method("hidden token attribution", _hidden, slow=True),
    "alti-logit": Method("ALTI-Logit", alti_logit_rows, explains_output=True, slow=True, of_text=ALTILogit),
    "random": baseline_method("random", RandomAttribution),
    "position": baseline_method("position", PositionAttribution),
}

#: The methods of a study by default: all except gradients, value gates, attention flow, hidden token attribution and
#: ALTI-Logit.
DEFAULT_METHODS: Final = tuple(name for name, method in METHODS.items() if not method.slow)

#: The methods that :func:`~captum_vz.study.compare` shows by default: the columns fit on a page.
COMPARED_METHODS: Final = (
    "value-zeroing",
    "value-zeroing-rollout",
    "value-zeroing-effect",
    "attention-rollout",
    "alti",
)


def check_methods(methods: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: :data:`DEFAULT_METHODS`.

    Raises:
        ArgumentError: A name is not in :data:`METHODS`, or there is no name.
    """
    return chosen_names("methods", methods, METHODS, DEFAULT_METHODS)


def joined_first(names: Iterable[str], methods: Mapping[str, Method]) -> list[str]:
    """The names, methods that join maps first. Methods that need rows of these maps then find them."""
    return sorted(names, key=lambda name: methods[name].joined is None)


def rollout_of(method: Method) -> Method | None:
    """The first method of the registry that joins the layer maps of `method`; itself, if it joins them."""
    if method.joined is not None or method.maps is None:
        return method if method.joined is not None else None
    return next((one for one in METHODS.values() if one.joined is not None and one.maps is method.maps), None)
