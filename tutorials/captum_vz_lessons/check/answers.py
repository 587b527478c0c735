"""Grades for what the learner writes without maps: functions, models, predictions, places and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz import verify
from captum_vz.errors import RefusedError
from captum_vz_lessons.check.verdict import Verdict, exercise, judge, judge_function

# Scores, and which of them are cues. The last three have ties, in which the order of the tokens must not count.
RANKINGS = (
    ((0.5, 0.3, 0.1, 0.1), (0, 1, 0, 0)),
    ((0.9, 0.2, 0.4, 0.3), (1, 0, 0, 1)),
    ((0.1, 0.2, 0.3, 0.4), (1, 0, 0, 0)),
    ((0.4, 0.4, 0.1, 0.1), (1, 0, 0, 0)),
    ((0.4, 0.4, 0.1, 0.1), (0, 1, 0, 0)),
    ((0.2, 0.2, 0.2, 0.2), (0, 0, 1, 1)),
)
# Two rows of scores for Kendall's tau.
PAIRS = (
    ((0.1, 0.2, 0.7), (1.0, 3.0, 2.0)),
    ((4.0, 3.0, 2.0, 1.0), (1.0, 2.0, 3.0, 4.0)),
    ((0.1, 0.1, 0.5, 0.3), (0.0, 0.4, 0.4, 0.2)),
)


@exercise("Compute `q @ k.T`, divide by the square root of d, take the softmax over the last axis, multiply by v.")
def attention(yours: Callable[[Tensor, Tensor, Tensor], Any]) -> Verdict:
    r"""Grade a function of q, k and v, each `(tokens, d)`: :math:`\operatorname{softmax}(Q K^\top / \sqrt{d}) V`."""

    def right(q: Tensor, k: Tensor, v: Tensor, times: float = 1, axis: int = -1) -> Tensor:
        return (q @ k.T * times / q.shape[-1] ** 0.5).softmax(axis) @ v

    q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mistakes = {
        "the scores are not divided by the square root of d.": lambda q, k, v: right(q, k, v, 2),
        "the scores are divided by d. Divide by its square root.": lambda q, k, v: right(q, k, v, 0.5),
        "the softmax runs over the wrong axis. The weights of a row sum to 1.": lambda q, k, v: right(q, k, v, 1, 0),
        "queries and keys are swapped: rows are output tokens, Q @ K.T.": lambda q, k, v: right(k, q, v),
        "the softmax is missing.": lambda q, k, v: q @ k.T / 2 @ v,
        "keys and values are swapped.": lambda q, k, v: right(q, v, k),
        "the scores are multiplied by the square root of d. Divide.": lambda q, k, v: right(q, k, v, 4),
        "the exponentials are not divided by their sum.": lambda q, k, v: (q @ k.T / 2).exp() @ v,
        "the scale is the root of the number of tokens. Take that of d.": lambda q, k, v: right(q, k, v, 2 / 5**0.5),
        "the weights are scaled after the softmax. Scale the scores before it.": lambda q, k, v: right(q, k, v, 2) / 2,
        "these are the weights. Multiply them by the values.": lambda q, k, v: (q @ k.T / 2).softmax(-1),
    }
    return judge_function(yours, right, [(q, k, v)], mistakes)


@exercise("Begin with `torch.nn.TransformerEncoder(layer, n).eval()`, with no dropout, and change one thing at a time.")
def verified(model: Any, inputs: Any, layer: nn.Module | list[nn.Module] | None = None) -> Verdict:
    """Grade a model of the learner, by :func:`captum_vz.verify`: are its maps those of the definition?"""
    if model is None or model is ...:
        return Verdict(False, "there is no model yet.", "no answer")
    try:
        report = verify(model, inputs, layer)
    except RefusedError as error:
        return Verdict(False, str(error), "refused")
    return Verdict(report.passed, report.verdict, None if report.passed else "differs", answer=model)


@exercise(
    "Go through `scores.unique().flip(0)`. For each threshold, compute the precision and the recall of all tokens "
    "with at least this score. Add up the precision times the growth of the recall."
)
def average_precision(yours: Callable[[Tensor, Tensor], Any]) -> Verdict:
    r"""Grade a function of scores and cues (bool): average precision, :math:`\sum_n (R_n - R_{n-1}) P_n`.

    n runs over the different scores, from the highest.
    """
    from captum_vz.metrics import cue_average_precision  # with what it needs, a second that other lessons do not spend

    def right(scores: Tensor, cues: Tensor) -> Tensor:
        return cue_average_precision(scores[None], cues[None])[0]

    def in_order(scores: Tensor, cues: Tensor) -> Tensor:
        return cues[scores.argsort(descending=True, stable=True)].double()

    def by_place(hits: Tensor) -> Tensor:
        return (hits.cumsum(0) / torch.arange(1, len(hits) + 1) * hits).sum() / hits.sum()

    mistakes = {
        "ties. Tokens with equal scores share one threshold, so that their order in the sentence does not count. "
        "Compute precision and recall once for each different score.": (
            lambda s, c: by_place(in_order(s, c)),
            lambda s, c: by_place(in_order(s.flip(0), c.flip(0))),
            lambda s, c: right(s + 1e-6 * c, c),
        ),
        "the lowest score comes first. Sort the scores in descending order.": lambda s, c: right(-s, c),
        "divide by the number of cues.": lambda s, c: right(s, c) * c.sum(),
        "this is the reciprocal rank of one cue. Take all cues.": lambda s, c: 1 / (1 + in_order(s, c).argmax()),
        "this is the precision at one place. Take it at each cue.": lambda s, c: in_order(s, c)[: int(c.sum())].mean(),
        "this is the mean score of the cues. Only the order of the scores counts.": lambda s, c: s[c].mean(),
        "this is the share of the cues. Only the order of the scores counts.": lambda s, c: s[c].sum() / s.sum(),
    }
    cases = [(torch.tensor(scores), torch.tensor(cues).bool()) for scores, cues in RANKINGS]
    return judge_function(yours, right, cases, mistakes)


@exercise(
    "For each pair of places, take the sign of the difference in both rows. Add up the products of the signs, and "
    "divide by the root of (untied pairs of one row) times (untied pairs of the other)."
)
def kendall(yours: Callable[[Tensor, Tensor], Any]) -> Verdict:
    r"""Grade a function of two rows of scores: Kendall's :math:`\tau_b`."""

    def signs(row: Tensor) -> Tensor:
        return row[torch.combinations(torch.arange(len(row))).T].diff(dim=0).sign()

    def products(one: Tensor, other: Tensor) -> Tensor:
        return signs(one) * signs(other)

    def right(one: Tensor, other: Tensor) -> Tensor:
        return products(one, other).sum() / (signs(one).abs().sum() * signs(other).abs().sum()).sqrt()

    mistakes = {
        "ties. A pair that is tied in one row counts for the other row only: divide by tau-b's square root.": (
            lambda one, other: products(one, other).mean()
        ),
        "pairs in opposite order are not subtracted.": lambda one, other: (products(one, other) > 0).double().mean(),
        "ties. A pair that is tied in one row only counts in the denominator.": (
            lambda one, other: products(one, other).sum() / products(one, other).abs().sum()
        ),
    }
    cases = [(torch.tensor(one), torch.tensor(other)) for one, other in PAIRS]
    return judge_function(yours, right, cases, mistakes)


