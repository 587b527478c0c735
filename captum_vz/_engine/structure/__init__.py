"""The attention of a recorded layer that is explained, its layout, and why none can be explained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from captum_vz._engine.capture import AttentionRecord, AttentionShape, LayerRecord
from captum_vz._engine.capture.layer_runner import (
    LayerRunner,
    Streams,
    find_streams,
    is_half,
    recorded_in_float32,
    tokens_in_caches,
)
from captum_vz._engine.numerics import all_weights, once_a_pass
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_finite, not_finite
from captum_vz._engine.structure.dependence import (
    check_named_values,
    first_tokens,
    mixes_outside,
    reads_other_states,
    reads_own_states,
    values_depend_on_own_position,
    values_follow_token_order,
)
from captum_vz._engine.structure.find_layers import is_stack
from captum_vz._engine.structure.layout import Windows, find_windows, padding_masks
from captum_vz._engine.structure.modules import is_library_code, matrix, once_a_kind
from captum_vz._private import modules_of
from captum_vz.errors import RefusedError, UnsupportedLayerError


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """The attention that is explained, and what is known of it."""

    layer: LayerRecord  # the record of the layer
    attention: AttentionRecord  # The record of the attention. With `windows`, it spans the positions of the layer.
    target_mask: Tensor  # which rows are no padding, bool `(batch, out)`
    source_mask: Tensor  # which sources are no padding, bool `(batch, in)`
    streams: Streams | None = None  # The layout of a layer whose tokens have several vectors each. None: they have one.
    # Where the positions are, if the attention sees them in windows. None: it sees tokens.
    windows: Windows | None = None

    @property
    def shape(self) -> AttentionShape:
        """The sizes of the map."""
        return self.attention.shape

    @property
    def output(self) -> Tensor:
        """The hidden states that the layer returned, `(batch, out, d)`."""
        tokens = self.attention.batch_first if (layout := self.windows or self.streams) is None else layout.tokens
        return tokens(self.layer.first_output)

    @cached_property
    def dropped_sources(self) -> int:
        """How many tokens came before the first source, and are no longer in a key-value cache with a window."""
        own = self.shape.sources - self.layer.encoder_sources(self.attention)
        module = self.attention.module
        if getattr(module, "layer_idx", None) is None or self.attention is not self.layer.attentions[0]:
            return 0
        return max(0, tokens_in_caches(module, (self.layer.args, self.layer.kwargs)) - own)

    def runner(self) -> LayerRunner:
        """Runs the layer again, with one vector a token."""
        return LayerRunner(self.layer, self.streams)

    def weights(self) -> Tensor:
        """The attention weights, `(batch, head, out, in)`. UnsupportedLayerError: they cannot be read."""
        weights = self.attention.weights
        if weights is None:
            reason = "its family computes attention inline"
            if self.attention.calls > 1:
                reason = f"it is computed in {self.attention.calls} parts, each with weights of its own"
            elif self.windows is not None:
                reason = "it sees the layer's tokens in windows"
            raise UnsupportedLayerError(
                f"The attention weights of {type(self.attention.module).__name__} cannot be read: {reason}. "
                "ValueZeroing can explain it, because it needs no weights."
            )
        if not is_library_code(self.layer) and not self.follows_token_order():
            raise UnsupportedLayerError(
                f"The attention of {self.layer.name} sees its tokens in another order, so its weights are not those of "
                "the layer's tokens. Use ValueZeroing, which finds this order."
            )
        weights = all_weights(weights)
        if not is_finite(weights):
            raise RefusedError(f"The attention weights of {self.layer.name} have {not_finite(weights.dtype)}")
        return weights

    def end_of_inputs(self, tokens: int | None) -> int | None:
        """Where the padding begins that the model itself added after `tokens` tokens. None: it added none."""
        _, _, out, sources = self.shape
        if not self.attention.model_pads or tokens is None or not tokens < out == sources:
            return None
        return None if self.target_mask[:, tokens:].any() or self.source_mask[:, tokens:].any() else tokens

    def follows_token_order(self) -> bool:
        """Whether values stand in the order of the tokens that they are made of."""
        place = self.attention.calls_before, self.attention.inline is None
        return once_a_kind(self.layer, place, values_follow_token_order, self.runner(), self.attention)

    def is_reordered(self) -> bool:
        """Whether the attention has all of the layer's tokens, one each, but in another order."""
        one = self.attention
        if len(self.layer.attentions) > 1 or one.calls > 1 or one.tokens_first or self.windows is not None:
            return False
        return one.shape.out == one.shape.sources and not self.follows_token_order()

    def in_windows(self) -> AttentionSite:
        """This site, with positions found by runs of the layer. See `find_windows`."""
        attention, windows = _over_positions(self.layer, self.attention)
        return replace(self, attention=attention, windows=windows)

    def in_float32(self) -> AttentionSite:
        """This site, with a layer in half precision recorded once more in float32. Masks stay the same."""
        if not is_half(self.layer):
            return self
        # With windows, the attention is the layer's only one, spread over its positions.
        number = 0 if self.windows is not None else self.layer.attentions.index(self.attention)
        self.layer.module_io.clear()
        layer = recorded_in_float32(self.layer)
        attention = layer.attentions[number]
        windows = None
        if self.windows is not None:
            attention, windows = _over_positions(layer, attention)
        return replace(self, layer=layer, attention=attention, windows=windows)


