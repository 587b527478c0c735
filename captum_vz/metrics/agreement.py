"""Rows of scores, and their agreement: with the words that a person knows to decide, and with each other.

Both ask how tokens are ordered. Tokens of equal scores share their rank, or the last of the highest places.

>>> scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
>>> cues = torch.tensor([[False, True, False, False]])
>>> content = torch.tensor([[False, True, True, True]])  # the first token is [CLS]
>>> cue_dot_product(scores, cues), cue_dot_product(scores, cues, keep=content)
(tensor([0.3000], dtype=torch.float64), tensor([0.6000], dtype=torch.float64))
>>> cue_average_precision(scores, cues), cue_reciprocal_rank(scores, cues), cue_precision(scores, cues, k=2)
(tensor([0.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
>>> other = torch.tensor([[0.1, 0.3, 0.4, 0.2]])
>>> spearman(scores, other), kendall(scores, other), top_k_overlap(scores, other, k=2)
(tensor([-0.6325], dtype=torch.float64), tensor([-0.5477], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.functional import normalize_rows
from captum_vz.functional.scores import kendall_tau

with needs_extra("captum_vz.metrics", "study"):
    from scipy import stats


def cue_dot_product(scores: Tensor, cues: Tensor, keep: Tensor | None = None) -> Tensor:
    r"""How much of a row of scores lies on the cue tokens.

    .. math:: \textstyle\sum_j \xi_j s_j, \qquad \xi_j = [\,j \text{ is a cue}\,]

    `Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_, section 5. Of scores whose rows sum to 1 it is
    a share: 1 is perfect, and chance is the share of cues among the tokens.

    Args:
        scores: `(batch, tokens)`, the row of the target token in each example.
        cues: Booleans `(1 or batch, tokens)`: the tokens that decide.
        keep: Booleans `(1 or batch, tokens)`: the tokens that count. The others (special tokens, the target) are
            dropped, and rows are divided by the sum of the rest. None: all, and rows are not divided.

    Returns:
        `(batch,)` in float64. NaN for an example without a cue, with a NaN among its scores, or, with `keep`, with a
        sum of 0.

    Raises:
        ArgumentError: Shapes do not fit, `keep` drops a cue, or scores are negative where rows are divided by their
            sum.
    """
    values, kept, cued, missing = _aligned(scores, cues, keep)
    values = values.where(kept, 0)
    if keep is not None:
        if (values < 0).any():
            raise ArgumentError(
                "scores has negative values, which make no shares: take absolute values first, or no keep."
            )
        values = normalize_rows(values)
        missing = missing | (values.sum(-1) == 0)
    return values.where(cued | values.isnan(), 0).sum(-1).masked_fill(missing, torch.nan)


def cue_average_precision(scores: Tensor, cues: Tensor, keep: Tensor | None = None) -> Tensor:
    r"""How well a row of scores ranks the cues before the other tokens.

    .. math:: \textstyle\sum_n (R_n - R_{n-1})\, P_n

    with precision :math:`P_n` and recall :math:`R_n` at the n-th highest of the different scores. Tokens of equal
    score share a threshold, so their order in the sentence does not matter. As in scikit-learn; used for cue
    alignment by `Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_, section 5.

    Args:
        scores: `(batch, tokens)`, of any sign and scale, because only their order counts.
        cues: See :func:`cue_dot_product`.
        keep: See there. None: all tokens are ranked, padding too.

    Returns:
        `(batch,)` in float64: 1 if all cues come first; the share of cues if all scores are equal. NaN for an example
        without a cue or with a NaN among its scores.
    """
    values, kept, cued, missing = _aligned(scores, cues, keep)
    # As comparisons, tokens of equal scores share a threshold. Of each cue: which tokens have no lower score?
    retrieved = (values[:, None, :] >= values[:, :, None]) & kept[:, None, :]
    hits = (retrieved & cued[:, None, :]).sum(-1).double()
    precisions = (hits / retrieved.sum(-1).clamp_min(1)).where(cued, 0)
    # The order of the sum does not depend on the places of the cues, so equal rankings have equal values.
    return (precisions.sort(-1).values.sum(-1) / cued.sum(-1)).masked_fill(missing, torch.nan)


def cue_reciprocal_rank(scores: Tensor, cues: Tensor, keep: Tensor | None = None) -> Tensor:
    r"""One divided by the rank of the highest cue. Its mean over examples is the mean reciprocal rank (MRR).

    .. math:: 1 \big/ \min_{j \text{ is a cue}} \operatorname{rank}(s_j)

    (`Voorhees 1999 <https://trec.nist.gov/pubs/trec8/papers/qa_report.pdf>`_). Rank 1 is the highest score. Of tokens
    with equal scores, each order is equally likely, and the result is the expectation. Only the first cue counts, so
    further cues are free. Sparse rows gain nothing by their zeros.

    Args:
        scores: See :func:`cue_average_precision`, like `cues` and `keep`.
        cues: See there.
        keep: See there.

    Returns:
        `(batch,)` in float64, up to 1. NaN for an example without a cue or with a NaN among its scores.
    """
    values, kept, cued, missing = _aligned(scores, cues, keep)
    rows = zip(values, kept, cued, missing, strict=True)
    found = [float("nan") if skip else _reciprocal(*row) for *row, skip in rows]
    return torch.tensor(found, dtype=torch.float64)


def _reciprocal(values: Tensor, keep: Tensor, cued: Tensor) -> float:
    """The expected reciprocal rank of the first cue in one row."""
    best = values[cued].max()
    before = int((values[keep] > best).sum())
    ties, cues = int((values[keep] == best).sum()), int((values[cued] == best).sum())
    # The first of the cues is at place i of the ties, if the others are at later places.
    chances = [comb(ties - i, cues - 1) / comb(ties, cues) for i in range(1, ties - cues + 2)]
    return sum(chance / (before + i) for i, chance in enumerate(chances, start=1))


def cue_precision(scores: Tensor, cues: Tensor, k: int, keep: Tensor | None = None) -> Tensor:
    r"""The share of cues among the k tokens with the highest scores (precision at k).

    .. math:: \tfrac1k \big|\operatorname{top}_k(s) \cap \{j : j \text{ is a cue}\}\big|

    Tokens with equal scores get equal shares of the last of the k places. With fewer cues than k, it cannot reach 1.

    Args:
        scores: See :func:`cue_average_precision`, like `cues` and `keep`.
        cues: See there.
        k: How many of the highest scores; all in an example with fewer tokens.
        keep: See there.

    Returns:
        `(batch,)` in float64, from 0 to 1. NaN for an example without a cue or with a NaN among its scores.
    """
    values, kept, cued, missing = _aligned(scores, cues, keep)
    shares, places = _highest(values, kept, k)
    return ((shares * cued).sum(-1) / places.clamp_min(1)).masked_fill(missing, torch.nan)


def _aligned(scores: Tensor, cues: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, the tokens that count, the cues, and the rows without a cue or with a NaN."""
    values, kept = scores_and_tokens(scores, keep)
    cued = flags(cues, scores.shape, "cues")
    if (cued & ~kept).any():
        raise ArgumentError("keep drops a token that is a cue, so the cue cannot be found: keep all cues.")
    return values, kept, cued, ~cued.any(-1) | (values.isnan() & kept).any(-1)


