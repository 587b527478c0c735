"""The attention of a recorded layer that is explained, and its layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import (
    LayerRunner,
    Streams,
    find_streams,
    is_half,
    recorded_in_float32,
    tokens_in_caches,
)
from captum_vz._engine.capture.records import AttentionRecord, AttentionShape, LayerRecord
from captum_vz._engine.numerics.attention import all_tokens, all_weights
from captum_vz._engine.numerics.tensors import once_a_pass
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_finite
from captum_vz._engine.structure.choose_attention import choose_attention, merge_parts
from captum_vz._engine.structure.dependence import (
    values_depend_on_own_position,
    values_follow_examples,
    values_follow_token_order,
)
from captum_vz._engine.structure.layout import Windows, find_windows, padding_masks
from captum_vz._engine.structure.modules import is_library_code, once_a_kind
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
        """Batch, heads, rows and sources of the map."""
        return self.attention.shape

    @property
    def output(self) -> Tensor:
        """The hidden states that the layer returned, `(batch, out, d)`."""
        output = self.layer.first_output
        layout = self.windows or self.streams
        return self.attention.batch_first(output) if layout is None else layout.tokens(output)

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
        if not is_library_code(self.layer) and not (self.follows_token_order() and self.follows_examples()):
            raise UnsupportedLayerError(
                f"The attention of {self.layer.name} sees its tokens, or the examples of the batch, in another order, "
                "so its weights are not those of the layer's tokens in order. Pass one sentence at a time. If it is "
                "refused too, use ValueZeroing, which finds this order."
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

    def follows_examples(self) -> bool:
        """Whether values stand in the order of the examples that they are made of."""
        place = self.attention.calls_before, self.attention.inline is None
        return once_a_kind(self.layer, place, values_follow_examples, self.runner(), self.attention)

    def is_reordered(self) -> bool:
        """Whether the attention has all of the layer's tokens, one each, but in another order."""
        one = self.attention
        if len(self.layer.attentions) > 1 or one.calls > 1 or one.tokens_first or self.windows is not None:
            return False
        return one.shape.out == one.shape.sources and not self.follows_token_order()

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

    With `streams`, tokens may have several vectors each. UnsupportedLayerError: the layer called no attention that can
    be read, or not the one that is asked for, or the layout of its tokens is unknown. RefusedError: it returned NaN.
    """
    output = layer.first_output
    if not is_finite(output):
        advice = " torch gives NaN to tokens that see nothing: pad on the right, or pass need_weights=False."
        advice *= any(isinstance(one.module, nn.MultiheadAttention) for one in layer.attentions)
        raise RefusedError(f"{layer.name} returned {not_finite(output.dtype)}{advice}")
    merge_parts(layer)
    chosen = choose_attention(layer, attention)
    if not layer.rearranges(chosen):
        return AttentionSite(layer, chosen, *_masks(layer, chosen))
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
        return AttentionSite(layer, chosen, *_masks(layer, chosen), streams=layout)
    raise UnsupportedLayerError(
        f"{layer.name} returned {tuple(layer.first_output.shape)}, but its attention computed "
        f"{(chosen.shape.batch, chosen.shape.out)} (batch, tokens). Expected one vector for each token, or windows of "
        f"one attention, but {reason}. Pass a single Transformer block, which does not attend over space and time."
    )


def _masks(layer: LayerRecord, attention: AttentionRecord) -> tuple[Tensor, Tensor]:
    """Which rows `(batch, out)` and which sources `(batch, in)` are no padding: all, if no attention has a mask."""
    if any(one.visible is not None for one in layer.attentions):
        return padding_masks(layer, attention)
    (batch, _, *sizes), device = attention.shape, attention.values.device
    rows, sources = [once_a_pass(all_tokens, batch, tokens, device) for tokens in sizes]
    return rows, sources


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
