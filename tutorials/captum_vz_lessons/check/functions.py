"""Grades for what the learner writes: attention, a model, average precision, Kendall's tau, and predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from captum_vz import verify
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz_lessons.check.verdict import Verdict, exercise, judge, judge_function

# Scores, and which of them are cues. The last three have ties, in which the order of the tokens must not count.
RANKINGS: tuple[tuple[list[float], list[bool]], ...] = (
    ([0.5, 0.3, 0.1, 0.1], [False, True, False, False]),
    ([0.9, 0.2, 0.4, 0.3], [True, False, False, True]),
    ([0.1, 0.2, 0.3, 0.4], [True, False, False, False]),
    ([0.4, 0.4, 0.1, 0.1], [True, False, False, False]),
    ([0.4, 0.4, 0.1, 0.1], [False, True, False, False]),
    ([0.2, 0.2, 0.2, 0.2], [False, False, True, True]),
)
TIES = (
    "ties. Tokens with equal scores share one threshold, so that their order in the sentence does not count. Compute "
    "precision and recall once for each different score."
)


@exercise("Compute `q @ k.T`, divide by the square root of d, take the softmax over the last axis, multiply by v.")
def attention(yours: Callable[[Tensor, Tensor, Tensor], Any], *, causal: bool = False) -> Verdict:
    r"""Grade a function of q, k and v, each `(tokens, d)`: :math:`\operatorname{softmax}(Q K^\top / \sqrt{d}) V`.

    If `causal`, token i may look at tokens up to i only.

    >>> from captum_vz_lessons import check
    >>> check.attention(lambda q, k, v: (q @ k.T).softmax(-1) @ v)
    Not yet. attention: the scores are not divided by the square root of d.
    You go on with the package's answer. This exercise counts as open.
    """
    q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    there = torch.ones(5, 5, dtype=torch.bool).tril() if causal else torch.ones(5, 5, dtype=torch.bool)
    products = q @ k.T
    scaled = products / 2

    def with_scores(scores: Tensor, axis: int = -1) -> Tensor:
        return scores.where(there, -torch.inf).softmax(axis).nan_to_num() @ v

    mistakes: list[tuple[str, Tensor]] = [
        ("the scores are not divided by the square root of d.", with_scores(products)),
        ("the scores are divided by d. Divide by its square root.", with_scores(products / 4)),
        ("the softmax runs over the wrong axis. The weights of each output token sum to 1.", with_scores(scaled, 0)),
        ("queries and keys are swapped: rows are output tokens, Q @ K.T.", with_scores(scaled.T)),
        ("the softmax is missing.", scaled.where(there, 0) @ v),
        ("keys and values are swapped.", (q @ v.T / 2).where(there, -torch.inf).softmax(-1) @ k),
        ("the scores are multiplied by the square root of d. Divide.", with_scores(products * 2)),
        ("the exponentials are not divided by their sum.", scaled.exp().where(there, 0) @ v),
        ("the scale is the root of the number of tokens. Take that of d.", with_scores(products / 5**0.5)),
        ("the weights are scaled after the softmax. Scale the scores before it.", with_scores(products) / 2),
        ("these are the weights. Multiply them by the values.", scaled.where(there, -torch.inf).softmax(-1)),
    ]
    if causal:
        mistakes += [
            ("the causal mask is missing. Token i may look at tokens up to i only.", scaled.softmax(-1) @ v),
            ("the mask is applied after the softmax, so rows do not sum to 1.", scaled.softmax(-1).tril() @ v),
        ]

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return judge_function(yours, right, [(q, k, v)], mistakes)


@exercise("Begin with `torch.nn.TransformerEncoder(layer, n).eval()`, with no dropout, and change one thing at a time.")
def verified(model: Any, inputs: Any, layer: nn.Module | list[nn.Module] | None = None) -> Verdict:
    """Grade a model of the learner, by :func:`captum_vz.verify`: are its maps those of the definition?"""
    instead = _torch_model(inputs)
    if model is None or model is ...:
        return Verdict(False, "there is no model yet.", "no answer", answer=instead)
    try:
        report = verify(model, inputs, layer)
    except RefusedError as error:
        return Verdict(False, str(error), "refused", answer=instead)
    mistake = None if report.passed else "differs"
    return Verdict(report.passed, report.verdict, mistake, answer=model if report.passed else instead)


def _torch_model(inputs: Any) -> nn.Module | None:
    """A model of torch's own that takes hidden states such as these. None: the inputs are something else."""
    if not (isinstance(inputs, Tensor) and inputs.dim() == 3 and inputs.is_floating_point()):
        return None
    layer = nn.TransformerEncoderLayer(inputs.shape[-1], 1, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(inputs).eval()


@exercise(
    "Go through `scores.unique().flip(0)`. For each threshold, compute the precision and the recall of all tokens "
    "with at least this score. Add up the precision times the growth of the recall."
)
def average_precision(yours: Callable[[Tensor, Tensor], Any]) -> Verdict:
    r"""Grade a function of scores and cues (bool): average precision, :math:`\sum_n (R_n - R_{n-1}) P_n`.

    n runs over the different scores, from the highest.
    """
    cases = [(torch.tensor(scores), torch.tensor(cues)) for scores, cues in RANKINGS]
    mistakes: list[tuple[str, Callable[[Tensor, Tensor], Any]]] = [
        (TIES, lambda s, c: _by_place(c[_order(s)])),
        (TIES, lambda s, c: _by_place(c[len(s) - 1 - _order(s.flip(0))])),
        ("the lowest score comes first. Sort the scores in descending order.", lambda s, c: _precision(-s, c)),
        (TIES, lambda s, c: _precision(s + 1e-6 * c, c)),
        ("this is the area by trapezoids. Take each precision times the growth of recall.", _trapezoids),
        ("divide by the number of cues.", lambda s, c: _precision(s, c) * c.sum()),
        ("places are counted from 0. The first place has the number 1.", lambda s, c: _by_place(c[_order(s)], 0)),
        (
            "this is the reciprocal rank of the first cue. Take the mean over all cues.",
            lambda s, c: 1 / (1 + c[_order(s)].int().argmax()),
        ),
        (
            "this is the precision at the number of cues. Take the precision at each cue.",
            lambda s, c: c[_order(s)][: int(c.sum())].double().mean(),
        ),
        ("this is the mean score of the cues. Only the order of the scores counts.", lambda s, c: s[c].mean()),
        ("this is the share of the cues. Only the order of the scores counts.", lambda s, c: s[c].sum() / s.sum()),
    ]
    found = [(name, [float(wrong(*case)) for case in cases]) for name, wrong in mistakes]
    return judge_function(yours, _precision, cases, found)


def _order(scores: Tensor) -> Tensor:
    return scores.argsort(descending=True, stable=True)


def _precision(scores: Tensor, cues: Tensor) -> float:
    total = recall = 0.0
    for threshold in scores.unique().flip(0):
        chosen = scores >= threshold
        hits = (chosen & cues).sum().item()
        total += (hits / cues.sum().item() - recall) * hits / chosen.sum().item()
        recall = hits / cues.sum().item()
    return total


def _by_place(cues: Tensor, first: int = 1) -> float:
    """The mean precision at each cue, in an order without ties. Places are counted from `first`."""
    hits = cues.double()
    places = torch.arange(first, len(hits) + first).clamp_min(1)
    return float((hits.cumsum(0) / places * hits).sum() / hits.sum())


def _trapezoids(scores: Tensor, cues: Tensor) -> float:
    """The area under the curve of precision over recall, with straight lines between its points."""
    chosen = scores >= scores.unique().flip(0)[:, None]
    hits = (chosen & cues).sum(1).double()
    precision, recall = hits / chosen.sum(1), hits / cues.sum()
    start = torch.ones(1, dtype=torch.float64)
    return torch.trapezoid(torch.cat([start, precision]), torch.cat([0 * start, recall])).item()


@exercise(
    "For each pair of places, take the sign of the difference in both rows. Add up the products of the signs, and "
    "divide by the root of (untied pairs of one row) times (untied pairs of the other)."
)
def kendall(yours: Callable[[Tensor, Tensor], Any]) -> Verdict:
    r"""Grade a function of two rows of scores: Kendall's :math:`\tau_b`."""
    rows = [
        ([0.1, 0.2, 0.7], [1.0, 3.0, 2.0]),
        ([4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]),
        ([0.1, 0.1, 0.5, 0.3], [0.0, 0.4, 0.4, 0.2]),
    ]
    cases = [(torch.tensor(one), torch.tensor(other)) for one, other in rows]
    _, plain, share, gamma = zip(*(_kendall(*case) for case in cases), strict=True)
    mistakes = [
        ("ties. A pair that is tied in one row counts for the other row only: divide by tau-b's square root.", plain),
        ("pairs in opposite order are not subtracted.", share),
        ("ties. A pair that is tied in one row only counts in the denominator.", gamma),
    ]
    return judge_function(yours, lambda one, other: torch.tensor(_kendall(one, other)[0]), cases, mistakes)


def _kendall(one: Tensor, other: Tensor) -> tuple[float, float, float, float]:
    """Tau-b, tau without a correction for ties, the share of pairs in the same order, and gamma, which drops ties."""
    a, b = one.tolist(), other.tolist()
    signs = [((a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])) for i, j in combinations(range(len(a)), 2)]
    same = sum(x * y > 0 for x, y in signs)
    difference = sum(x * y for x, y in signs)
    first, second = (sum(abs(pair[side]) for pair in signs) for side in (0, 1))
    untied = sum(x * y != 0 for x, y in signs)
    return difference / (first * second) ** 0.5, difference / len(signs), same / len(signs), difference / untied