def spearman(one: Tensor, other: Tensor, keep: Tensor | None = None) -> Tensor:
    r"""Spearman's rank correlation of two rows of scores, example by example.

    .. math:: \rho = \operatorname{corr}\big(\operatorname{rank}(a), \operatorname{rank}(b)\big)

    where equal scores share the average of their ranks (`Spearman 1904 <https://doi.org/10.2307/1412159>`_). Ranks by
    scipy. With :func:`blank_out` it measures faithfulness.

    Args:
        one: `(batch, tokens)`.
        other: `(batch, tokens)`.
        keep: Booleans `(1 or batch, tokens)`: the tokens that are ranked. None: all, padding too.

    Returns:
        `(batch,)` in float64, from -1 to 1. NaN where one of the two is constant or holds a NaN, because such
        scores have no order.
    """
    first, second, kept, unknown = _pair(one, other, keep)
    ranks = torch.stack([_ranks(row, kept, "average") for row in (first, second)]).where(kept, 0)
    a, b = (ranks - ranks.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp_min(1)).where(kept, 0)
    correlation = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    return correlation.clamp(-1, 1).masked_fill(unknown, torch.nan)


def kendall(one: Tensor, other: Tensor, keep: Tensor | None = None) -> Tensor:
    r"""Kendall's rank correlation of two rows of scores, example by example.

    .. math:: \tau_b = (P - Q) \big/ \sqrt{(P + Q + T)\,(P + Q + U)}

    with P pairs of tokens in the same order, Q in opposite order, T tied in the first row only and U in the second only
    (`Kendall 1945 <https://doi.org/10.2307/2332303>`_).

    Args:
        one: See :func:`spearman`, like `other` and `keep`.
        other: See there.
        keep: See there.

    Returns:
        `(batch,)` in float64, from -1 to 1. NaN where one of the two is constant or holds a NaN.
    """
    first, second, kept, unknown = _pair(one, other, keep)
    return kendall_tau(first, second, kept).masked_fill(unknown, torch.nan)


