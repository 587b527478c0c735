"""The attention of a recorded layer that is explained, its layout and its padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from captum_vz._engine.capture.layer_runner import LayerRunner, Streams, is_cache, is_half, recorded_in_float32
from captum_vz._engine.capture.records import AttentionRecord, AttentionShape, LayerRecord
from captum_vz._engine.numerics.attention import all_weights
from captum_vz._engine.numerics.tensors import mask_as_bool, once_a_pass
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_finite
from captum_vz._engine.structure.choice import choose_attention, merge_parts
from captum_vz._engine.structure.dependence import (
    find_streams,
    first_own_source,
    reads_other_states,
    values_depend_on_own_position,
    values_follow_token_order,
)
from captum_vz._engine.structure.windows import Windows, find_windows
from captum_vz._engine.taps.transformers import MADE_OF
from captum_vz._private import tree_leaves
from captum_vz.errors import RefusedError, UnsupportedLayerError


@dataclass(frozen=True, eq=False)
class AttentionSite:
    """The attention that is explained, and what is known of it.

    Attributes:
        layer: The record of the layer.
        attention: The record of the attention. With `windows`, it spans the positions of the layer.
        target_mask: Which rows are no padding, bool `(batch, out)`.
        source_mask: Which sources are no padding, bool `(batch, in)`.
        streams: The layout of a layer whose tokens have several vectors each. None: they have one.
        windows: Where the positions are, if the attention sees them in windows. None: it sees tokens.
    """

    layer: LayerRecord
    attention: AttentionRecord
    target_mask: Tensor
    source_mask: Tensor
    streams: Streams | None = None
    windows: Windows | None = None

    @property
    def shape(self) -> AttentionShape:
        """Batch, heads, rows and sources of the map."""
        return self.attention.shape

    @property
    def output(self) -> Tensor:
        """The hidden states that the layer returned, `(batch, out, d)`."""
        output = self.layer.first_output
        layout = self.windows or self.streams
        return self.attention.batch_first(output) if layout is None else layout.tokens(output)

    def finite_output(self) -> Tensor:
        """The output. RefusedError: it is not finite."""
        output = self.output
        if not is_finite(output.detach() if output.requires_grad else output):
            raise RefusedError(f"{self.layer.name} returned {not_finite(output.dtype)}")
        return output

    @cached_property
    def dropped_sources(self) -> int:
        """How many tokens came before the first source, and are no longer in a key-value cache with a window."""
        own = self.shape.sources - self.layer.encoder_sources(self.attention)
        place = getattr(self.attention.module, "layer_idx", None)
        caches = filter(is_cache, tree_leaves((self.layer.args, self.layer.kwargs), is_leaf=is_cache))
        if place is None or self.attention is not self.layer.attentions[0]:
            return 0
        return max((int(cache.get_seq_length(place)) - own for cache in caches), default=0)

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

    def is_reordered(self) -> bool:
        """Whether the attention has all of the layer's tokens, one each, but in another order."""
        one = self.attention
        if len(self.layer.attentions) > 1 or one.calls > 1 or one.tokens_first or self.windows is not None:
            return False
        return one.shape.out == one.shape.sources and not values_follow_token_order(self.runner(), one)

    def in_windows(self) -> AttentionSite:
        """This site, with positions found by runs of the layer. See `find_windows`."""
        attention, windows = _over_positions(self.layer, self.attention)
        self.layer.layout = "windows"
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
    """The site of the attention that is meant, see `choose_attention`.

    With `streams`, tokens may have several vectors each.

    Raises:
        UnsupportedLayerError: The layer called no attention that can be read, or not the one that is asked for, or the
            layout of its tokens is unknown.
    """
    merge_parts(layer)
    chosen = choose_attention(layer, attention)
    if not layer.rearranges(chosen):
        return AttentionSite(layer, chosen, *padding_masks(layer, chosen))
    layout = find_streams(layer, chosen)
    reason = f"the layer has {len(layer.attentions)} attentions"
    is_prompt = layout is not None and layout.count == 1
    if layout is None or not (is_prompt or values_depend_on_own_position(LayerRunner(layer, layout), chosen)):
        try:
            if len(layer.attentions) == 1:
                attention_of_positions, windows = _over_positions(layer, chosen)
                masks = padding_masks(layer, attention_of_positions, windows=True)
                layer.layout = "windows"
                return AttentionSite(layer, attention_of_positions, *masks, windows=windows)
        except CannotReplayError as error:
            reason = str(error)
    if layout is not None:  # also where the values are those of another layer
        if not streams:
            raise UnsupportedLayerError(
                f"The layer {layer.name} carries several vectors of each token in streams, "
                f"{tuple(layer.states[0].shape)}, and this method is for one vector a token. ValueZeroing and "
                "LayerAttention have maps of such layers."
            )
        layer.layout = "streams"
        return AttentionSite(layer, chosen, *padding_masks(layer, chosen), streams=layout)
    raise UnsupportedLayerError(
        f"{layer.name} returned {tuple(layer.first_output.shape)}, but its attention computed "
        f"{(chosen.shape.batch, chosen.shape.out)} (batch, tokens). Expected one vector for each token, or windows of "
        f"one attention, but {reason}. Pass a single Transformer block as `layer`."
    )