def attention_site(layer: LayerRecord, attention: str, streams: bool = False) -> AttentionSite:
    """The site of the attention that is meant: "self", "cross", or a dot and the name of a module of the layer.

    Names of several modules, which have some heads each, are separated by spaces. With `streams`, tokens may have
    several vectors each. UnsupportedLayerError: the layer called no attention that can be read, or not the one that is
    asked for, or the layout of its tokens is unknown. RefusedError: it returned NaN.
    """
    output = layer.first_output
    if not is_finite(output):
        advice = " torch gives NaN to tokens that see nothing: pad on the right, or pass need_weights=False."
        advice *= any(isinstance(one.module, nn.MultiheadAttention) for one in layer.attentions)
        raise RefusedError(f"{layer.name} returned {not_finite(output.dtype)}{advice}")
    number = 1
    while number < len(layer.attentions):  # one forward may call its own attention in parts
        if layer.attentions[number].repeated and reads_own_states(LayerRunner(layer), layer.attentions[number]):
            layer.merge(number)
        else:
            number += 1
    chosen = _choose(layer, attention)
    if not layer.rearranges(chosen):
        return _site(layer, chosen)
    layout = find_streams(layer, chosen)
    reason = f"the layer has {len(layer.attentions)} attentions"
    is_prompt = layout is not None and layout.count == 1
    if layout is None or not (is_prompt or values_depend_on_own_position(LayerRunner(layer, layout), chosen)):
        try:
            if len(layer.attentions) == 1:
                of_positions, windows = _over_positions(layer, chosen)
                return _site(layer, of_positions, windows=windows)
        except CannotReplayError as error:
            reason = str(error)
    if layout is not None:  # also where the values are those of another layer
        if not streams:
            raise UnsupportedLayerError(
                f"The layer {layer.name} carries several vectors of each token in streams, "
                f"{tuple(layer.states[0].shape)}, and this method is for one vector a token. Use ValueZeroing."
            )
        layer.layout = "streams"
        return _site(layer, chosen, streams=layout)
    raise UnsupportedLayerError(
        f"{layer.name} returned {tuple(layer.first_output.shape)}, but its attention computed "
        f"{(chosen.shape.batch, chosen.shape.out)} (batch, tokens). Expected one vector for each token, or windows of "
        f"one attention, but {reason}. Pass a single Transformer block, which does not attend over space and time."
    )


def _site(
    layer: LayerRecord, attention: AttentionRecord, streams: Streams | None = None, windows: Windows | None = None
) -> AttentionSite:
    """The site of an attention, with the masks of its padding."""
    (batch, _, out, sources), device = attention.shape, attention.values.device
    masks = once_a_pass(_all_tokens, batch, out, device), once_a_pass(_all_tokens, batch, sources, device)
    # An attention over positions, which it sees in windows, is none of the layer's, and has no mask.
    if windows is None and any(one.visible is not None for one in layer.attentions):
        masks = padding_masks(layer, attention, *masks)
    return AttentionSite(layer, attention, *masks, streams, windows)


