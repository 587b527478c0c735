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
from captum_vz.testbed.check.verdict import Verdict, judge, judge_function

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


def attention(yours: Callable[[Tensor, Tensor, Tensor], Any], *, causal: bool = False, hint: bool = False) -> Verdict:
    r"""Grade a function that computes attention, :math:`\operatorname{softmax}(Q K^\top / \sqrt{d}) V`.

    It recognizes scores that are not divided by :math:`\sqrt{d}`, or by d, a softmax over the wrong axis, a forgotten
    softmax, a forgotten causal mask, and a mask that is applied after the softmax.

    Args:
        yours: A function of q, k and v, each `(tokens, d)`, that returns `(tokens, d)`.
        causal: Whether token i may look at tokens up to i only.
        hint: Whether a wrong answer gets a second hint.

    >>> from torch.nn.functional import scaled_dot_product_attention
    >>> from captum_vz.testbed import check
    >>> check.attention(scaled_dot_product_attention).passed
    True
    >>> check.attention(lambda q, k, v: (q @ k.T).softmax(-1) @ v)
    Not yet. attention: the scores are not divided by the square root of d.
    You go on with the package's answer. This exercise counts as open.
    """
    q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    there = torch.ones(5, 5, dtype=torch.bool).tril() if causal else torch.ones(5, 5, dtype=torch.bool)
    products = q @ k.T

    def with_scores(scores: Tensor, axis: int = -1) -> Tensor:
        return scores.where(there, -torch.inf).softmax(axis).nan_to_num() @ v

    scaled = products / 2
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

    return judge_function("attention", yours, right, [(q, k, v)], mistakes, hint=hint)


def verified(
    model: Any, inputs: Any, layer: nn.Module | list[nn.Module] | None = None, *, hint: bool = False
) -> Verdict:
    """Grade a model of the learner: do its maps agree with the definition of Value Zeroing?

    The check is :func:`captum_vz.verify`. A model that the package refuses is not right yet, and the message says why.

    Args:
        model: A model in eval mode, or a function that runs the layers.
        inputs: What the model takes.
        layer: Its Transformer blocks. None: the layers that :func:`captum_vz.find_layers` finds.
        hint: Whether a wrong answer gets a second hint.
    """
    if model is None or model is ...:
        verdict = Verdict(False, "verified", "there is no model yet.", "no answer")
    else:
        try:
            report = verify(model, inputs, layer)
            mistake = None if report.passed else "differs"
            verdict = Verdict(report.passed, "verified", report.verdict, mistake, answer=model)
        except RefusedError as error:
            verdict = Verdict(False, "verified", str(error), "refused")
    return verdict if verdict else verdict.going_on(_torch_model(inputs), hint)


def average_precision(yours: Callable[[Tensor, Tensor], Any], *, hint: bool = False) -> Verdict:
    r"""Grade a function that computes average precision, :math:`\sum_n (R_n - R_{n-1}) P_n`.

    n runs over the different scores, from the highest. It recognizes ties that are broken by the order of the tokens,
    an ascending order, places that are counted from 0, and the reciprocal rank or the precision at the number of cues.

    Args:
        yours: A function of scores `(tokens,)` and cues, bool `(tokens,)`, that returns a number.
        hint: Whether a wrong answer gets a second hint.

    >>> from captum_vz.metrics import cue_average_precision
    >>> from captum_vz.testbed import check
    >>> check.average_precision(lambda scores, cues: cue_average_precision(scores[None], cues[None])[0]).passed
    True
    """
    mistakes = [
        (TIES, _all(_by_position(False))),
        (TIES, _all(_by_position(True))),
        ("the lowest score comes first. Sort the scores in descending order.", _all(lambda s, c: _precision(-s, c))),
        (TIES, _all(lambda s, c: _precision(s + 1e-6 * c, c))),
        ("this is the area by trapezoids. Take each precision times the growth of recall.", _all(_trapezoids)),
        ("divide by the number of cues.", _all(lambda s, c: _precision(s, c) * int(c.sum()))),
        ("places are counted from 0. The first place has the number 1.", _all(_from_zero)),
        ("this is the reciprocal rank of the first cue. Take the mean over all cues.", _all(_reciprocal)),
        ("this is the precision at the number of cues. Take the precision at each cue.", _all(_at_cues)),
        ("this is the mean score of the cues. Only the order of the scores counts.", _all(_mean_score)),
        ("this is the share of the cues. Only the order of the scores counts.", _all(_share)),
    ]
    cases = [(torch.tensor(scores), torch.tensor(cues)) for scores, cues in RANKINGS]
    return judge_function("average_precision", yours, _precision, cases, mistakes, hint=hint)


