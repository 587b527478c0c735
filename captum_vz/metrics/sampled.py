"""Faithfulness with removals at random: of sets of tokens, or of entries of the tokens' vectors.

>>> from captum_vz.metrics import MaskedSentences, Prediction
>>> from captum_vz.testbed import load_model
>>> model, tokenizer = load_model()
>>> text = "the pictures of some hat [MASK] scaring marcus."
>>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
>>> prediction = Prediction(model, sentences, tokenizer.mask_token_id)
>>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
>>> bool(infidelity(prediction, cue) < infidelity(prediction, cue.roll(1)))
True
>>> bool(soft_comprehensiveness(prediction, cue) > 0.5)
True
"""

from __future__ import annotations

from typing import Any

import torch
from captum.metrics import infidelity as captum_infidelity
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics.agreement import scores_of_ids, without_order
from captum_vz.metrics.prediction import Prediction, word_embedding


def infidelity(prediction: Prediction, scores: Tensor, samples: int = 32, seed: int = 0) -> Tensor:
    r"""The squared error with which sums of scores predict the effect of removing sets of tokens.

    .. math:: \min_\beta \mathbb E_S \Big(\beta \textstyle\sum_{j \in S} s_j
        - \big[p(\hat y \mid x) - p(\hat y \mid x \setminus S)\big]\Big)^2

    where S holds each content token with probability one half (`Yeh et al. 2019 <https://arxiv.org/abs/1901.09392>`_,
    by `captum.metrics.infidelity` with `normalize=True`). Lower is better. The factor :math:`\beta` makes shares
    comparable with probabilities. It may be negative, so scores with all signs turned have the same infidelity.

    It favours rows in proportion to the effects. A sentence whose prediction nothing changes has an infidelity of 0
    with any scores. The error is in squared probability, so compare methods on the same sentences only.

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`.
        samples: The number of sets.
        seed: The same seed gives the same sets, whatever else is in the batch.

    Returns:
        `(batch,)` in float64. NaN for an example without content tokens, or with scores that give no order.
    """
    content = prediction.content
    values, keep = scores_of_ids(scores, content)
    if values[keep].isinf().any():
        raise ArgumentError("scores holds infinities: pass finite scores.")
    answer = prediction.best()
    sets = torch.cat([_sets(row, samples, seed) for row in content])

    def removed(gates: Tensor) -> tuple[Tensor, Tensor]:
        """The perturbations, and the perturbed gates; the gate of a removed token is 0."""
        return sets.double(), gates - sets.double()

    def probability(gates: Tensor, examples: Tensor) -> Tensor:
        return prediction.probability(answer, examples, gates == 0)

    arguments: dict[str, Any] = {"additional_forward_args": torch.arange(len(content)), "n_perturb_samples": samples}
    known = values.where(keep, 0).nan_to_num(nan=0.0)
    found = captum_infidelity(probability, removed, torch.ones_like(known), known, normalize=True, **arguments)
    return found.double().clamp_min(0).masked_fill(without_order(values, keep), torch.nan)


def _sets(content: Tensor, samples: int, seed: int) -> Tensor:
    """Random sets of content tokens, booleans `(samples, tokens)`; they depend on the number of content tokens only."""
    count = int(content.sum())
    drawn = torch.rand(samples, count, generator=torch.Generator().manual_seed(seed)) < 0.5
    sets = torch.zeros(samples, len(content), dtype=torch.bool)
    sets[:, content] = drawn
    return sets


def soft_comprehensiveness(prediction: Prediction, scores: Tensor, samples: int = 10, seed: int = 0) -> Tensor:
    r"""How much the prediction falls if entries of the word vectors vanish, more of tokens with high scores.

    .. math:: \text{Soft-NC} = \frac{\mathbb E \max\big(0,\, p(\hat y \mid x) - p(\hat y \mid x')\big)}
        {\max\big(0,\, p(\hat y \mid x) - p(\hat y \mid 0)\big)}, \qquad
        x'_j = x_j \odot e_j, \quad e_{ji} \sim \operatorname{Ber}(1 - a_j)

    where :math:`x_j` is the word vector of content token j, :math:`a_j` its score divided by the largest score of the
    sentence, and 0 the sentence whose content tokens have zero vectors (`Zhao & Aletras 2023
    <https://aclanthology.org/2023.acl-long.261>`_). Higher is better. The paper takes scores from 0 to 1; that they are
    divided by the largest one is a choice of this package.

    It uses the sizes of the scores, not their order only. Rows that are spread evenly remove almost everything, so they
    win here and lose :func:`soft_sufficiency`. Sparse rows do the reverse. Report both.

    Args:
        prediction: A model of transformers, which takes `inputs_embeds`, and sentences. The way of removal is not used.
        scores: `(batch, tokens)`, not negative.
        samples: How many masks are drawn and averaged.
        seed: The same seed gives the same masks, whatever else is in the batch.

    Returns:
        `(batch,)` in float64. NaN for an example without content tokens, with scores that give no order, or whose
        prediction needs no content token.
    """
    return _soft(prediction, scores, samples, seed, kept=False)


