"""One score for each token, from attributions to embeddings."""

from typing import Literal

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.functional.rows import widen


def token_scores(attributions: Tensor, reduce: Literal["sum", "l1", "l2"] = "sum") -> Tensor:
    r"""Reduces attributions to embeddings, as Captum's gradient methods return them, to one score for each token.

    .. math:: s_{bj} = \textstyle\sum_k a_{bjk} \quad\text{or}\quad \sum_k |a_{bjk}| \quad\text{or}\quad
        \big(\textstyle\sum_k a_{bjk}^2\big)^{1/2}

    The sum keeps the sign and therefore completeness: the scores of `IntegratedGradients
    <https://proceedings.mlr.press/v70/sundararajan17a.html>`_ still add up to the difference of the outputs. The norms
    measure how much a token matters, in either direction. `Atanasova et al. 2020
    <https://aclanthology.org/2020.emnlp-main.263>`_ compare the mean with the L2 norm.

    Args:
        attributions: `(batch, tokens, d)`, one number for each entry of each token's embedding.
        reduce: "sum" (signed), "l1" or "l2" (not negative).

    Returns:
        `(batch, tokens)`, the shape of token ids, in at least float32. Rows are not normalised. Use
        :func:`normalize_rows` for scores without a sign.

    Raises:
        ArgumentError: `attributions` has another shape, or `reduce` is unknown.

    >>> attributions = torch.tensor([[[3.0, -4.0], [1.0, 1.0]]])  # one example, two tokens, d = 2
    >>> token_scores(attributions), token_scores(attributions, "l1"), token_scores(attributions, "l2")
    (tensor([[-1., 2.]]), tensor([[7., 2.]]), tensor([[5.0000, 1.4142]]))
    """
    if reduce not in ("sum", "l1", "l2"):
        raise ArgumentError(f"reduce is {reduce!r}: pass 'sum', 'l1' or 'l2'.")
    if not isinstance(attributions, Tensor):
        raise ArgumentError(
            f"attributions is of type {type(attributions).__name__}: pass a tensor (batch, tokens, d). "
            "For a tuple of inputs, Captum returns a tuple with one such tensor for each input."
        )
    if attributions.ndim != 3:
        raise ArgumentError(
            f"attributions is {tuple(attributions.shape)}: pass (batch, tokens, d), one number for each entry of each "
            "token's embedding. Scores (batch, tokens) need no reduction."
        )
    values = widen(attributions)
    if reduce == "sum":
        return values.sum(-1)
    return torch.linalg.vector_norm(values, ord=int(reduce[1]), dim=-1)
