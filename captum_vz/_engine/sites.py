"""Which attention of a recorded layer is meant, and which of its positions are padding."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_vz._engine.recording import AttentionCall, Recording


def attention_call(recording: Recording, attention: str) -> AttentionCall:
    """The layer's self-attention.

    Raises:
        AssertionError: The layer called no attention that can be read, or several.
    """
    assert attention in ("self", "cross"), f"attention is {attention!r}: pass 'self' or 'cross'."
    assert attention == "self", "attention='cross' is not supported yet: only self-attention has maps so far."
    name = type(recording.layer).__name__
    assert recording.calls, (
        f"The layer {name} called no attention that can be read: looked for calls of transformers' AttentionInterface, "
        "which the layers of most of its models make (BERT, GPT-2, LLaMA, Mistral, Gemma, ViT ...). Pass a whole "
        "Transformer block; layers without attention have no map, and models that compute attention inline "
        "(GPT-J, BLOOM, DeBERTa ...) are not supported yet."
    )
    selves = [call for call in recording.calls if call.weights.shape[2] <= call.weights.shape[3]]
    assert len(recording.calls) <= 2 and selves, (
        f"The layer {name} called attention {len(recording.calls)} times in one run: pass a single Transformer block, "
        "not a stack of them."
    )
    return recording.calls[0]


def valid_positions(recording: Recording, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Which rows `(batch, out)` and sources `(batch, in)` of an attention are not padding, read from its mask.

    A token always sees itself, unless it is padding; a source that no valid row sees is padding.
    """
    batch, _, out, sources = call.weights.shape
    if call.visible is None:
        ones = torch.ones(batch, out + sources, dtype=torch.bool, device=call.weights.device)
        return ones[:, :out], ones[:, out:]
    sees = call.visible.any(1).expand(batch, out, sources)
    rows = sees.diagonal(offset=sources - out, dim1=1, dim2=2)
    return rows, (sees & rows[:, :, None]).any(1)