def _over_positions(layer: LayerRecord, attention: AttentionRecord) -> tuple[AttentionRecord, Windows]:
    """An attention that sees windows, as an attention over the layer's own positions."""
    windows = find_windows(layer, attention)
    batch, out, sources = windows.shape
    shape = AttentionShape(batch, attention.shape.heads, out, sources)
    return replace(attention, shape=shape, visible=None, causal=False, weights=None, context=None), windows


def not_finite(dtype: torch.dtype) -> str:
    """What to say of values that are not finite, and what to do in this dtype."""
    advice = {
        torch.float16: "float16 overflows above 65504: load the model in bfloat16 or float32. ",
        torch.float64: "Some models hide tokens by the lowest float64, which is -inf in a softmax in float32: load the "
        "model in float32. ",
    }
    return f"values that are not finite (NaN or infinity) in {dtype}. {advice.get(dtype, '')}Check weights and inputs."


def padding_masks(layer: LayerRecord, attention: AttentionRecord, windows: bool = False) -> tuple[Tensor, Tensor]:
    """Which rows `(batch, out)` and which sources `(batch, in)` of an attention are no padding.

    Padding is what no token sees in self-attention, not even the token itself, if the inputs hide it or if it sees
    nothing. In sparse attention the layer chooses what is seen, so the mask that it was given is read too. A source
    that no valid row sees is padding.
    """
    # The self-attention of these tokens comes first. Attentions with another number of tokens are passed over.
    first = attention if windows else min(layer.attentions, key=lambda one: one.shape.out != attention.shape.out)
    batch, _, out, sources = first.shape
    device = attention.values.device
    rows = once_a_pass(_ones, batch, out, device)
    seen = None if first.visible is None or sources < out else first.is_seen()
    cross = seen is not None and len(layer.attentions) == 1 and len(layer.states) > 1 and not seen.all()
    # The mask of a cross-attention alone says nothing of its rows.
    if seen is not None and not (cross and reads_other_states(LayerRunner(layer), first)):
        if sources != out and not seen[..., -1].any():
            raise RefusedError(
                f"The attention of {layer.name} has {sources} sources for {out} tokens, and no token sees the last of "
                "them, so it is unknown where the tokens are in this static cache. Pass use_cache=False, or a "
                "DynamicCache."
            )
        start = first_own_source(LayerRunner(layer), first) if sources > out else None
        if start is None or start + out > sources:
            start = sources - out - layer.encoder_sources(first)  # the tokens in a cache come first
        rows, all_seen = once_a_pass(_seen_by_any, seen, start)
        if not all_seen:
            rows = once_a_pass(_not_hidden, rows, seen, _hidden_by_inputs(layer, first, seen, start))
            given = layer.kwargs.get("attention_mask")
            if isinstance(given, Tensor) and given.shape[2:] == (out, sources) and first.inline is None:
                rows = once_a_pass(_shown_too, rows, given, start)
    if attention.visible is None:
        return rows, once_a_pass(_ones, batch, attention.shape.sources, device)
    inline = attention.inline if attention is first else None
    shown = once_a_pass(_seen_from, rows, attention.is_seen())
    if inline is not None and inline.row.sequence_first and shown.shape == rows.shape:
        shown = shown | rows  # XLNet's mask was changed, so that tokens that only see themselves see nothing
    return rows, shown