@exercise(
    "Give each token its place: `values.argsort(dim=1, descending=True).argsort(dim=1)`. For each k, delete the "
    "tokens whose place is below k, and take the mean prediction."
)
def deletion(yours: Any, predict: Callable[[Tensor], Tensor], scores: Tensor, counts: Sequence[int]) -> Verdict:
    """Grade a deletion curve: the mean prediction after the k tokens with the highest scores are deleted.

    The answer holds a number for each k in `counts`, or is a function of scores `(batch, tokens)` that returns them.
    `predict` takes which tokens are deleted, bool `(batch, tokens)`, and returns one number for each example.
    """
    if scores.dim() != 2 or any(not 0 <= k <= scores.shape[1] for k in counts):
        raise ArgumentError(f"pass scores (batch, tokens), got {tuple(scores.shape)}, and counts of its tokens.")

    def places(values: Tensor) -> Tensor:
        return values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)

    def curve(delete: Callable[[int], Tensor]) -> Tensor:
        return torch.stack([predict(delete(k)).double().mean() for k in counts])

    def by_score(values: Tensor) -> Tensor:
        place = places(values)
        return curve(lambda k: place < k)

    place, right = places(scores), by_score(scores)
    mistakes = [
        ("the tokens with the lowest scores are deleted first. Begin with the highest.", lambda: by_score(-scores)),
        (
            "one token is deleted at a time. Keep the tokens deleted that were deleted before.",
            lambda: curve(lambda k: place == k - 1),
        ),
        ("the tokens with the highest scores are kept, and all others deleted.", lambda: curve(lambda k: place >= k)),
        ("one token too many is deleted. For k = 0, nothing is deleted.", lambda: curve(lambda k: place <= k)),
        ("these are differences from the clean prediction. The curve holds the predictions.", right[0] - right),
        (
            "the order is that of all examples together. Sort the tokens of each example.",
            lambda: by_score(scores.mean(0, keepdim=True).expand_as(scores)),
        ),
    ]
    if callable(yours):
        return judge_function(yours, by_score, [(scores,)], mistakes)
    return judge(yours, right, mistakes)


