"""Grades for places and counts: patches, frames, copied tokens, and how often and how much scores show a place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from captum_vz_lessons.check.verdict import Verdict, exercise, judge


@exercise(
    "Divide row and column by the side of a patch, without remainder. Count the patches row by row. Which token "
    "stands before the first patch?"
)
def patch_token(yours: Any, row: int, column: int, *, patch: int, side: int) -> Verdict:
    """Grade the token of the patch that covers a pixel: token 0 is `[CLS]`, and the patches follow row by row.

    A patch is `patch` pixels wide, and a row has `side` patches.
    """
    place, swapped = row // patch * side + column // patch, column // patch * side + row // patch
    pixel = row * side * patch + column
    mistakes = {
        "[CLS] is token 0, so the patches begin at token 1.": place,
        "rows and columns are swapped. The patches follow row by row.": (swapped, swapped + 1),
        f"these are pixels. A patch has {patch} pixels in each direction.": (pixel, pixel + 1),
    }
    return judge(yours, 1 + place, mistakes)


@exercise(
    "A frame of the first convolution has its center at (kernel - 1) / 2. Each further convolution adds (kernel - "
    "1) / 2 times the product of the strides before it. Frames are the product of all strides apart."
)
def frame_centers(yours: Any, kernels: Sequence[int], strides: Sequence[int], frames: int) -> Verdict:
    """Grade the centers of frames, in samples, after several convolutions without padding."""
    *before, whole = accumulate(strides, mul, initial=1)
    first = sum((kernel - 1) / 2 * apart for kernel, apart in zip(kernels, before, strict=True))

    def centers(begin: float, apart: float = whole) -> Tensor:
        return begin + apart * torch.arange(frames, dtype=torch.float64)

    mistakes = {
        "the first frame does not begin at sample 0: its center is half of what it covers.": centers(0),
        "these are the last samples of the frames. The center is half as far.": centers(2 * first),
        "a kernel covers k samples, from 0 to k - 1: its center is (k - 1) / 2.": centers(first + sum(before) / 2),
        "the stride of a convolution moves all later kernels: multiply them by the strides before.": (
            centers(sum((kernel - 1) / 2 for kernel in kernels))
        ),
        "frames are further apart: multiply the strides of all convolutions.": centers(first, strides[-1]),
        "the strides are added. Multiply them.": centers(first, sum(strides)),
    }
    return judge(yours, centers(first), mistakes)


@exercise(
    "Write down one example: what does the decoder write first, and where is this token in the source? Do so for each "
    "written token."
)
def copied_from(yours: Any, source: Tensor, written: Tensor) -> Verdict:
    """Grade the source position that each written token is a copy of: the true columns of a map of cross-attention.

    `source` and `written` hold token ids of several examples. Written token i copies the same position in all of them.
    """
    right = (source[:, None] == written[..., None]).all(0).int().argmax(1)
    mistakes = {
        "the order is that of the source. Compare what is read with what is written.": torch.arange(len(right)),
        "positions are counted from 0.": right + 1,
        "a row belongs to the token that is written next, and not to the token that is read.": right.roll(1),
        "a row belongs to the token that is written, and not to the next token.": right.roll(-1),
    }
    return judge(yours, right, mistakes)


@exercise("Compare `scores.argmax(1)` with the places, keep the examples that count, and take the mean.")
def found_rate(yours: Any, scores: Tensor, places: Tensor, chosen: Tensor) -> Verdict:
    """Grade how often the highest score of a row is at the place of this example, in the examples `chosen`."""
    hits = (scores.argmax(1) == places).double()
    mistakes = {
        "these are the other examples.": hits[~chosen].mean(),
        "this is the number of examples. Divide it by how many there are.": hits[chosen].sum(),
        "this is the share of all examples. Take those that the exercise asks for.": hits.mean(),
        "the examples that count are divided by the number of all.": hits[chosen].sum() / len(hits),
        "this is the lowest score. Take the highest.": (scores.argmin(1) == places)[chosen].double().mean(),
        "this is the mean score at the place. Count how often it is the highest.": (
            scores.double().gather(1, places[:, None])[chosen].mean()
        ),
        "this is how often the place is missed.": 1 - hits[chosen].mean(),
    }
    return judge(yours, hits[chosen].mean(), mistakes)


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
    mistakes = {
        "divide each row by its sum over the tokens.": pair(raw),
        "this is the mean of each place. Take the largest of each example first.": (
            torch.stack([shares.mean(0).max(), total])
        ),
        "the two numbers are in the other order: first the largest share, then the sum.": right.flip(0),
        "the second number is a mean. Add up the shares.": torch.stack([largest, shares.mean()]),
    }
    return judge(yours, right, mistakes)


@exercise(
    "Stack the maps along the last axis. The first generated token is predicted at the last token of the prompt. "
    "Which row is that? Which columns are tokens of the prompt?"
)
def generation_slice(yours: Any, maps: Sequence[Tensor], prompt_length: int) -> Verdict:
    """Grade the scores of a generated text, `(n, m, layers)`, cut from the maps `(1, out, in)` of one pass.

    The pass reads the m tokens of the prompt and all generated tokens except the last. The token at position p + 1 is
    predicted at position p, so the row of the first generated token is m - 1.
    """
    m, whole = prompt_length, torch.cat(list(maps)).movedim(0, -1)
    right = whole[m - 1 :, :m]
    mistakes = {
        "the rows begin one too late, at [m:]. The token at position m was predicted at position m - 1: take "
        "[m - 1 :].": (whole[m:, :m], whole[m:, :m].movedim(-1, 0)),
        "the rows begin one too early. The first generated token is predicted at position m - 1.": whole[m - 2 :, :m],
        "the last row is missing. The last position of the pass predicts the last token.": whole[m - 1 : -1, :m],
        "all columns are kept. The sources are the m tokens of the prompt: take [:m].": whole[m - 1 :],
        "a column is missing. The prompt has m tokens: take [:m].": whole[m - 1 :, : m - 1],
        "these are the rows of the prompt. The generated tokens are predicted at [m - 1 :].": whole[:m, :m],
        "layers are the first axis. The shape is (n, m, layers): stack the maps along the last axis.": (
            right.movedim(-1, 0)
        ),
        "rows and columns are swapped. The first axis counts generated tokens.": (
            right.transpose(0, 1),
            whole[:m, m - 1 :],
        ),
    }
    return judge(yours, right, mistakes)


@exercise("`scores[step, :, layer]` is the row. Add up its entries where the mask hides.")
def hidden_share(yours: Any, scores: Tensor, hidden: Any, *, step: int = 0, layer: int = -1) -> Verdict:
    """Grade the share of a generated token's row, `scores[step, :, layer]`, that a mask (bool) hides."""
    off = torch.as_tensor(hidden)
    row = scores[step, :, layer]
    mistakes = {
        "this is the share that the mask shows.": row[~off].sum(),
        "these are numbers of tokens. Add up their scores.": (off.double().mean(), off.sum()),
        "this is the mean of the hidden scores. Add them up.": row[off].mean(),
        **{f"this is layer {one}.": scores[step, off, one].sum() for one in range(scores.shape[2])},
        **{f"this is the row of generated token {one}.": scores[one, off, layer].sum() for one in range(len(scores))},
    }
    return judge(yours, row[off].sum(), mistakes)