# Layers share their masks, so each of these is computed once a pass.


def _ones(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.ones(batch, tokens, dtype=torch.bool, device=device)


def _seen_by_any(seen: Tensor, start: int) -> tuple[Tensor, bool]:
    """Which tokens, the sources from `start` on, any token sees, `(batch, out)`, and whether this holds for all."""
    rows = seen.any(1)[:, start : start + seen.shape[1]]
    return rows, bool(rows.all())


def _not_hidden(rows: Tensor, seen: Tensor, hidden: Tensor) -> Tensor:
    return rows | (seen.any(2) & ~hidden)


def _shown_too(rows: Tensor, mask: Tensor, start: int) -> Tensor:
    return rows | mask_as_bool(mask).any(1).any(1)[:, start : start + rows.shape[1]]


def _seen_from(rows: Tensor, seen: Tensor) -> Tensor:
    return (seen & rows[:, :, None]).any(1)


def _hidden_by_inputs(layer: LayerRecord, attention: AttentionRecord, seen: Tensor, start: int) -> Tensor:
    """Which tokens a mask of tokens hides, and no pattern of the attention, bool `(batch, out)`.

    The layer's own tokens are the sources from `start` on of `seen (batch, out, in)`.
    """
    assert attention.visible is not None
    visible, (batch, _, out, sources) = attention.visible, attention.shape
    of_call = tree_leaves([dict(x) if isinstance(x, Mapping) else x for x in layer.inputs])
    given = [x for x in (*tree_leaves((layer.args, layer.kwargs)), *of_call) if isinstance(x, Tensor)]
    of_pairs = any(isinstance(x, Tensor) and x.shape[-2:] == (out, sources) for x in of_call)
    masks = (*given, *(getattr(x, MADE_OF) for x in given if hasattr(x, MADE_OF)))
    of_tokens = [x for x in masks if x.shape in ((batch, sources), (batch, 1, 1, sources), (batch, out))]
    by_shape = visible.shape[2] == 1 and len(visible) == batch  # it hides tokens from all tokens
    inline = attention.inline is not None and not of_pairs
    return once_a_pass(_hidden, seen, start, by_shape, inline, *of_tokens)


def _hidden(seen: Tensor, start: int, by_shape: bool, inline: bool, *masks: Tensor) -> Tensor:
    out, own = seen.shape[1], slice(start, start + seen.shape[1])
    seen = seen[:, :, own]
    unseen = ~seen.any(1)
    if by_shape:
        return unseen
    if inline and (seen.diagonal(dim1=1, dim2=2) | unseen).all():
        return unseen  # families that compute attention inline make masks of tokens: all others see themselves
    # What one example hides and another one shows, where the pattern of the attention is the same in all.
    alike = ((seen == seen.any(0) & ~unseen[:, None]) | ~seen.any(2, keepdim=True)).all(1).all(1)
    hidden = unseen & alike[:, None] & ~unseen.all(0)
    for mask in masks:
        tokens = mask.reshape(len(seen), -1).to(unseen.device)
        tokens = tokens if tokens.shape[1] == out else tokens[:, own]
        factors = ((tokens == 0) | (tokens == 1)).all()
        if factors or ((tokens == 0) | ~mask_as_bool(tokens)).all():
            shows = tokens.bool() if factors else mask_as_bool(tokens)
            for one in (~shows, shows):  # a mask may mark what is hidden, or what is not
                hidden = hidden | one if unseen[one].all() else hidden
    return hidden
