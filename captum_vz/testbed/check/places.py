"""Grades for places and counts: patches, frames, the tokens that a row points at, and what a mask hides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.testbed.check.verdict import Verdict, judge


def patch_token(yours: Any, row: int, column: int, *, patch: int, side: int, hint: bool = False) -> Verdict:
    """Grade the token of the patch that covers a pixel: token 0 is `[CLS]`, and the patches follow row by row.

    It recognizes a forgotten `[CLS]`, rows and columns swapped, and pixels that are counted in place of patches.

    Args:
        yours: A whole number.
        row: The row of the pixel, counted from 0.
        column: The column of the pixel.
        patch: The side of a patch, in pixels.
        side: The number of patches in a row.
        hint: Whether a wrong answer gets a second hint.

    >>> from captum_vz.testbed import check
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
    return judge("patch_token", yours, 1 + place, mistakes, hint=hint)


def frame_centers(
    yours: Any, kernels: Sequence[int], strides: Sequence[int], frames: int, *, hint: bool = False
) -> Verdict:
    """Grade the centers of frames, in samples, after several convolutions without padding.

    It recognizes centers that begin at 0 or at the end of the first frame, strides that are not multiplied, and kernels
    that are not multiplied by the strides before them.

    Args:
        yours: One number for each frame, `(frames,)`.
        kernels: The width of each convolution, first convolution first.
        strides: Its stride.
        frames: The number of frames.
        hint: Whether a wrong answer gets a second hint.
    """
    before = [1]
    for stride in strides:
        before.append(before[-1] * stride)
    number = torch.arange(frames, dtype=torch.float64)

    def centers(begin: float, apart: float = before[-1]) -> Tensor:
        return begin + apart * number

    pairs = list(zip(kernels, before, strict=False))
    first = sum((kernel - 1) / 2 * apart for kernel, apart in pairs)
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
    return judge("frame_centers", yours, centers(first), mistakes, hint=hint)


