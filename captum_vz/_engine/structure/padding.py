"""Which rows and sources of an attention are padding, read from the masks of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz._engine.capture.layer_runner import LayerRunner
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import mask_as_bool
from captum_vz._engine.structure.dependence import first_own_source, reads_other_states
from captum_vz.errors import RefusedError


def padding_masks(layer: LayerRecord, attention: AttentionRecord, windows: bool = False) -> tuple[Tensor, Tensor]:
    """Which rows `(batch, out)` and which sources `(batch, in)` of an attention are no padding.

    Padding is what no token sees in self-attention, not even the token itself. In sparse attention the layer chooses
    what is seen, so the mask that it was given is read too. A source that no valid row sees is padding.
    """
    first = attention if windows else layer.attentions[0]
    batch, _, out, sources = first.shape
    rows = torch.ones(batch, out, dtype=torch.bool, device=attention.values.device)
    seen = None if first.visible is None or sources < out else first.is_seen()
    runner = LayerRunner(layer)
    # The mask of a cross-attention alone says nothing of its rows.
    if seen is not None and not (len(layer.attentions) == 1 and not seen.all() and reads_other_states(runner, first)):
        if sources != out and not seen[..., -1].any():
            raise RefusedError(
                f"The attention of {layer.name} has {sources} sources for {out} tokens, and no token sees the last of "
                "them, so it is unknown where the tokens are in this static cache. Pass use_cache=False, or a "
                "DynamicCache."
            )
        start = first_own_source(runner, first)
        if start is None or start + out > sources:
            start = sources - out - layer.encoder_sources(first)  # the tokens in a cache come first
        rows = seen.any(1)[:, start : start + out]
        if not seen[:, :, start : start + out].triu().any():
            rows = rows | seen.any(2)  # where no token sees itself or a later one, nobody sees the last one
        given = layer.kwargs.get("attention_mask")
        if isinstance(given, Tensor) and given.shape[2:] == (out, sources) and first.inline is None:
            rows = rows | mask_as_bool(given).any(1).any(1)[:, start : start + out]
    if attention.visible is None:
        return rows, torch.ones(batch, attention.shape.sources, dtype=torch.bool, device=rows.device)
    return rows, (attention.is_seen() & rows[:, :, None]).any(1)
