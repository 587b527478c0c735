"""Checks and conversions of the arguments of `attribute`, except `target` and `token`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel.scatter_gather import scatter

from captum_vz._engine import AttentionSite, find_layers
from captum_vz._private import (
    format_additional_forward_args,
    format_tensor_into_tuples,
    is_replica,
    modules_of,
    run_forward,
    tree_map,
    uncompiled,
)
from captum_vz.attr._call.misuse import (
    check_forward_func,
    check_inputs,
    check_no_embeddings,
    check_readable,
    unmasked_padding,
)
from captum_vz.attr._call.model_errors import explain_error
from captum_vz.errors import ArgumentError
from captum_vz.functional.groups import numbered

# A tensor or a tuple of tensors, as in Captum. Or a mapping, such as a tokenizer's BatchEncoding, passed by keyword.
Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any]


class Arguments(NamedTuple):
    """The arguments of :meth:`LayerMaps.attribute`, except `target` and `token`."""

    inputs: Inputs
    additional_forward_args: Any = None
    feature_mask: Tensor | None = None
    perturbations_per_eval: int | None = None
    show_progress: bool = False
    run: int | None = None


def token_input(inputs: Inputs) -> Any:
    """The input that holds the tokens: ids `(batch, tokens)` or embeddings `(batch, tokens, d)`. None: no tokens."""
    if isinstance(inputs, Mapping):
        return inputs.get("input_ids", inputs.get("inputs_embeds"))
    return inputs[0] if isinstance(inputs, tuple) and inputs else inputs


def tokens_of(inputs: Inputs) -> int | None:
    """The number of tokens in the inputs, padding included. None if the inputs hold no tokens."""
    text = token_input(inputs)
    return text.shape[1] if isinstance(text, Tensor) and text.dim() in (2, 3) else None


def end_of_inputs(site: AttentionSite, inputs: Inputs, token: Any = None) -> int | None:
    """The number of tokens in the inputs if the model appends padding. None: it appends none.

    The layer's record is given a warning for padding that no mask hides, and for tokens that the inputs lack.

    Raises:
        ArgumentError: The attention has other examples than the inputs, such as one part of a batch. Or `token` was
            passed, and the model adds tokens (prompt tuning), so it is unknown whether `token` counts these.
    """
    text, found, end = token_input(inputs), site.shape.batch, site.end_of_inputs(tokens_of(inputs))
    if not isinstance(text, Tensor) or is_replica(site.layer.layer):
        return end
    # Ids, embeddings and images have an axis of examples. Packed patches have none, and choices (of an answer) two.
    known = text.dim() in (3, 4) if text.is_floating_point() else text.dim() == 2
    known = known and site.streams is None  # streams may come before the examples
    if known and found not in text.shape[: 2 if site.attention.tokens_first else 1]:
        raise ArgumentError(
            f"The attention of {site.layer.name} has {found} example(s), but inputs has {len(text)}: expected the "
            "same. Pass a forward_func that gives the layer the whole batch, or one example at a time."
        )
    if site.layer.index == 0 and (not isinstance(inputs, tuple) or len(inputs) == 1):
        site.layer.warnings.extend(_unmasked_padding(site, inputs, text))
    if known and text.dim() < 4 and end is None:
        site.layer.warnings.extend(_added_tokens(site, inputs, token))
    return end


def _added_tokens(site: AttentionSite, inputs: Inputs, token: Any) -> list[str]:
    """A warning if a layer has more tokens than the inputs, or than the text beside an image.

    An error if `token` may count these or not.
    """
    named: dict[Any, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    given = list(named.values()) if named else list(inputs) if isinstance(inputs, tuple) else [inputs]
    tensors = [x for x in given if isinstance(x, Tensor) and x.dim() > 1]
    text = token_input(inputs)
    # Layers over images or over a decoder's tokens have other tokens.
    others = "decoder_input_ids" in named or len(site.layer.attentions) > 1 or site.attention.tokens_first
    lengths = {x.shape[1] for x in tensors}
    # Inputs in a tuple that have other lengths are other sequences.
    others = others or (isinstance(inputs, tuple) and len(lengths) > 1)
    count = site.shape.out
    if others or any(x.is_floating_point() for x in tensors if x is not text):
        beside = text is not None and not text.is_floating_point() and text.dim() == 2 and text.shape[1] < count
        if others or token is None or not beside:
            return []
        return [
            f"token is {token!r} and counts the {count} tokens of {site.layer.name}, not the {text.shape[1]} of the "
            "text: those of another input may come before or after them"
        ]
    length = max(lengths)
    # Transformers 5.24 renamed the argument.
    cached = any(named.get(name) is not None for name in ("cache", "past_key_values"))
    sources = count if cached else site.shape.sources + site.dropped_sources
    if max(count, sources) <= length:
        return []
    shown = f"{site.layer.name} has {count} output tokens and {sources} sources, but inputs has {length} tokens"
    if token is not None and count > length:
        raise ArgumentError(
            f"token is {token!r}, but {shown}. The model adds tokens (prompt tuning, [CLS], another input), and it is "
            "unknown where. Leave token None, and take the row from the map of all of the layer's tokens."
        )
    return [
        f"{shown}. Rows and columns count the tokens that the model or its cache adds (prompt tuning, a prefix, "
        "another input)"
    ]


def begins_with_padding(site: AttentionSite) -> bool:
    """Whether padding stands on the left of an example of the first layer's tokens, which are those of the inputs."""
    record, mask = site.layer, site.target_mask
    # Behind an encoder or a cache, the inputs hold other tokens as well.
    others = len(record.attentions) > 1 or site.shape.sources + site.dropped_sources != site.shape.out
    if record.index or is_replica(record.layer) or others or not record.states:
        return False
    return bool((~mask[:, 0] & mask.any(1)).any()) and record.states[0].shape[:2] == mask.shape


