"""Infidelity, by Captum: do sums of scores predict what removing several tokens does?"""

from __future__ import annotations

from typing import Any

import torch
from captum.metrics import infidelity as captum_infidelity
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.metrics._rows import describe, scores_and_tokens, without_order
from captum_vz.metrics.prediction import Prediction


def infidelity(prediction: Prediction, scores: Tensor, samples: int = 32, seed: int = 0) -> Tensor:
    r"""The squared error with which sums of scores predict the effect of removing sets of tokens.

    .. math:: \min_\beta \mathbb E_S \Big(\beta \textstyle\sum_{j \in S} s_j
        - \big[p(\hat y \mid x) - p(\hat y \mid x \setminus S)\big]\Big)^2

    where S holds each content token with probability one half (`Yeh et al. 2019 <https://arxiv.org/abs/1901.09392>`_,
    by `captum.metrics.infidelity` with `normalize=True`). Lower is better. The factor :math:`\beta` makes shares
    comparable with probabilities. It may be negative, so scores with all signs turned have the same infidelity.

    It asks for additive scores, so it favours rows in proportion to the effects. A sentence whose prediction nothing
    changes has an infidelity of 0 with any scores. The error is in squared probability, so compare methods on the same
    sentences only.

    Args:
        prediction: Model, sentences and the way of removal.
        scores: `(batch, tokens)`.
        samples: The number of sets.
        seed: The same seed gives the same sets, whatever else is in the batch.

    Returns:
        `(batch,)` in float64. NaN for an example without content tokens, or with scores that give no order.

    Raises:
        ArgumentError: Shapes do not fit, or scores are infinite.

    >>> from captum_vz.metrics import MaskedSentences, Prediction
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> text = "the pictures of some hat [MASK] scaring marcus."
    >>> sentences = MaskedSentences.of_text(tokenizer, text, "are", "is")
    >>> prediction = Prediction(model, sentences, tokenizer.mask_token_id)
    >>> cue = torch.tensor([[0.0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    >>> bool(infidelity(prediction, cue) < infidelity(prediction, cue.roll(1)))
    True
    """
    content = prediction.content
    if not isinstance(scores, Tensor) or scores.shape != content.shape:
        raise ArgumentError(f"scores is {describe(scores)}, but the ids are {tuple(content.shape)}: pass such scores.")
    values, keep = scores_and_tokens(scores, content)
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
