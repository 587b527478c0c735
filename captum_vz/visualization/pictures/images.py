"""Scores of patches as pixels, for Captum's pictures of images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from captum_vz.errors import ArgumentError

_MOST_EXTRA = 8  # tokens before the patches: [CLS], one of distillation, registers
Array = npt.NDArray[np.float64]


def image_grid(
    row: Tensor, image: Any, *, grid: tuple[int, int] | None = None, extra: int | None = None
) -> tuple[Array, Array]:
    """The scores of patches as an image, and the image: the first two arguments of Captum's `visualize_image_attr`.

    Args:
        row: Scores of one output token, `(tokens,)` or `(1, tokens)`. Tokens that are not patches come first, such as
            [CLS] and registers. They are left out. The patches follow line by line.
        image: The image, `(channels, height, width)`, `(1, channels, height, width)` or `(height, width, channels)`, as
            a tensor or an array, with 1 or 3 channels. Other ranges, such as normalized pixels for a model, are moved
            to 0 to 1. Integers are divided by 255.
        grid: The numbers of rows and columns of patches. None: the largest grid in the proportions of the image.
        extra: The number of tokens before the patches. None: what the grid leaves.

    Returns:
        `(height, width, 1)` and `(height, width, channels)`. Each pixel has the score of its patch.

    Raises:
        ArgumentError: Scores or image have another shape, or the patches do not make a grid.

    >>> row = torch.tensor([0.5, 0.1, 0.2, 0.3, 0.4])  # [CLS] and four patches
    >>> scores, pixels = image_grid(row, torch.rand(3, 8, 8))
    >>> scores.shape, pixels.shape, scores[0, 0, 0].round(1), scores[7, 7, 0].round(1)
    ((8, 8, 1), (8, 8, 3), np.float64(0.1), np.float64(0.4))
    """
    scores = _scores(row)
    pixels = _pixels(image)
    height, width = pixels.shape[:2]
    down, across = _grid(len(scores), height, width, extra) if grid is None else grid
    left = len(scores) - down * across
    if left < 0 or (extra is not None and left != extra):
        raise ArgumentError(
            f"row has {len(scores)} scores, but the grid of {down} by {across} patches and {extra or 0} tokens before "
            "them need another number: pass grid=(rows, columns) and extra= of the model."
        )
    rows = torch.arange(height) * down // height
    columns = torch.arange(width) * across // width
    patches = scores[left:].view(down, across)
    return patches[rows][:, columns][..., None].numpy(), pixels


def _grid(count: int, height: int, width: int, extra: int | None) -> tuple[int, int]:
    """The largest grid in the proportions of the image that leaves few tokens."""
    part = math.gcd(height, width)
    tall, wide = height // part, width // part
    for size in range(math.isqrt(count // (tall * wide)), 0, -1):
        left = count - tall * wide * size * size
        if left > _MOST_EXTRA:
            break
        if extra is None or left == extra:
            return tall * size, wide * size
    raise ArgumentError(
        f"row has {count} scores, which make no grid for an image of {height} by {width} pixels with at most "
        f"{_MOST_EXTRA} tokens before it: pass grid=(rows, columns)."
    )


def _scores(row: Tensor) -> Tensor:
    if not isinstance(row, Tensor) or row.dim() not in (1, 2) or (row.dim() == 2 and len(row) != 1):
        shape = tuple(row.shape) if isinstance(row, Tensor) else type(row).__name__
        raise ArgumentError(f"row is {shape}: pass scores (tokens,) or (1, tokens) of one output token.")
    if not row.isfinite().all():
        raise ArgumentError("row holds NaN or infinity, which cannot be drawn.")
    return row.detach().reshape(-1).double().cpu()


def _pixels(image: Any) -> Array:
    given = torch.as_tensor(np.asarray(image)) if not isinstance(image, Tensor) else image.detach().cpu()
    one = given[0] if given.dim() == 4 and len(given) == 1 else given
    if one.dim() != 3 or (one.shape[0] not in (1, 3) and one.shape[2] not in (1, 3)):
        raise ArgumentError(
            f"image is {tuple(given.shape)}: pass (channels, height, width) or (height, width, channels), with 1 or 3 "
            "channels."
        )
    last = one.permute(1, 2, 0) if one.shape[0] in (1, 3) and one.shape[2] not in (1, 3) else one
    if one.shape[0] in (1, 3) and one.shape[2] in (1, 3):  # both could be channels: torch's order
        last = one.permute(1, 2, 0)
    if not one.is_floating_point():
        return (last.double() / 255).numpy()
    last = last.double()
    low, high = float(last.min()), float(last.max())
    if low < 0 or high > 1:
        last = (last - low) / ((high - low) or 1.0)
    return last.numpy()