def _unmasked_padding(site: AttentionSite, inputs: Inputs, ids: Tensor) -> list[str]:
    """A warning if ids hold padding at an end, by the model's config, and the attention sees it."""
    if isinstance(inputs, Mapping) and inputs.get("attention_mask") is not None:
        return []
    config: Any = next(filter(None, (getattr(m, "config", None) for m in site.layer.layer.modules())), None)
    known = site.target_mask
    # A decoder that reads an encoder has other tokens than the inputs.
    if ids.is_floating_point() or ids.shape != known.shape or len(site.layer.attentions) > 1:
        return []
    return unmasked_padding(ids.to(known.device), config, known)


def examples_of(inputs: Any, additional_forward_args: Any, examples: Sequence[int], batch: int) -> tuple[Any, Any]:
    """The arguments of the user's call for some examples of the batch, in this order. Examples may come twice."""

    def pick(value: Any) -> Any:
        of_batch = isinstance(value, Tensor) and value.dim() and len(value) == batch
        return value[torch.tensor(examples, device=value.device)] if of_batch else value

    if isinstance(inputs, Mapping):
        return {name: tree_map(pick, value) for name, value in inputs.items()}, None
    further = format_additional_forward_args(additional_forward_args)
    return tree_map(pick, (format_tensor_into_tuples(inputs), further))


def as_layers(layer: Any) -> list[nn.Module]:
    """The checked modules of `layer`, which is a module or a list of modules."""
    layers = as_list(layer)
    wrong = [one for one in layers if not isinstance(one, nn.Module)]
    if wrong or not layers:
        shown = [repr(one) if isinstance(one, (str, int)) else f"of type {type(one).__name__}" for one in wrong]
        raise ArgumentError(
            f"layer is {', '.join(shown) or 'empty'}: pass a module of the model, or a list of modules. "
            "captum_vz.find_layers(model) returns all its Transformer layers, and model.get_submodule(name) one module."
        )
    walks = [modules_of(entry) for entry in layers]
    check_readable(walks)
    check_no_embeddings(walks)
    if len({id(entry) for entry in layers}) != len(layers):
        raise ArgumentError(
            "layer lists the same module more than once: expected distinct modules. List each module once, also if it "
            "runs several times in a pass."
        )
    parts = {id(module) for walk in walks for module in walk[1:]}
    inside = [type(entry).__name__ for entry in layers if id(entry) in parts]
    if inside:
        raise ArgumentError(
            f"layer lists modules that are part of others in it: {', '.join(inside)}. Pass either the modules or "
            "their parts, in separate calls."
        )
    # A compiled layer wraps the module that runs.
    return [uncompiled(entry) for entry in layers]


def default_layers(forward_func: Any, stack: str | None = None) -> list[nn.Module]:
    """The layers of a model where `layer` is None. `stack` chooses one of several stacks."""
    check_forward_func(forward_func, [])
    if not isinstance(forward_func, nn.Module):
        raise ArgumentError(
            "layer is None, but forward_func is a function, whose layers are not known: pass "
            "layer=captum_vz.find_layers(model), with the model that the function runs."
        )
    try:
        return find_layers(forward_func, stack)
    except ArgumentError as error:
        raise ArgumentError(
            f"layer is None, which means find_layers(model), but {error} Pass layer=find_layers(model, stack)."
        ) from error


