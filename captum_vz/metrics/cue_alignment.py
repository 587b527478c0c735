"""Cue alignment: do the scores lie on the words that a person knows to decide?"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional import normalize_rows
from captum_vz.metrics._rows import flags, scores_and_tokens
from captum_vz.metrics.agreement import checked_places, share_of_places


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
        sum of 0. :func:`summarize` counts these examples.

    Raises:
        ArgumentError: Shapes do not fit, `keep` drops a cue, or scores are negative where rows are divided by their
            sum.

    >>> scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    >>> cues = torch.tensor([[False, True, False, False]])
    >>> content = torch.tensor([[False, True, True, True]])  # the first token is [CLS]
    >>> cue_dot_product(scores, cues), cue_dot_product(scores, cues, keep=content)
    (tensor([0.3000], dtype=torch.float64), tensor([0.6000], dtype=torch.float64))
    """
    values, kept, cued = _aligned(scores, cues, keep)
    values = values.where(kept, 0)
    missing = ~cued.any(-1)
    if keep is not None:
        if (values < 0).any():
            raise ArgumentError(
                "scores has negative values, and shares of a sum of both signs have no meaning: take absolute values "
                "first, or pass no keep."
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
        cues: Booleans `(1 or batch, tokens)`: the tokens that decide.
        keep: Booleans `(1 or batch, tokens)`: the tokens that are ranked. None: all, padding too.

    Returns:
        `(batch,)` in float64: 1 if all cues come first; the share of cues if all scores are equal. NaN for an example
        without a cue or with a NaN among its scores. :func:`summarize` counts these examples.

    Raises:
        ArgumentError: Shapes do not fit, or `keep` drops a cue.

    >>> scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    >>> cues = torch.tensor([[False, True, False, False]])
    >>> cue_average_precision(scores, cues)
    tensor([0.5000], dtype=torch.float64)
    """
    values, kept, cued = _aligned(scores, cues, keep)
    missing = ~cued.any(-1) | (values.isnan() & kept).any(-1)
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
        scores: `(batch, tokens)`, of any sign and scale.
        cues: Booleans `(1 or batch, tokens)`: the tokens that decide.
        keep: Booleans `(1 or batch, tokens)`: the tokens that are ranked. None: all, padding too.

    Returns:
        `(batch,)` in float64, up to 1. NaN for an example without a cue or with a NaN among its scores.

    Raises:
        ArgumentError: Shapes do not fit, or `keep` drops a cue.

    >>> scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    >>> cue_reciprocal_rank(scores, torch.tensor([[False, True, False, False]]))
    tensor([0.5000], dtype=torch.float64)
    """
    values, kept, cued = _aligned(scores, cues, keep)
    missing = ~cued.any(-1) | (values.isnan() & kept).any(-1)
    found = [
        float("nan") if skip else _reciprocal(*row) for *row, skip in zip(values, kept, cued, missing, strict=True)
    ]
    return torch.tensor(found, dtype=torch.float64)


def _reciprocal(values: Tensor, keep: Tensor, cued: Tensor) -> float:
    """The expected reciprocal rank of the first cue in one row."""
    best = values[cued].max()
    before = int((values[keep] > best).sum())
    ties, cues = int((values[keep] == best).sum()), int((values[cued] == best).sum())
    # The first of the cues stands at place i of the ties, if the others stand at later places.
    chances = [comb(ties - i, cues - 1) / comb(ties, cues) for i in range(1, ties - cues + 2)]
    return sum(chance / (before + i) for i, chance in enumerate(chances, start=1))


def cue_precision(scores: Tensor, cues: Tensor, k: int, keep: Tensor | None = None) -> Tensor:
    r"""The share of cues among the k tokens with the highest scores (precision at k).

    .. math:: \tfrac1k \big|\operatorname{top}_k(s) \cap \{j : j \text{ is a cue}\}\big|

    Tokens with equal scores get equal shares of the last of the k places. With fewer cues than k, it cannot reach 1.

    Args:
        scores: `(batch, tokens)`, of any sign and scale.
        cues: Booleans `(1 or batch, tokens)`: the tokens that decide.
        k: How many of the highest scores; all in an example with fewer tokens.
        keep: Booleans `(1 or batch, tokens)`: the tokens that are ranked. None: all, padding too.

    Returns:
        `(batch,)` in float64, from 0 to 1. NaN for an example without a cue or with a NaN among its scores.

    Raises:
        ArgumentError: Shapes do not fit, `keep` drops a cue, or k is not an integer of at least 1.

    >>> scores = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    >>> cue_precision(scores, torch.tensor([[False, True, False, True]]), k=2)
    tensor([0.5000], dtype=torch.float64)
    """
    values, kept, cued = _aligned(scores, cues, keep)
    places = checked_places(k, kept)
    found = (share_of_places(values, kept, places) * cued).sum(-1) / places[:, 0].clamp_min(1)
    return found.masked_fill(~cued.any(-1) | (values.isnan() & kept).any(-1), torch.nan)


def _aligned(scores: Tensor, cues: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    values, kept = scores_and_tokens(scores, keep)
    cued = flags(cues, scores.shape, "cues")
    if (cued & ~kept).any():
        raise ArgumentError("keep drops a token that is a cue, so the cue cannot be found: keep all cues.")
    return values, kept, cued
