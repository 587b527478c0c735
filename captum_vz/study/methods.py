"""The methods that can be compared, by their names, and what they say about a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from captum.attr import InputXGradient, IntegratedGradients, Saliency, ShapleyValueSampling
from torch import Tensor

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
    ValueZeroing,
    ValueZeroingEffect,
    ValueZeroingRollout,
)
from captum_vz._names import chosen_names
from captum_vz.errors import ArgumentError
from captum_vz.study.scoring import (
    Batch,
    GateScores,
    JoinedClass,
    MapsClass,
    alti_logit_rows,
    attention_gradient_rows,
    effect_rows,
    gated_rows,
    gradient_rows,
)

#: What joined maps add for the residual connection: half of each row, nothing, or the choice of the method's paper.
RESIDUALS: Final = (0.5, None, "paper")
#: The residual of methods whose maps hold the residual connection, and of methods that join no maps.
INSIDE: Final = "inside"


def encoder_of(model: Any) -> Any:
    """The encoder of a model that has an encoder and a decoder; any other model as it is."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if both else model


def effect_of_layer(model: Any, layers: Sequence[Any], layer: int = -1) -> ValueZeroingEffect:
    """The effect of the values of one layer."""
    return ValueZeroingEffect(model, layers[layer])


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
        on_gates: The class of Captum that explains :class:`~captum_vz.ValueGates`, if it is such a method.
        options: Further arguments of `attribute` for a text.
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
    on_gates: Any = None
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
    def is_signed(self) -> bool:
        """Whether its scores of one text are amounts of an output, with signs, and no shares that sum to 1."""
        return self.explains_output and (self.on_gates or self.of_text) not in (None, LayerAttentionGradient)

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


def _on_gates(title: str, kind: Any, **options: Any) -> Method:
    """A method of Captum on value gates."""
    rows = partial(gated_rows, kind, **options)
    of_text = partial(GateScores, kind=kind)
    return Method(title, rows, explains_output=True, slow=True, of_text=of_text, on_gates=kind, options=options)


def baseline_method(title: str, kind: Any) -> Method:
    """A method that does not look at the model."""

    def rows(batch: Batch) -> list[Tensor]:
        causal = any(getattr(module, "is_causal", False) for module in batch.layers[0].modules())  # in transformers
        return [kind(causal=causal).attribute(batch.inputs, feature_mask=batch.feature_mask, token=batch.token)]

    return Method(title, rows, of_text=kind)


def _norm_rollout(model: Any, layers: Any, residual: Any = 0.5) -> Rollout:
    """Norms of what the attention alone sums. The residual connection is added as for attention weights."""
    return Rollout(LayerAttentionNorm(model, layers), residual=residual)


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
    "value-zeroing-shapley": _on_gates(
        "Value Zeroing, Shapley", ShapleyValueSampling, n_samples=25, perturbations_per_eval=16
    ),
    "value-zeroing-integrated": _on_gates(
        "Value Zeroing, integrated", IntegratedGradients, n_steps=50, internal_batch_size=256
    ),
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