def kendall(yours: Callable[[Tensor, Tensor], Any], *, hint: bool = False) -> Verdict:
    r"""Grade a function that computes Kendall's :math:`\tau_b` of two rows of scores.

    It recognizes ties that are not left out of the denominator, and discordant pairs that are not subtracted.

    Args:
        yours: A function of two rows `(tokens,)` that returns a number.
        hint: Whether a wrong answer gets a second hint.
    """
    rows = [
        ([0.1, 0.2, 0.7], [1.0, 3.0, 2.0]),
        ([4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]),
        ([0.1, 0.1, 0.5, 0.3], [0.0, 0.4, 0.4, 0.2]),
    ]
    _, plain, share, gamma = zip(*(_kendall(a, b) for a, b in rows), strict=True)
    mistakes = [
        ("ties. A pair that is tied in one row counts for the other row only: divide by tau-b's square root.", plain),
        ("pairs in opposite order are not subtracted.", share),
        ("ties. A pair that is tied in one row only counts in the denominator.", gamma),
    ]

    def right(one: Tensor, other: Tensor) -> Tensor:
        return torch.tensor(_kendall(one.tolist(), other.tolist())[0])

    cases = [(torch.tensor(one), torch.tensor(other)) for one, other in rows]
    return judge_function("kendall", yours, right, cases, mistakes, hint=hint)