def as_list(layer: Any) -> list[Any]:
    """The entries of a list of layers. A single layer becomes a list with one entry."""
    return list(layer) if isinstance(layer, (nn.ModuleList, list, tuple)) else [layer]


def bind_forward(forward_func: Callable[..., Any], inputs: Inputs, additional_forward_args: Any) -> Callable[[], Any]:
    """A function without arguments that calls `forward_func` with the user's arguments."""
    if isinstance(inputs, Mapping):
        if additional_forward_args is not None:
            raise ArgumentError(
                "inputs is a mapping, so its entries are passed by keyword: put further arguments into it, and leave "
                "additional_forward_args None."
            )
        tensors = {str(name): value for name, value in inputs.items()}
        check_inputs(inputs)
        _refuse_empty(tensors.values())
        return _explained(partial(forward_func, **tensors), inputs)
    if inputs is None:
        raise ArgumentError(
            "inputs is None: pass what forward_func takes, a tensor, a tuple of tensors, or a tokenizer's output."
        )
    check_inputs(inputs)
    formatted = format_tensor_into_tuples(inputs)
    _refuse_empty(formatted)
    return _explained(partial(run_forward, forward_func, formatted, None, additional_forward_args), inputs)


def _explained(forward: Callable[[], Any], inputs: Inputs) -> Callable[[], Any]:
    """`forward`, with errors that wrong inputs explain."""
    tokens = token_input(inputs)
    if tokens is None and isinstance(inputs, Mapping):
        tokens = inputs.get("decoder_input_ids")
    return ExplainedErrors(tokens)(forward)


class ExplainedErrors(ContextDecorator):
    """Name the mistake in the inputs, if the model fails in the `with` block because of it. See `explain_error`."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    # No generator: one that never starts would swallow an interruption when it is closed.
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            explain_error(error, self.tokens)


def _refuse_empty(inputs: Any) -> None:
    for value in inputs:
        if isinstance(value, Tensor) and 0 in value.shape[:2]:
            raise ArgumentError(
                f"inputs holds an empty tensor {tuple(value.shape)}: there is no token to explain. Pass at least one."
            )


class FeatureGroups:
    """A feature_mask with groups numbered from 0. Each layer gets its part, on its device."""

    def __init__(self, feature_mask: Any, device_ids: list[int] | None) -> None:
        self.mask: Tensor | None = None
        self.shares: dict[torch.device, Tensor] = {}
        self._known: dict[Any, Tensor] = {}  # by shape and device, one tensor for all layers
        if feature_mask is None:
            return
        feature_mask = numbered(feature_mask)
        if (
            not isinstance(feature_mask, Tensor)
            or feature_mask.dim() != 2
            or feature_mask.is_floating_point()
            or feature_mask.is_complex()
        ):
            raise ArgumentError(
                f"feature_mask is {_describe(feature_mask)}: pass integers of shape (1 or batch, source tokens), "
                "the same number for tokens that belong together."
            )
        self.mask = feature_mask.unique(return_inverse=True)[1]
        if device_ids and len(self.mask) > 1:
            self.shares = {share.device: share for share in scatter(self.mask, device_ids)}

    def of(self, site: AttentionSite, end: int | None = None) -> Tensor | None:
        """The groups of the sources of one attention, `(batch, in)`. Sources after `end` form an extra group."""
        if self.mask is None:
            return None
        batch, _, _, every = site.shape
        dropped = site.dropped_sources
        sources = dropped + (every if end is None else end)
        device = site.source_mask.device
        mask = self.shares.get(device, self.mask).to(device)
        shapes = dict.fromkeys(((1, sources), (batch, sources)))
        if mask.shape not in shapes:
            raise ArgumentError(
                f"feature_mask is {tuple(mask.shape)}, but the layer's attention has {batch} example(s) of {sources} "
                f"source tokens: pass integers of shape {' or '.join(map(str, shapes))}."
            )
        key = batch, every, dropped, end, device
        if key not in self._known:
            mask = mask[:, dropped:]
            filled = pad(mask, (0, every - mask.shape[1]), value=int(mask.max()) + 1)
            self._known[key] = filled.expand(batch, every)
        return self._known[key]


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