def copied_from(yours: Any, source: Tensor, written: Tensor, *, hint: bool = False) -> Verdict:
    """Grade the source position that each written token is a copy of: the true columns of a map of cross-attention.

    It recognizes the reading order, positions that are counted from 1, and those of the token that was written before.

    Args:
        yours: One position for each written token, counted from 0.
        source: Token ids of several examples, `(batch, source tokens)`.
        written: What the decoder writes, `(batch, n)`. Written token i copies the same position in all examples.
        hint: Whether a wrong answer gets a second hint.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> source = torch.tensor([[4, 5, 6], [5, 6, 4]])
    >>> check.copied_from([2, 1, 0], source, source.flip(1)).passed
    True
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
    return judge("copied_from", yours, right, mistakes, hint=hint)


def source_read(
    yours: Any, model: Any, inputs: Any, row: int, *, layer: int | nn.Module = -1, hint: bool = False
) -> Verdict:
    """Grade the source position on which a row of cross-attention draws most, by Value Zeroing.

    It recognizes another position that holds the same token, and the position of another row.

    Args:
        yours: A position, counted from 0.
        model: A model with encoder and decoder.
        inputs: One example, with `input_ids` and `decoder_input_ids`.
        row: The position of the token that the decoder reads before it writes.
        layer: A layer of the decoder, or its index.
        hint: Whether a wrong answer gets a second hint.
    """
    one = find_layers(model, "decoder")[layer] if isinstance(layer, int) else layer
    best = ValueZeroing(model, one, attention="cross").attribute(inputs)[0].argmax(1).tolist()
    ids = inputs["input_ids"][0].tolist()
    mistakes = [
        (f"position {place} holds the same token, and has the smaller share of the row.", place)
        for place in range(len(ids))
        if ids[place] == ids[best[row]]
    ]
    mistakes += [(f"this is the position of row {other}.", place) for other, place in enumerate(best)]
    return judge("source_read", yours, best[row], mistakes, hint=hint)


def found_rate(
    yours: Any, scores: Tensor, places: Tensor, chosen: Tensor | None = None, *, hint: bool = False
) -> Verdict:
    """Grade how often the highest score of a row stands at a given place.

    It recognizes a count in place of a share, the examples that were not chosen, all examples, and the lowest score.

    Args:
        yours: A number from 0 to 1.
        scores: `(batch, tokens)`.
        places: The place in each example, `(batch,)`.
        chosen: The examples that count, bool `(batch,)`. None: all.
        hint: Whether a wrong answer gets a second hint.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> check.found_rate(1, torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]))
    Not yet. found_rate: this is the number of examples. Divide it by how many there are.
    You go on with the package's answer. This exercise counts as open.
    """
    there = torch.ones(len(places), dtype=torch.bool) if chosen is None else chosen
    hits = (scores.argmax(1) == places).double()
    mistakes: list[tuple[str, Any]] = [
        ("this is the number of examples. Divide it by how many there are.", hits[there].sum()),
        ("this is the share of all examples. Take those that the exercise asks for.", hits.mean()),
        ("the examples that count are divided by the number of all.", hits[there].sum() / len(hits)),
        ("this is the lowest score. Take the highest.", (scores.argmin(1) == places)[there].double().mean()),
        ("this is the mean score at the place. Count how often it is the highest.", _at(scores, places)[there].mean()),
        ("this is how often the place is missed.", 1 - hits[there].mean()),
    ]
    if not there.all():
        mistakes.insert(0, ("these are the other examples.", hits[~there].mean()))
    return judge("found_rate", yours, hits[there].mean(), mistakes, hint=hint)


def place_shares(yours: Any, scores: Tensor, places: Tensor, *, hint: bool = False) -> Verdict:
    """Grade two means over all examples: the largest share at one of several places, and the sum of their shares.

    It recognizes rows that are not divided by their sums, a mean that is taken before the largest, and the two numbers
    in the other order.

    Args:
        yours: Two numbers: the mean of the largest share, and the mean of the sum.
        scores: `(batch, tokens)`. A share is a score divided by the sum of its row.
        places: `(batch, places)`.
        hint: Whether a wrong answer gets a second hint.
    """

    def pair(shares: Tensor) -> Tensor:
        return torch.stack([shares.amax(1).mean(), shares.sum(1).mean()])

    raw = scores.double().gather(1, places)
    shares = raw / scores.double().sum(1, keepdim=True)
    right = pair(shares)
    mistakes = [
        ("divide each row by its sum over the tokens.", pair(raw)),
        (
            "this is the mean of each place. Take the largest of each example first.",
            torch.stack([shares.mean(0).max(), right[1]]),
        ),
        ("the two numbers are in the other order: first the largest share, then the sum.", right.flip(0)),
        ("the second number is a mean. Add up the shares.", torch.stack([right[0], shares.mean()])),
    ]
    return judge("place_shares", yours, right, mistakes, hint=hint)


def hidden_share(
    yours: Any, scores: Tensor, hidden: Any, *, step: int = 0, layer: int = -1, hint: bool = False
) -> Verdict:
    """Grade the share of a generated token's row that a mask hides.

    It recognizes the share that is shown, the number of hidden tokens, a mean, another layer, and another step.

    Args:
        yours: A number.
        scores: `(n, m, layers)`, see :attr:`captum_vz.generation.GenerationAttribution.scores`.
        hidden: Which prompt tokens are hidden, bool `(m,)`.
        step: The generated token, counted from 0.
        layer: The index of the layer.
        hint: Whether a wrong answer gets a second hint.
    """
    off = torch.as_tensor(hidden)
    row, right = scores[step, :, layer], scores[step, off, layer].sum()
    mistakes = [
        ("this is the share that the mask shows.", row[~off].sum()),
        ("these are numbers of tokens. Add up their scores.", off.double().mean()),
        ("these are numbers of tokens. Add up their scores.", off.sum()),
        ("this is the mean of the hidden scores. Add them up.", row[off].mean()),
        *((f"this is layer {one}.", scores[step, off, one].sum()) for one in range(scores.shape[2])),
        *((f"this is the row of generated token {one}.", scores[one, off, layer].sum()) for one in range(len(scores))),
    ]
    return judge("hidden_share", yours, right, mistakes, hint=hint)


def _at(scores: Tensor, places: Tensor) -> Tensor:
    return scores.double().gather(1, places[:, None])[:, 0]
