"""Grades for places and counts: patches, frames, copied tokens, and how often and how much scores show a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz_lessons.check.verdict import Verdict, exercise, judge


@exercise(
    "Divide row and column by the side of a patch, without remainder. Count the patches row by row. Which token "
    "stands before the first patch?"
)
def patch_token(yours: Any, row: int, column: int, *, patch: int, side: int) -> Verdict:
    """Grade the token of the patch that covers a pixel: token 0 is `[CLS]`, and the patches follow row by row.

    A patch is `patch` pixels wide, and a row has `side` patches.

    >>> from captum_vz_lessons import check
    >>> check.patch_token(0, 0, 1, patch=2, side=4)
    Not yet. patch_token: [CLS] is token 0, so the patches begin at token 1.
    You go on with the package's answer. This exercise counts as open.
    """
    place, swapped = row // patch * side + column // patch, column // patch * side + row // patch
    pixel = row * side * patch + column
    mistakes = [
        ("[CLS] is token 0, so the patches begin at token 1.", place),
        *(("rows and columns are swapped. The patches follow row by row.", swapped + one) for one in (0, 1)),
        *((f"these are pixels. A patch has {patch} pixels in each direction.", pixel + one) for one in (0, 1)),
    ]
    return judge(yours, 1 + place, mistakes)


@exercise(
    "A frame of the first convolution has its center at (kernel - 1) / 2. Each further convolution adds (kernel - "
    "1) / 2 times the product of the strides before it. Frames are the product of all strides apart."
)
def frame_centers(yours: Any, kernels: Sequence[int], strides: Sequence[int], frames: int) -> Verdict:
    """Grade the centers of frames, in samples, after several convolutions without padding."""
    before = [1]
    for stride in strides:
        before.append(before[-1] * stride)
    pairs = list(zip(kernels, before, strict=False))
    first = sum((kernel - 1) / 2 * apart for kernel, apart in pairs)

    def centers(begin: float, apart: float = before[-1]) -> Tensor:
        return begin + apart * torch.arange(frames, dtype=torch.float64)

    mistakes = [
        ("the first frame does not stand at sample 0: its center is half of what it covers.", centers(0)),
        ("these are the last samples of the frames. The center is half as far.", centers(2 * first)),
        (
            "a kernel covers k samples, from 0 to k - 1: its center is (k - 1) / 2.",
            centers(sum(kernel / 2 * apart for kernel, apart in pairs)),
        ),
        (
            "the stride of a convolution moves all later kernels: multiply them by the strides before.",
            centers(sum((kernel - 1) / 2 for kernel in kernels)),
        ),
        ("frames are further apart: multiply the strides of all convolutions.", centers(first, strides[-1])),
        ("the strides are added. Multiply them.", centers(first, sum(strides))),
    ]
    return judge(yours, centers(first), mistakes)


@exercise(
    "Write down one example: what does the decoder write first, and where does this token stand in the source? Do "
    "so for each written token."
)
def copied_from(yours: Any, source: Tensor, written: Tensor) -> Verdict:
    """Grade the source position that each written token is a copy of: the true columns of a map of cross-attention.

    `source` and `written` hold token ids of several examples. Written token i copies the same position in all of them.
    """
    same = (source[:, None] == written[..., None]).all(0)  # (n, source tokens)
    if not (same.sum(1) == 1).all():
        raise ArgumentError("written copies no single position of source: pass several examples of one task.")
    right = same.int().argmax(1)
    mistakes = [
        ("the order is that of the source. Compare what is read with what is written.", torch.arange(len(right))),
        ("positions are counted from 0.", right + 1),
        ("a row belongs to the token that is written next, and not to the token that is read.", right.roll(1)),
        ("a row belongs to the token that is written, and not to the next token.", right.roll(-1)),
    ]
    return judge(yours, right, mistakes)


@exercise("Compare `scores.argmax(1)` with the places, keep the examples that count, and take the mean.")
def found_rate(yours: Any, scores: Tensor, places: Tensor, chosen: Tensor | None = None) -> Verdict:
    """Grade how often the highest score of a row stands at the place of this example, in the examples `chosen`."""
    there = torch.ones(len(places), dtype=torch.bool) if chosen is None else chosen
    hits = (scores.argmax(1) == places).double()
    at_places = scores.double().gather(1, places[:, None])[there, 0]
    mistakes: list[tuple[str, Any]] = [
        ("this is the number of examples. Divide it by how many there are.", hits[there].sum()),
        ("this is the share of all examples. Take those that the exercise asks for.", hits.mean()),
        ("the examples that count are divided by the number of all.", hits[there].sum() / len(hits)),
        ("this is the lowest score. Take the highest.", (scores.argmin(1) == places)[there].double().mean()),
        ("this is the mean score at the place. Count how often it is the highest.", at_places.mean()),
        ("this is how often the place is missed.", 1 - hits[there].mean()),
    ]
    if not there.all():
        mistakes.insert(0, ("these are the other examples.", hits[~there].mean()))
    return judge(yours, hits[there].mean(), mistakes)


@exercise(
    "Divide each row by its sum. Take the shares at the places: `shares.gather(1, places)`. One mean is that of the"
    " largest, the other that of the sum."
)
def place_shares(yours: Any, scores: Tensor, places: Tensor) -> Verdict:
    """Grade two means over all examples: the largest share at one of several `places`, and the sum of the shares."""

    def pair(shares: Tensor) -> Tensor:
        return torch.stack([shares.amax(1).mean(), shares.sum(1).mean()])

    raw = scores.double().gather(1, places)
    shares = raw / scores.double().sum(1, keepdim=True)
    largest, total = right = pair(shares)
    first = "this is the mean of each place. Take the largest of each example first."
    mistakes = [
        ("divide each row by its sum over the tokens.", pair(raw)),
        (first, torch.stack([shares.mean(0).max(), total])),
        ("the two numbers are in the other order: first the largest share, then the sum.", right.flip(0)),
        ("the second number is a mean. Add up the shares.", torch.stack([largest, shares.mean()])),
    ]
    return judge(yours, right, mistakes)
