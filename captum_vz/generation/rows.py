"""The rows of a method's maps that belong to generated tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from captum_vz._engine import find_layers
from captum_vz.attr import (
    ALTILogit,
    ALTIPlus,
    LayerAttentionGradient,
    LayerMaps,
    MapAggregation,
    ModelFreeAttribution,
    TokenAttribution,
    ValueZeroingEffect,
)
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.generation.texts import FinishedText


class Rows(NamedTuple):
    """The scores of all given and generated tokens for each generated token.

    Attributes:
        scores: `(n, m + n, layers)`. The last column is 0, because no token follows the last generated token.
        layers: The names of the layers.
    """

    scores: Tensor
    layers: tuple[str, ...]


def build_method(method: Any, model: Any, tokenizer: Any) -> Any:
    """The method of a class, or of a function of the model and its layers. An instance is returned as it is.

    A class of Captum becomes a :class:`~captum_vz.TokenAttribution`. In a model with an encoder, a class with the
    argument `attention` gets "cross", and methods without maps from the encoder are refused. A function is returned
    that makes :class:`LayerAttentionGradient` for each step.
    """
    if isinstance(method, Attribution):
        return _checked(method, model)
    kind: Any = method.func if isinstance(method, partial) else method
    of_class = inspect.isclass(kind)
    if of_class and issubclass(kind, TokenAttribution):
        return method(model, tokenizer=tokenizer)
    if of_class and issubclass(kind, ModelFreeAttribution):
        return _checked(method(causal=True), model)
    ours = of_class and kind.__module__.split(".")[0] != "captum"
    if of_class and issubclass(kind, Attribution) and not ours:
        return TokenAttribution(model, method, tokenizer)
    if not callable(method):
        raise ArgumentError(
            f"method is of type {type(method).__name__}: pass a class such as ValueZeroing, a function of (model, "
            "layers), or a method that was made of them."
        )
    options: dict[str, Any] = {}
    if _has_encoder(model):
        layers = find_layers(model, "decoder")
        if of_class and issubclass(kind, ALTIPlus):
            layers = [*find_layers(model, "encoder"), *layers]
        elif of_class:
            _check_sources(kind, getattr(method, "keywords", {}).get("attention", "cross"))
            options["attention"] = "cross"
    else:
        layers = find_layers(model)
    if of_class and issubclass(kind, LayerAttentionGradient):
        return partial(method, model, layers, **options)
    return _checked(method(model, layers, **options), model)


def rows_of(method: Any, text: FinishedText, device: Any, feature_mask: Tensor | None = None, **options: Any) -> Rows:
    """The rows of the generated tokens: from one pass over the finished text, or one call for each step.

    Methods that explain a logit with several runs of the model, or whose scores depend on the length of the text, are
    called for each step with the text so far.

    Args:
        method: What :func:`build_method` returned.
        text: The finished text.
        device: The device of the inputs.
        feature_mask: The feature of each source token, `(1, in)`. None: each token is its own feature.
        options: Further arguments of the method's `attribute`.
    """
    if feature_mask is not None:
        options["feature_mask"] = feature_mask.to(device)
    if _in_one_pass(method):
        steps = len(text.generated)
        found = _called(method, text, device, steps, options)
        maps = found if isinstance(found, list) else [found]
        scores = torch.stack([_columns(one[0].detach().cpu(), method, text, steps) for one in maps], dim=-1)
        _check_causal(scores, method, text)
    else:
        rows = []
        for step in range(1, len(text.generated) + 1):
            found = _called(method, text, device, step, _so_far(options, text, step))
            maps = found if isinstance(found, list) else [found]
            rows.append(
                torch.stack([_columns(one[0][None].detach().cpu(), method, text, step)[0] for one in maps], dim=-1)
            )
        scores = torch.stack(rows)
    return Rows(scores, _names(method, scores.shape[-1]))


def _called(method: Any, text: FinishedText, device: Any, steps: int, options: dict[str, Any]) -> Any:
    """The result of one call: the rows of all steps `(1, n, in)`, or the row of the last step `(1, in)`."""
    inputs = text.inputs(device, steps)
    next_token = text.generated[steps - 1]
    if isinstance(method, ALTILogit):
        positions = list(range(text.first, text.first + steps))
        return method.attribute(inputs, target=[(positions, list(text.generated))], **options)
    if isinstance(method, (ValueZeroingEffect, TokenAttribution)):
        return method.attribute(inputs, target=(text.first + steps - 1, next_token), **options)
    if isinstance(method, partial):
        method = method(objective=lambda output: output.logits[:, -1, next_token])
    rows: Any = slice(text.first, text.first + steps) if _in_one_pass(method) else text.first + steps - 1
    if isinstance(method, MapAggregation):
        options = {"all_layers": True, **options}
    return method.attribute(inputs, token=rows, **options)


def _in_one_pass(method: Any) -> bool:
    """Whether rows of the finished text equal rows of the text so far."""
    several_runs = isinstance(method, (ValueZeroingEffect, TokenAttribution, LayerAttentionGradient, partial))
    return not several_runs and not getattr(method, "per_receptive_field", False)


def _so_far(options: dict[str, Any], text: FinishedText, step: int) -> dict[str, Any]:
    """The options of a step. The feature mask of the whole text ends where the text of the step ends."""
    mask = options.get("feature_mask")
    if mask is None or (text.encoder_decoder and mask.shape[1] == len(text.prompt.ids)):
        return options
    return {**options, "feature_mask": mask[:, : mask.shape[1] - len(text.generated) + step]}


def _columns(rows: Tensor, method: Any, text: FinishedText, steps: int) -> Tensor:
    """Rows `(n, in)` with a column for each given and each generated token, `(n, m + n)`."""
    given = len(text.conditions)
    of_encoder = text.encoder_decoder and not isinstance(method, ALTIPlus)
    wanted = len(text.prompt.ids) if of_encoder else given + steps - 1
    if rows.shape[1] != wanted:
        raise UnsupportedLayerError(
            f"The rows of {_title(method)} have {rows.shape[1]} columns, but the text has {wanted} tokens: the model "
            "adds tokens, or merges them. Such models cannot be explained token by token."
        )
    columns = rows.new_zeros(len(rows), given + len(text.generated))
    columns[:, :wanted] = rows
    return columns


def _check_causal(scores: Tensor, method: Any, text: FinishedText) -> None:
    """Refuse rows that depend on later tokens, which a growing text does not have."""
    if isinstance(method, ModelFreeAttribution) and not method.causal:
        raise ArgumentError(f"{_title(method)} is not causal: pass {_title(method)}(causal=True).")
    given, steps = len(text.conditions), len(scores)
    later = torch.ones(steps, steps).triu().bool()
    if (scores[:, given:] != 0)[later].any():
        raise UnsupportedLayerError(
            "The model is not causal: rows of generated tokens depend on later tokens, so that one pass over the "
            "finished text differs from the passes of its generation. Pass a causal model."
        )


def _checked(method: Any, model: Any) -> Any:
    """Refuse methods of another model, and methods whose objective belongs to one step."""
    if not isinstance(method, Attribution):
        raise ArgumentError(
            f"method returned a {type(method).__name__}: pass a class such as ValueZeroing, or a function of (model, "
            "layers) that returns such a method."
        )
    maps = getattr(method, "maps", method)
    if isinstance(maps, LayerAttentionGradient):
        raise ArgumentError(
            "LayerAttentionGradient explains one objective, but each generated token has a logit of its own. Pass the "
            "class, from which a method is made for each token."
        )
    known = (LayerMaps, MapAggregation, ModelFreeAttribution, ALTILogit, ValueZeroingEffect, TokenAttribution)
    if not isinstance(method, known):
        raise ArgumentError(
            f"{type(method).__name__} takes no token ids: pass the class, such as captum.attr.IntegratedGradients, or "
            "a TokenAttribution."
        )
    if _has_encoder(model) and not isinstance(method, (ALTIPlus, TokenAttribution)):
        _check_sources(type(method), getattr(method, "attention", None))
    forward = getattr(method, "forward_func", None)
    if isinstance(forward, nn.Module) and forward is not model and all(forward is not one for one in model.modules()):
        raise ArgumentError(f"{_title(method)} explains another model than the one given. Make it of this model.")
    return method


def _has_encoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _check_sources(kind: Any, attention: Any) -> None:
    """Refuse a method whose sources are not the tokens of the encoder, which are the prompt.

    Args:
        kind: The class of the method.
        attention: The attention that the method explains.
    """
    name = kind.__name__
    if issubclass(kind, MapAggregation) or "attention" not in inspect.signature(kind).parameters:
        raise ArgumentError(
            f"{name} has no maps from an encoder to its decoder: pass ALTIPlus, ValueZeroing, LayerAttention or "
            "ValueZeroingEffect for a model with an encoder."
        )
    if not (isinstance(attention, str) and attention == "cross"):
        shown = repr(attention) if isinstance(attention, str) else "a module"
        raise ArgumentError(
            f"attention of {name} is {shown}, but only the cross-attention of the decoder has the tokens of the prompt "
            f"as sources. Pass the class {name}, or make the method with attention='cross'."
        )


def _names(method: Any, count: int) -> tuple[str, ...]:
    if isinstance(method, (ALTILogit, ValueZeroingEffect, TokenAttribution)):
        return ("output",)
    if isinstance(method, MapAggregation):
        return ("layer 0", *(f"layers 0 to {index}" for index in range(1, count)))
    return tuple(f"layer {index}" for index in range(count))


def _title(method: Any) -> str:
    kind: Callable[..., Any] = method.func if isinstance(method, partial) else type(method)
    return str(getattr(kind, "__name__", kind))