@exercise(
    "Give each token its place: `values.argsort(dim=1, descending=True).argsort(dim=1)`. For each k, delete the "
    "tokens whose place is below k, and take the mean prediction."
)
def deletion(
    yours: Callable[[Tensor], Any], predict: Callable[[Tensor], Tensor], scores: Tensor, counts: Sequence[int]
) -> Verdict:
    """Grade a function of scores `(batch, tokens)`: a deletion curve, one number for each k in `counts`.

    The number is the mean prediction after the k tokens with the highest scores are deleted. `predict` takes which
    tokens are deleted, bool `(batch, tokens)`, and returns one number for each example.
    """

    def curve(delete: Callable[[Tensor, int], Tensor], values: Tensor) -> Tensor:
        place = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return torch.stack([predict(delete(place, k)).double().mean() for k in counts])

    def right(values: Tensor) -> Tensor:
        return curve(torch.Tensor.lt, values)

    mistakes = {
        "the tokens with the lowest scores are deleted first. Begin with the highest.": lambda values: right(-values),
        "one token is deleted at a time. Keep the tokens deleted that were deleted before.": (
            lambda values: curve(lambda place, k: place == k - 1, values)
        ),
        "the tokens with the highest scores are kept, and all others deleted.": partial(curve, torch.Tensor.ge),
        "one token too many is deleted. For k = 0, nothing is deleted.": partial(curve, torch.Tensor.le),
        "these are differences from the clean prediction. The curve holds the predictions.": (
            lambda values: right(values)[0] - right(values)
        ),
        "the order is that of all examples together. Sort the tokens of each example.": (
            lambda values: right(values.mean(0, keepdim=True).expand_as(values))
        ),
    }
    return judge_function(yours, right, [(scores,)], mistakes)


@exercise(
    "Make a batch of texts, in which text j has token j replaced: `ids.masked_fill(torch.eye(n).bool(), "
    "replacement)`. Subtract the predictions of these texts from the prediction of `ids`."
)
def blank_out(yours: Any, predict: Callable[[Tensor], Tensor], ids: Tensor, replacement: int) -> Verdict:
    r"""Grade blank-out scores, :math:`p(x) - p(x \setminus x_j)` for each token j.

    `predict` takes token ids `(batch, tokens)` and returns one number for each example. `ids` is one text.
    """
    one = torch.eye(ids.shape[1], dtype=torch.bool)
    clean = predict(ids).double().reshape(())
    without = predict(ids.masked_fill(one, replacement)).double()
    mistakes = {
        "the sign is wrong. The score is the clean prediction minus that without the token.": without - clean,
        "these are predictions. Subtract them from the clean prediction.": without,
        "the tokens stay replaced. Begin with the whole text for each token.": (
            clean - predict(ids.masked_fill(torch.ones_like(one).tril(), replacement)).double()
        ),
    }
    return judge(yours, clean - without, mistakes)


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
