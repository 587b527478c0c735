"""Which tokens of a recorded layer are padding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from captum_vz._engine.capture.layer_runner import LayerRunner
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.attention import all_tokens
from captum_vz._engine.numerics.tensors import mask_as_bool, once_a_pass
from captum_vz._engine.structure.dependence import first_own_source, reads_other_states
from captum_vz._engine.taps.functions import MADE_OF
from captum_vz._private import tree_leaves
from captum_vz.errors import RefusedError


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
    rows = once_a_pass(all_tokens, batch, out, device)
    seen = None if first.visible is None or sources < out else first.is_seen()
    cross = seen is not None and len(layer.attentions) == 1 and len(layer.states) > 1 and not seen.all()
    # The mask of a cross-attention alone says nothing of its rows.
    if seen is not None and not (cross and reads_other_states(LayerRunner(layer), first)):
        start = first_own_source(LayerRunner(layer), first) if sources > out else None
        if start is None or start + out > sources:
            if sources != out and not seen[..., -1].any():
                raise RefusedError(
                    f"The attention of {layer.name} has {sources} sources for {out} tokens, and no token sees the last "
                    "of them, so it is unknown where the tokens are in this static cache. Pass use_cache=False, or a "
                    "DynamicCache."
                )
            start = sources - out - layer.encoder_sources(first)  # the tokens in a cache come first
        rows, all_seen = once_a_pass(_seen_by_any, seen, start)
        if not all_seen:
            rows = once_a_pass(_not_hidden, rows, seen, _hidden_by_inputs(layer, first, seen, start))
            given = layer.kwargs.get("attention_mask")
            if isinstance(given, Tensor) and given.shape[2:] == (out, sources) and first.inline is None:
                rows = once_a_pass(_shown_too, rows, given, start)
    if attention.visible is None:
        return rows, once_a_pass(all_tokens, batch, attention.shape.sources, device)
    inline = attention.inline if attention is first else None
    shown = once_a_pass(_seen_from, rows, attention.is_seen())
    if inline is not None and inline.row.sequence_first and shown.shape == rows.shape:
        shown = shown | rows  # XLNet's mask was changed, so that tokens that only see themselves see nothing
    return rows, shown


# Layers share their masks, so each of these is computed once a pass.


def _seen_by_any(seen: Tensor, start: int) -> tuple[Tensor, bool]:
    """Which tokens, the sources from `start` on, any token sees, `(batch, out)`, and whether this holds for all."""
    rows = seen.any(1)[:, start : start + seen.shape[1]]
    return rows, bool(rows.all())


def _not_hidden(rows: Tensor, seen: Tensor, hidden: Tensor) -> Tensor:
    return rows | (seen.any(2) & ~hidden)


def _shown_too(rows: Tensor, mask: Tensor, start: int) -> Tensor:
    return rows | mask_as_bool(mask).any(1).any(1)[:, start : start + rows.shape[1]]


def _seen_from(rows: Tensor, seen: Tensor) -> Tensor:
    shown = (seen & rows[:, :, None]).any(1)
    if shown.shape != rows.shape:
        return shown
    # A token that sees nothing may have a weight on each token: the softmax of equal numbers.
    return shown | (rows & (rows & ~seen.any(2)).any(1, keepdim=True))


def _hidden_by_inputs(layer: LayerRecord, attention: AttentionRecord, seen: Tensor, start: int) -> Tensor:
    """Which tokens a mask of tokens hides, and no pattern of the attention, bool `(batch, out)`.

    The layer's own tokens are the sources from `start` on of `seen (batch, out, in)`.
    """
    assert attention.visible is not None
    visible, (batch, _, out, sources) = attention.visible, attention.shape
    given = [x for x in tree_leaves((layer.args, layer.kwargs)) if isinstance(x, Tensor)]
    of_call = tree_leaves([dict(x) if isinstance(x, Mapping) else x for x in layer.inputs])
    of_pairs = any(isinstance(x, Tensor) and x.shape[-2:] == (out, sources) for x in of_call)
    tensors = [*given, *(x for x in of_call if isinstance(x, Tensor))]
    masks = (*tensors, *(getattr(x, MADE_OF) for x in tensors if hasattr(x, MADE_OF)))
    of_tokens = [x for x in masks if x.shape in ((batch, sources), (batch, 1, 1, sources), (batch, out))]
    inline = attention.inline is not None and not of_pairs
    # A layer that was given no mask made one of what its tokens hold, which says nothing of padding.
    could_be_masks = [x for x in given if x.shape[-1:] == (sources,) and not any(x is one for one in layer.states[:1])]
    made_of_inputs = attention.inline is not None or bool(could_be_masks)
    by_shape = visible.shape[2] == 1 and len(visible) == batch  # it hides tokens from all tokens
    return once_a_pass(_hidden, seen, start, by_shape and made_of_inputs, made_of_inputs, inline, *of_tokens)


def _hidden(seen: Tensor, start: int, by_shape: bool, by_pattern: bool, inline: bool, *masks: Tensor) -> Tensor:
    out, own = seen.shape[1], slice(start, start + seen.shape[1])
    seen = seen[:, :, own]
    unseen = ~seen.any(1)
    if by_shape:
        return unseen
    if inline and (seen.diagonal(dim1=1, dim2=2) | unseen).all():
        return unseen  # families that compute attention inline make masks of tokens: all others see themselves
    # What one example hides and another one shows, where the pattern of the attention is the same in all.
    alike = ((seen == seen.any(0) & ~unseen[:, None]) | ~seen.any(2, keepdim=True)).all(1).all(1)
    hidden = unseen & alike[:, None] & ~unseen.all(0) & by_pattern
    for mask in masks:
        tokens = mask.reshape(len(seen), -1).to(unseen.device)
        tokens = tokens if tokens.shape[1] == out else tokens[:, own]
        factors = ((tokens == 0) | (tokens == 1)).all()
        if factors or ((tokens == 0) | ~mask_as_bool(tokens)).all():
            shows = tokens.bool() if factors else mask_as_bool(tokens)
            for one in (~shows, shows):  # a mask may mark what is hidden, or what is not
                hidden = hidden | one if unseen[one].all() else hidden
    return hidden