def _all_tokens(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.ones(batch, tokens, dtype=torch.bool, device=device)


def _over_positions(layer: LayerRecord, attention: AttentionRecord) -> tuple[AttentionRecord, Windows]:
    """An attention that sees windows, as an attention over the layer's own positions."""
    windows = find_windows(layer, attention)
    batch, out, sources = windows.shape
    layer.layout = "windows"
    shape = AttentionShape(batch, attention.shape.heads, out, sources)
    return replace(attention, shape=shape, visible=None, causal=False, weights=None, context=None), windows


def _choose(layer: LayerRecord, attention: str) -> AttentionRecord:
    """The record of the attention that is meant."""
    if not layer.attentions:
        raise UnsupportedLayerError(_why_none(layer))
    names = attention[1:].split() if attention.startswith(".") else []
    chosen = _of_modules(layer, names) if names else _self_or_cross(layer, attention)
    named = names or ([] if layer.given is None else [one.projection for one in layer.given.parts])
    if len(named) == 1 and (others := _others_like(layer, named[0])):
        layer.warnings.append(
            f"the map is that of {named[0]} alone, without {' and '.join(others[:3])}. If each is a head of one "
            "attention, pass a list of all of them"
        )
    if layer.given is not None and chosen.inline is not None:
        try:
            check_named_values(layer, chosen)
        except CannotReplayError as error:
            such_as = (third := _last_third(layer)) and f", such as values={third}"
            raise UnsupportedLayerError(
                f"values names {layer.given.projection} of the layer {layer.name}, but these are no values of its "
                f"attention: {error}. Name the part whose rows the attention sums{such_as}."
            ) from error
    if chosen.dropout:
        rate, training = chosen.dropout, chosen.module.training
        advice = "Call model.eval() first." if training else f"Pass dropout_p={rate} if self.training else 0.0."
        mode = "train" if training else "eval"
        raise RefusedError(f"The attention of {layer.name} drops {rate} of its weights in {mode} mode. {advice}")
    return chosen


def _why_none(layer: LayerRecord) -> str:
    """Why no attention of a layer can be read, and what to do."""
    if layer.projects_more is not None:
        return (
            f"{type(layer.projects_more).__name__} of the layer {layer.name} projects values several times in one run, "
            "such as those of summaries of tokens, so no value belongs to one token. Use a method without attention, "
            "such as TokenAttribution."
        )
    if layer.given is not None:
        return (
            f"values names {layer.given.projection} of the layer {layer.name}, which did not run once in a run of the "
            "layer and return values (batch, tokens, d). Name a part that does, or a weight that a function uses "
            "(torchvision's Swin), such as layer.attn.qkv.weight."
        )
    kinds = [type(module).__name__ for module in layer.modules_run if type(module).__name__.endswith("Attention")]
    reason = f" (its {kinds[-1]} computes attention in an unknown way)" if kinds else ""
    if isinstance(layer.layer, torch.fx.GraphModule):
        reason = " (it was traced by torch.export or torch.fx, so its code calls kernels: pass the model before that)"
    return (
        f"The layer {layer.name} called no attention that can be read{reason}. Pass a Transformer block that calls "
        "torch's scaled_dot_product_attention (flash=True in nanoGPT, fused_attn=True in timm, attn_flash=True in "
        "x-transformers), or say where its values are: "
        f"ValueZeroing(model, layer, values={_last_third(layer) or 'layer.attn.to_v'})."
    )


def _others_like(layer: LayerRecord, name: str) -> list[str]:
    """Modules that are used as `name` is, with another number, such as heads.1.value for heads.0.value."""
    like = re.compile(r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")))
    # A number at the end of a projection's name may tell queries from values.
    projections = [] if name[-1].isdigit() else layer.modules_run
    used = [one.module for one in layer.attentions] if layer.given is None else projections
    named = ((one, module) for one, module in layer.layer.named_modules() if one != name and like.fullmatch(one))
    return [one for one, module in named if any(part in used for part in modules_of(module))]


def _of_modules(layer: LayerRecord, names: Sequence[str]) -> AttentionRecord:
    """The record of the attention that runs in a submodule, or in several that have some heads each."""
    places = []
    for name in names:
        parts = set(layer.layer.get_submodule(name).modules())
        found = [place for place, one in enumerate(layer.attentions) if one.module in parts]
        if len(found) != 1:
            raise UnsupportedLayerError(
                f"{name} of the layer {layer.name} called {len(found)} attentions that can be read in one run, not one."
                + _advice(layer)
            )
        places += found
    first = min(places)
    if sorted(places) != [*range(first, first + len(names))]:
        raise UnsupportedLayerError(f"{' and '.join(names)} do not attend one after the other.{_advice(layer)}")
    for _ in names[1:]:
        layer.merge(first + 1)
    return layer.attentions[first]


def _self_or_cross(layer: LayerRecord, attention: str) -> AttentionRecord:
    """The record of the self-attention, which comes first, or of the cross-attention that follows it."""
    name, found, is_cross = layer.name, layer.attentions, attention == "cross"
    if len(found) > 1:
        _check_several(layer)
    if is_cross and len(found) != 2 and _unreadable_before(layer, found[0]) is None:
        raise UnsupportedLayerError(
            f"The layer {name} has no second attention, so there is no cross-attention to explain. Pass "
            "attention='self', or the layers of a decoder that reads an encoder."
        )
    chosen = found[-1 if is_cross else 0]
    unreadable = _unreadable_before(layer, chosen)
    if unreadable is not None:
        raise UnsupportedLayerError(
            f"The layer {name} runs an attention that cannot be read, {unreadable}, before one that can, so it is "
            f"unknown which of them attention={attention!r} means.{_advice(layer)}"
        )
    return chosen


def _check_several(layer: LayerRecord) -> None:
    """Refuse several attentions, unless they are the self-attention and the cross-attention of one block."""
    found, parts = layer.attentions, modules_of(layer.layer)
    stacks = any(map(is_stack, parts))
    if len(found) > 2 or stacks:
        single = " Pass a single Transformer block, such as one of captum_vz.find_layers(model)."
        advice = single if stacks else _advice(layer) or single
        raise UnsupportedLayerError(f"The layer {layer.name} called attention {len(found)} times in one run.{advice}")
    lists = [set(one.children()) for one in parts if isinstance(one, nn.ModuleList)]
    in_list = any({one.module for one in found} <= members for members in lists)
    alike = found[0].shape[2:] == found[1].shape[2:]
    if in_list or (alike and reads_own_states(LayerRunner(layer), found[1])):
        kinds = " and ".join(type(one.module).__name__ for one in found)
        raise UnsupportedLayerError(
            f"The layer {layer.name} has two attentions {'in a list' if in_list else 'over its own tokens'}, {kinds}, "
            f"so its second one is no cross-attention.{_advice(layer)}"
        )


def _advice(layer: LayerRecord) -> str:
    """A space and a sentence that names the attentions of a layer, in the order of their runs. Empty: no names."""
    named = {module: repr(name) for name, module in layer.layer.named_modules() if name}
    modules = [one.module for one in layer.attentions]
    names = [named[one] for one in modules if one in named and modules.count(one) == 1]
    one_of = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    if not names and len(set(modules)) < len(modules):
        return " One module attends several times, so none of its calls can be named. Pass a layer that attends once."
    one_of += ", or a list of those that are heads of one attention" if len(names) > 1 else ""
    return f" Pass attention=layer.get_submodule(name), where name is {one_of}." if names else ""


def _last_third(layer: LayerRecord) -> str:
    """The values that the only projection of queries, keys and values makes, as `values` takes them. Empty: none."""
    width = layer.first_output.shape[-1]
    names = {module: name for name, module in layer.layer.named_modules()}
    weights = ((one, matrix(one)) for one in layer.modules_run)
    found = [one for one, weight in weights if weight is not None and tuple(weight.shape) == (width, 3 * width)]
    if len(found) != 1 or found[0] not in names:
        return ""
    return f"(layer.get_submodule({names[found[0]]!r}), lambda out: out[..., {2 * width}:])"


def _unreadable_before(layer: LayerRecord, attention: AttentionRecord) -> str | None:
    """The name of an attention that ran before `attention` and could not be read, or None.

    Either a module before it has a class of such a name; or `attention`, the only one, reads other states, and the
    layer's own tokens mix all the same.
    """
    inside = {id(module) for seen in layer.attentions for module in modules_of(seen.module)}
    for module in layer.modules_run:
        if module is attention.module:
            break
        if type(module).__name__.endswith("Attention") and id(module) not in inside:
            parts = set(modules_of(module))
            if not any(seen.module in parts for seen in layer.attentions):
                return type(module).__name__
    alone = len(layer.attentions) == 1 and attention.module is not layer.layer and not layer.rearranges(attention)
    if alone and len(layer.states) > 1:
        runner = LayerRunner(layer)
        own = runner.states[0]
        first = first_tokens(own, attention)
        if reads_other_states(runner, attention) and mixes_outside(runner, own, layer.first_output, [first]):
            return "or something else that mixes its tokens"
    return None
