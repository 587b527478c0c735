"""Random inputs for the tiny models: batches of three examples, padded on the right if the model takes a mask."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 60


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mask_of(lengths: tuple[int, ...]) -> Tensor:
    """A mask ``(batch, tokens)``: one for each real position, zero for the padding after them."""
    return torch.tensor([[int(position < length) for position in range(max(lengths))] for length in lengths])


def padded_tokens(lengths: tuple[int, ...] = (7, 5, 3), prefix: str = "") -> dict[str, Tensor]:
    """Random token ids and their mask. Padding has id 0."""
    mask = mask_of(lengths)
    tokens = torch.randint(4, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(1))
    return {f"{prefix}input_ids": tokens * mask, f"{prefix}attention_mask": mask}


def barely_padded_tokens() -> dict[str, Tensor]:
    """Tokens with so little padding that each window of three tokens holds a real one.

    If padding attends only to padding, transformers' eager attention returns NaN in a float64 model: the mask is the
    lowest float64, but the softmax is computed in float32.
    """
    return padded_tokens((7, 6, 5))


def padded_token_pairs() -> dict[str, Tensor]:
    """Tokens for an encoder and for its decoder."""
    return padded_tokens((7, 5, 3)) | padded_tokens((3, 5, 4), prefix="decoder_")


def spectrogram_and_tokens() -> dict[str, Tensor]:
    """Sound for seven encoder positions of two frames each, and tokens for the decoder."""
    return {"input_features": noise(3, 8, 14)} | padded_tokens((3, 5, 4), prefix="decoder_")


def padded_waves() -> dict[str, Tensor]:
    """Sound of three lengths: 7, 5 and 3 frames of four samples, and two samples more, which fill no frame."""
    mask = mask_of((30, 22, 14))
    return {"input_values": noise(3, 30) * mask, "attention_mask": mask}


def pixels() -> dict[str, Tensor]:
    """Two images of four patches."""
    return {"pixel_values": noise(2, 3, 8, 8)}