def deletion(
    yours: Any, predict: Callable[[Tensor], Tensor], scores: Tensor, counts: Sequence[int], *, hint: bool = False
) -> Verdict:
    """Grade a deletion curve: the mean prediction after the k tokens with the highest scores are deleted.

    It recognizes deletion from the lowest score, only the k-th token deleted, all others deleted (insertion), a curve
    that begins one step late, and differences from the clean prediction.

    Args:
        yours: One number for each of `counts`, or a function of scores `(batch, tokens)` that returns them.
        predict: Takes which tokens are deleted, bool `(batch, tokens)`, and returns one number for each example.
        scores: `(batch, tokens)`. Of equal scores, the earlier token is deleted first.
        counts: The numbers k of deleted tokens.
        hint: Whether a wrong answer gets a second hint.

    >>> import torch
    >>> from captum_vz.testbed import check
    >>> scores = torch.tensor([[3.0, 1.0, 2.0]])
    >>> predict = lambda deleted: 1 - (deleted * torch.tensor([0.5, 0.1, 0.3])).sum(1)
    >>> check.deletion([1.0, 0.5, 0.2], predict, scores, counts=[0, 1, 2]).passed
    True
    >>> check.deletion([1.0, 0.9, 0.6], predict, scores, counts=[0, 1, 2])
    Not yet. deletion: the tokens with the lowest scores are deleted first. Begin with the highest.
    You go on with the package's answer. This exercise counts as open.
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

    place, reverse, right = places(scores), places(-scores), by_score(scores)
    mistakes = [
        (
            "the tokens with the lowest scores are deleted first. Begin with the highest.",
            lambda: curve(lambda k: reverse < k),
        ),
        (
            "one token is deleted at a time. Keep the tokens deleted that were deleted before.",
            lambda: curve(lambda k: place == k - 1),
        ),
        ("the tokens with the highest scores are kept, and all others deleted.", lambda: curve(lambda k: place >= k)),
        ("one token too many is deleted. For k = 0, nothing is deleted.", lambda: curve(lambda k: place <= k)),
        ("these are differences from the clean prediction. The curve holds the predictions.", right[0] - right),
        (
            "the order is that of all examples together. Sort the tokens of each example.",
            lambda: curve(lambda k: places(scores.mean(0, keepdim=True)).expand_as(place) < k),
        ),
    ]
    if callable(yours):
        return judge_function("deletion", yours, by_score, [(scores,)], mistakes, hint=hint)
    return judge("deletion", yours, right, mistakes, hint=hint)


def blank_out(
    yours: Any, predict: Callable[[Tensor], Tensor], ids: Tensor, replacement: int, *, hint: bool = False
) -> Verdict:
    r"""Grade blank-out scores, :math:`p(x) - p(x \setminus x_j)` for each token j.

    It recognizes the opposite sign, the predictions themselves, and tokens that stay replaced.

    Args:
        yours: One number for each token.
        predict: Takes token ids `(batch, tokens)` and returns one number for each example.
        ids: The ids of one text, `(1, tokens)`.
        replacement: The id that replaces a token, such as the id of the mask.
        hint: Whether a wrong answer gets a second hint.
    """
    count = ids.shape[1]
    if ids.dim() != 2 or len(ids) != 1:
        raise ArgumentError(f"ids is {tuple(ids.shape)}: pass the ids of one text, (1, tokens).")
    one, several = torch.eye(count, dtype=torch.bool), torch.ones(count, count, dtype=torch.bool).tril()
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
    return judge("blank_out", yours, clean - without, mistakes, hint=hint)


def _torch_model(inputs: Any) -> nn.Module | None:
    """A model of torch's own that takes hidden states such as these. None: the inputs are something else."""
    if not (isinstance(inputs, Tensor) and inputs.dim() == 3 and inputs.is_floating_point()):
        return None
    layer = nn.TransformerEncoderLayer(inputs.shape[-1], 1, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(inputs).eval()


def _all(function: Callable[[Tensor, Tensor], float]) -> list[float]:
    return [function(torch.tensor(scores), torch.tensor(cues)) for scores, cues in RANKINGS]


def _precision(scores: Tensor, cues: Tensor) -> float:
    total = recall = 0.0
    for threshold in scores.unique().flip(0):
        chosen = scores >= threshold
        hits = (chosen & cues).sum().item()
        total += (hits / cues.sum().item() - recall) * hits / chosen.sum().item()
        recall = hits / cues.sum().item()
    return total


def _trapezoids(scores: Tensor, cues: Tensor) -> float:
    """The area under the curve of precision over recall, with straight lines between its points."""
    chosen = scores >= scores.unique().flip(0)[:, None]
    hits = (chosen & cues).sum(1).double()
    precision, recall = hits / chosen.sum(1), hits / cues.sum()
    start = torch.ones(1, dtype=torch.float64)
    return torch.trapezoid(torch.cat([start, precision]), torch.cat([0 * start, recall])).item()


def _by_position(last_first: bool) -> Callable[[Tensor, Tensor], float]:
    """Average precision in which the token that comes first (or last) in the sentence wins a tie."""

    def precision(scores: Tensor, cues: Tensor) -> float:
        order = scores.argsort(descending=True, stable=True)
        if last_first:
            order = len(scores) - 1 - scores.flip(0).argsort(descending=True, stable=True)
        hits = cues[order].double()
        return float((hits.cumsum(0) / torch.arange(1, len(hits) + 1) * hits).sum() / hits.sum())

    return precision


def _from_zero(scores: Tensor, cues: Tensor) -> float:
    hits = cues[scores.argsort(descending=True, stable=True)].double()
    return float((hits.cumsum(0) / torch.arange(len(hits)).clamp_min(1) * hits).sum() / hits.sum())


def _reciprocal(scores: Tensor, cues: Tensor) -> float:
    return 1 / (1 + int(cues[scores.argsort(descending=True, stable=True)].int().argmax()))


def _at_cues(scores: Tensor, cues: Tensor) -> float:
    return float(cues[scores.argsort(descending=True, stable=True)][: int(cues.sum())].double().mean())


def _mean_score(scores: Tensor, cues: Tensor) -> float:
    return float(scores[cues].mean())


def _share(scores: Tensor, cues: Tensor) -> float:
    return float(scores[cues].sum() / scores.sum())


def _kendall(a: list[float], b: list[float]) -> tuple[float, float, float, float]:
    """Tau-b, tau without a correction for ties, the share of pairs in the same order, and gamma, which drops ties."""
    signs = [((a[i] > a[j]) - (a[i] < a[j]), (b[i] > b[j]) - (b[i] < b[j])) for i, j in combinations(range(len(a)), 2)]
    same = sum(x * y > 0 for x, y in signs)
    difference = sum(x * y for x, y in signs)
    first, second = (sum(abs(pair[side]) for pair in signs) for side in (0, 1))
    untied = sum(x * y != 0 for x, y in signs)
    return difference / (first * second) ** 0.5, difference / len(signs), same / len(signs), difference / untied
