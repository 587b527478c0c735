"""The list of methods: `compare`, studies, the command line and the tests read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from captum.attr import InputXGradient, IntegratedGradients, Saliency
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
from captum_vz.study.methods.batch import Batch, JoinedClass, MapsClass
from captum_vz.study.methods.names import chosen_names
from captum_vz.study.methods.outputs import (
    alti_logit_rows,
    attention_gradient_rows,
    effect_of_layer,
    effect_rows,
    gradient_rows,
)


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

    @property
    def generative(self) -> Any:
        """What :func:`~captum_vz.generation.attribute_generation` takes; None if it cannot run this method."""
        return self.joined or self.maps or self.of_text

    def scope(self, layer: int) -> str:
        """The layers whose scores are shown if `layer` is asked for, such as "layer 3" or "layers 0 to 3"."""
        if not self.layered:
            return "" if self.maps is None and not self.explains_output else "all layers"
        return f"layers 0 to {layer}" if self.joined is not None and layer else f"layer {layer}"


def _layer(title: str, maps: MapsClass, slow: bool = False) -> Method:
    """A method with one map for each layer."""
    return Method(title, lambda batch: batch.layer_rows(maps), layered=True, maps=maps, slow=slow)


def _joined(title: str, kind: JoinedClass, maps: MapsClass, *, layered: bool = True, slow: bool = False) -> Method:
    """A method that joins the layers' maps, up to each layer or only through all layers."""
    rows = partial(Batch.joined_rows, kind=kind, maps=maps, all_layers=layered)
    return Method(title, rows, layered=layered, maps=maps, joined=kind, slow=slow)


def _effect(title: str, together: bool) -> Method:
    rows, of_text = partial(effect_rows, together=together), ValueZeroingEffect if together else effect_of_layer
    return Method(title, rows, layered=not together, explains_output=True, of_text=of_text)


def _gradient(title: str, kind: Any, reduce: Any = "sum", **options: Any) -> Method:
    """A Captum method on the word embeddings. For generated text, `reduce` joins the entries of each token's vector."""
    of_text = partial(TokenAttribution, method=kind, reduce=reduce)
    rows = partial(gradient_rows, kind, **options)
    return Method(title, rows, explains_output=True, slow=True, of_text=of_text, options=options)


def _baseline(title: str, kind: Any) -> Method:
    """A method that does not look at the model."""

    def rows(batch: Batch) -> list[Tensor]:
        causal = any(getattr(module, "is_causal", False) for module in batch.layers[0].modules())  # in transformers
        return [kind(causal=causal).attribute(batch.inputs, token=batch.token)]

    return Method(title, rows, of_text=kind)


def _norm_rollout(model: Any, layers: Any) -> Rollout:
    """Norms of what the attention alone sums. The residual connection is added as for attention weights."""
    return Rollout(LayerAttentionNorm(model, layers), residual=0.5)


_encoder_norm: Final = partial(LayerAttentionNorm, include="encoder")
# With 64 probes the relative standard deviation of a score is at most about half of sqrt(2 / 64), or 0.09.
_hidden: Final = partial(HiddenTokenAttribution, probes=64)

#: All methods by their names. To add a method, add one row.
METHODS: Final[dict[str, Method]] = {
    "value-zeroing": _layer("Value Zeroing", ValueZeroing),
    "value-zeroing-rollout": _joined("Value Zeroing, rollout", ValueZeroingRollout, ValueZeroing),
    "attention": _layer("attention", LayerAttention),
    "attention-rollout": _joined("attention rollout", AttentionRollout, LayerAttention),
    "attention-norm": _layer("attention norm", LayerAttentionNorm),
    "attention-norm-rollout": _joined("attention norm, rollout", _norm_rollout, LayerAttentionNorm),
    "globenc": _joined("GlobEnc", GlobEnc, _encoder_norm),
    "globenc-layer": _layer("GlobEnc, a layer", _encoder_norm),
    "alti": _joined("ALTI", ALTI, LayerALTI),
    "alti-layer": _layer("ALTI, a layer", LayerALTI),
    "value-zeroing-effect": _effect("Value Zeroing's effect", together=True),
    "value-zeroing-effect-layer": _effect("Value Zeroing's effect, a layer", together=False),
    "attention-flow": _joined("attention flow", AttentionFlow, LayerAttention, layered=False, slow=True),
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
    "hidden-token-attribution": _layer("hidden token attribution", _hidden, slow=True),
    "alti-logit": Method("ALTI-Logit", alti_logit_rows, explains_output=True, slow=True, of_text=ALTILogit),
    "random": _baseline("random", RandomAttribution),
    "position": _baseline("position", PositionAttribution),
}

#: The methods of `methods=None`: all except gradients, attention flow, hidden token attribution and ALTI-Logit.
DEFAULT_METHODS: Final = tuple(name for name, method in METHODS.items() if not method.slow)


def check_methods(methods: Iterable[str] | None) -> tuple[str, ...]:
    """The names, in the order given; None: :data:`DEFAULT_METHODS`.

    Raises:
        ValueError: A name is not in :data:`METHODS`, or there is no name.
    """
    return chosen_names("methods", methods, METHODS, DEFAULT_METHODS)


def joined_first(methods: Iterable[str]) -> list[str]:
    """The names, methods that join maps first. Methods that need rows of these maps then find them."""
    return sorted(methods, key=lambda name: METHODS[name].joined is None)


def family_of(name: str) -> str:
    """What kind of method a name is of, for pictures that keep kinds together: empty if the name is unknown."""
    method = METHODS.get(name)
    if method is None:
        return ""
    if method.joined is not None:
        return "joins layers"
    if method.explains_output:
        return "explains the output"
    return "a layer" if method.maps is not None else "without a model"


def rollout_of(method: Method) -> Method | None:
    """The first method of the registry that joins the layer maps of `method`; itself, if it joins them."""
    if method.joined is not None or method.maps is None:
        return method if method.joined is not None else None
    return next((one for one in METHODS.values() if one.joined is not None and one.maps is method.maps), None)