def top_k_overlap(one: Tensor, other: Tensor, k: int, keep: Tensor | None = None) -> Tensor:
    r"""The share of tokens that are among the k highest of both rows of scores.

    .. math:: \tfrac1k \big|\operatorname{top}_k(a) \cap \operatorname{top}_k(b)\big|

    Tokens with equal scores get equal shares of the last of the k places. The result is the expectation if ties are
    broken at random. It does not depend on the order of the tokens.

    Args:
        one: See :func:`spearman`, like `other` and `keep`.
        other: See there.
        k: How many of the highest scores; all in an example with fewer tokens.
        keep: See there.

    Returns:
        `(batch,)` in float64, from 0 to 1. NaN where one of the two holds a NaN, or no token is kept.
    """
    first, second, kept, _ = _pair(one, other, keep)
    (a, places), (b, _) = (_highest(row, kept, k) for row in (first, second))
    unknown = ((first.isnan() | second.isnan()) & kept).any(-1) | ~kept.any(-1)
    return ((a * b).sum(-1) / places).masked_fill(unknown, torch.nan)


def _pair(one: Tensor, other: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two rows of scores, the tokens that count, and which examples have a row without an order."""
    first, kept = scores_and_tokens(one, keep, "one")
    second, _ = scores_and_tokens(other, keep, "other")
    if first.shape != second.shape:
        raise ArgumentError(
            f"one is {tuple(one.shape)} and other {tuple(other.shape)}: pass scores of the same tokens."
        )
    return first, second, kept, undefined(first, kept) | undefined(second, kept)


def _ranks(values: Tensor, keep: Tensor, ties: str) -> Tensor:
    """The rank of each score among the scores of its row that count, from 1. The others come after them."""
    # NaN is replaced only to be ranked. The callers mark such rows as undefined.
    ranked = values.nan_to_num(nan=0.0).masked_fill(~keep, torch.inf)
    return torch.from_numpy(stats.rankdata(ranked.numpy(), method=ties, axis=-1)).double()


def _highest(values: Tensor, keep: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Whether each token is among the k highest, 1 or 0, or a part of the last places for ties; the places of a row."""
    if type(k) is not int or k < 1:
        raise ArgumentError(f"k is {k!r}: pass how many of the highest scores to compare, an integer of at least 1.")
    places = keep.sum(-1).clamp_max(k)
    before, up_to = _ranks(-values, keep, "min"), _ranks(-values, keep, "max")
    return ((places[:, None] - before + 1) / (up_to - before + 1)).clamp(0, 1).where(keep, 0), places


def scores_and_tokens(scores: Tensor, keep: Tensor | None, name: str = "scores") -> tuple[Tensor, Tensor]:
    """Scores `(batch, tokens)` in float64 on the CPU, and which tokens count, `(batch, tokens)`; None: all."""
    if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.numel():
        raise ArgumentError(f"{name} is {describe(scores)}: pass a tensor (batch, tokens), one row for each example.")
    if keep is None:
        return scores.detach().double().cpu(), torch.ones(scores.shape, dtype=torch.bool)
    return scores.detach().double().cpu(), flags(keep, scores.shape, "keep")


def scores_of_ids(scores: Tensor, content: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of the tokens of sentences with this content, `(batch, tokens)`, as :func:`scores_and_tokens`."""
    if not isinstance(scores, Tensor) or scores.shape != content.shape:
        raise ArgumentError(
            f"scores is {describe(scores)}, but the ids are {tuple(content.shape)}: pass one score for each token."
        )
    return scores_and_tokens(scores, content)


def flags(mask: Tensor, shape: torch.Size, name: str) -> Tensor:
    """A mask `(1 or batch, tokens)` of booleans or of 0 and 1, as booleans of the whole shape on the CPU."""
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[0] in (1, shape[0]) and mask.shape[1] == shape[1]
    if not fits or not ((mask == 0) | (mask == 1)).all():
        raise ArgumentError(
            f"{name} is {describe(mask)}: pass booleans (or 0 and 1) of shape {tuple(shape)}, one for each score."
        )
    return mask.detach().bool().cpu().expand(shape)


def undefined(scores: Tensor, keep: Tensor) -> Tensor:
    """Whether a row has no order, `(batch,)`: no score counts, all scores are equal, or a score is NaN."""
    lowest = scores.masked_fill(~keep, torch.inf).amin(-1)
    highest = scores.masked_fill(~keep, -torch.inf).amax(-1)
    return (scores.isnan() & keep).any(-1) | ~(lowest < highest)


def without_order(scores: Tensor, keep: Tensor) -> Tensor:
    """Whether a row has no order, as in :func:`undefined`, `(batch,)`. A single token is in order."""
    return (undefined(scores, keep) & (keep.sum(-1) != 1)) | (scores.isnan() & keep).any(-1)


def describe(value: object) -> str:
    """Shape and type of an argument, for an error."""
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
