"""The same inputs in another form: one example alone, with a second example, with padding, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from captum_vz.attr._call.padding import map_tensors, tokens_of_example

PADDED = 2


def sizes_of(inputs: Any) -> list[int]:
    """The size of dimension 0 of each tensor of the inputs."""
    sizes: list[int] = []

    def note(x: Tensor, _: str) -> Tensor:
        sizes.extend(x.shape[:1])
        return x

    map_tensors(note, inputs)
    return sizes


def alone(value: Any, index: int, batch: int) -> Any:
    """One example of a batch. Tensors that have no entry for each example are kept."""
    return map_tensors(lambda x, _: x[index : index + 1] if x.dim() and len(x) == batch else x, value)


def paired(value: Any) -> Any:
    """One example, and after it the same tokens in reverse order as a second example."""
    return map_tensors(lambda x, _: torch.cat([x, x.flip(1)]) if x.dim() > 1 and len(x) == 1 else x, value)


def mask_of(inputs: Any) -> Tensor | None:
    """The mask of padding in the inputs, `(batch, tokens)`, if they are a mapping that has one."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def padded(inputs: Any, mask: Tensor, pad_id: int) -> Any:
    """The inputs with padding tokens after the others, which the mask marks."""

    def change(x: Tensor, name: str) -> Tensor:
        if x.shape[:2] != mask.shape:
            return x
        return pad(x, (0, 0) * (x.dim() - 2) + (0, PADDED), value=pad_id if name == "input_ids" else 0)

    return map_tensors(change, inputs)


def unpadded(inputs: Any, mask: Tensor, index: int) -> tuple[Any, Tensor]:
    """One example of a padded batch without its padding, and the positions of its tokens in the batch."""
    kept = mask[index].nonzero()[:, 0]
    return tokens_of_example(inputs, mask, index, kept), kept