def soft_sufficiency(prediction: Prediction, scores: Tensor, samples: int = 10, seed: int = 0) -> Tensor:
    r"""How much of the prediction is left if entries of the word vectors vanish, more of tokens with low scores.

    .. math:: \text{Soft-NS} = 1 - \frac{\mathbb E \max\big(0,\, p(\hat y \mid x) - p(\hat y \mid x')\big)}
        {\max\big(0,\, p(\hat y \mid x) - p(\hat y \mid 0)\big)}, \qquad
        x'_j = x_j \odot e_j, \quad e_{ji} \sim \operatorname{Ber}(a_j)

    Higher is better, unlike in :func:`sufficiency`. See :func:`soft_comprehensiveness`, also for what it favours.

    Args:
        prediction: See :func:`soft_comprehensiveness`, like the arguments after it.
        scores: See there.
        samples: See there.
        seed: See there.

    Returns:
        `(batch,)` in float64; NaN as in :func:`soft_comprehensiveness`.
    """
    return 1 - _soft(prediction, scores, samples, seed, kept=True)


def _soft(prediction: Prediction, scores: Tensor, samples: int, seed: int, kept: bool) -> Tensor:
    """The fall of the probability in perturbed sentences, divided by the fall in empty sentences, `(batch,)`."""
    content = prediction.content
    values, keep = scores_of_ids(scores, content)
    if (values[keep] < 0).any() or values[keep].isinf().any():
        raise ArgumentError("scores holds negative or infinite values: pass sizes, such as scores.abs().")
    if samples < 1:
        raise ArgumentError(f"samples is {samples!r}: pass at least 1.")
    largest = values.masked_fill(~keep, 0).amax(-1, keepdim=True)
    shares = (values / largest).nan_to_num(nan=0.0).masked_fill(~keep, 1)
    chance = (shares if kept else 1 - shares).masked_fill(~keep, 1)
    vectors = word_embedding(prediction.model)(prediction.ids).detach()
    drawn = torch.stack([_mask(one, samples, vectors.shape[-1], seed) for one in chance], dim=1).to(vectors)
    answer, whole = prediction.best(), prediction.probability(prediction.best())
    without = torch.stack([_probability(prediction, answer, vectors * mask) for mask in drawn])
    empty = _probability(prediction, answer, vectors * ~keep[..., None].to(vectors.device))
    fall, most = (whole - without).clamp_min(0).mean(0), (whole - empty).clamp_min(0)
    # Where the sentence without its content is as good as the whole, nothing can be divided by.
    unknown = without_order(values, keep) | (largest[:, 0] == 0) | (most < 1e-6)
    return (fall / most).masked_fill(unknown, torch.nan)


def _mask(chance: Tensor, samples: int, width: int, seed: int) -> Tensor:
    """Which entries are kept, booleans `(samples, tokens, width)`, the same for a token in batches of any length."""
    drawn = torch.rand(len(chance), samples, width, generator=torch.Generator().manual_seed(seed))
    return drawn.transpose(0, 1) < chance[:, None]


@torch.no_grad()
def _probability(prediction: Prediction, answer: Tensor, vectors: Tensor) -> Tensor:
    """The probability of the answers for sentences of these word vectors, `(batch,)`."""
    found = []
    for examples in torch.arange(len(vectors)).split(prediction.batch_size):
        inputs = {"inputs_embeds": vectors[examples]}
        logits = prediction.at_target(inputs, prediction.mask[examples], prediction.target[examples])
        found.append(prediction.logs(answer, examples, logits))
    logs = torch.cat(found)
    return logs[:, 1].exp() if prediction.over == "vocabulary" else logs[:, 0].sigmoid()