@exercise(
    "Make a batch of texts, in which text j has token j replaced: `ids.masked_fill(torch.eye(n).bool(), "
    "replacement)`. Subtract the predictions of these texts from the prediction of `ids`."
)
def blank_out(yours: Any, predict: Callable[[Tensor], Tensor], ids: Tensor, replacement: int) -> Verdict:
    r"""Grade blank-out scores, :math:`p(x) - p(x \setminus x_j)` for each token j.

    `predict` takes token ids `(batch, tokens)` and returns one number for each example. `ids` is one text.
    """
    if ids.dim() != 2 or len(ids) != 1:
        raise ArgumentError(f"ids is {tuple(ids.shape)}: pass the ids of one text, (1, tokens).")
    one = torch.eye(ids.shape[1], dtype=torch.bool)
    several = torch.ones_like(one).tril()
    clean = predict(ids).double().reshape(())
    without = predict(ids.masked_fill(one, replacement)).double()
    mistakes = [
        ("the sign is wrong. The score is the clean prediction minus that without the token.", without - clean),
        ("these are predictions. Subtract them from the clean prediction.", without),
        (
            "the tokens stay replaced. Begin with the whole text for each token.",
            lambda: clean - predict(ids.masked_fill(several, replacement)).double(),
        ),
    ]
    return judge(yours, clean - without, mistakes)
