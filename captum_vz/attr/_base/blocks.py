"""Refuse an attention module that is passed as a layer, if its block can be explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import LayerPass, LayerRecord, attention_site, find_layers, first_module_holding
from captum_vz.errors import RefusedError, UnsupportedLayerError


def is_attention_module(record: LayerRecord) -> bool:
    """Whether a layer calls the attention function itself, or is named after attention."""
    named = record.name.lower().endswith(("attention", "attn"))
    return named or any(one.module is record.layer for one in record.attentions)


def refuse_attention_modules(forward: Callable[[], Any], layers: Sequence[nn.Module]) -> None:
    """Refuse attention modules of a block that can be explained. `forward` is called twice.

    Blocks with three attentions (SAM) cannot be explained, so their attention modules are accepted as layers.

    Raises:
        UnsupportedLayerError: The output of a layer is not yet the output of its block.
    """
    roots: list[nn.Module] = []
    with torch.no_grad(), first_module_holding(layers, roots.append):
        forward()
    for layer in layers:
        block = _block_of(roots[0], layer) if roots else None
        if block is not None and _is_explained(forward, block):
            raise UnsupportedLayerError(
                f"The layer {type(layer).__name__} is the attention module of a {type(block).__name__}. Its output "
                "lacks the feed-forward module and often the residual connection, so its map differs from the map of "
                "the block. Pass the whole block, as captum_vz.find_layers(model) returns it."
            )


def _block_of(root: nn.Module, layer: nn.Module) -> nn.Module | None:
    """The block of a stack in `root` that contains `layer` as a part, or None."""
    path = next((name for name, module in root.named_modules() if module is layer), "").split(".")
    for depth in range(len(path)):
        for stack in (None, "encoder", "decoder"):
            with suppress(RefusedError):
                blocks = find_layers(root.get_submodule(".".join(path[:depth])), stack)
                if any(block is layer for block in blocks):
                    return None
                for block in blocks:
                    if any(part is layer for part in block.modules()):
                        return block
    return None


def _is_explained(forward: Callable[[], Any], block: nn.Module) -> bool:
    def find(record: LayerRecord) -> Tensor:
        attention_site(record, "self", streams=True)
        return torch.empty(0)

    with suppress(RefusedError):
        LayerPass([block], find).run(forward)
        return True
    return False
