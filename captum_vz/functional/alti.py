"""How near a vector comes to the whole that it is a part of."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

ORDERS = {"l1": 1, "l2": 2}


def alti_contributions(vectors: Tensor, whole: Tensor, norm: Literal["l1", "l2"] = "l1") -> Tensor:
    r"""How much nearer to its end each of the vectors brings the sum that they are part of.

    .. math:: c_{ij} = \max\big(0,\; \lVert r_i \rVert - \lVert r_i - V_{ij} \rVert\big)

    with :math:`r_i` the sum of all :math:`V_{ij}` and of whatever belongs to no source. A vector that leads away from
    the sum counts for nothing (`Ferrando et al. 2022 <https://aclanthology.org/2022.emnlp-main.595>`_, section 3).

    Args:
        vectors: `(..., out, in, d)`.
        whole: `(..., out, d)`.
        norm: "l1" (the paper's) or "l2".

    Returns:
        `(..., out, in)`, not negative; rows sum to anything until they are normalised.

    Raises:
        AssertionError: Another norm, or shapes that do not fit.

    >>> vectors = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    >>> alti_contributions(vectors, vectors.sum(1))
    tensor([[1., 1., 0.]])
    """
    assert norm in ORDERS, f"norm is {norm!r}: pass 'l1' or 'l2'."
    assert vectors.shape[:-2] + vectors.shape[-1:] == whole.shape, (
        f"vectors are {tuple(vectors.shape)} and whole is {tuple(whole.shape)}: "
        "pass (..., out, in, d) and (..., out, d)."
    )
    length = torch.linalg.vector_norm(whole, ORDERS[norm], dim=-1)[..., None]
    left = torch.linalg.vector_norm(whole[..., None, :] - vectors, ORDERS[norm], dim=-1)
    return (length - left).clamp_min(0)


def logit_contributions(updates: Iterable[Tensor], maps: Iterable[Tensor]) -> Tensor:
    r"""How much of a logit comes from each input token through the attention of all layers.

    .. math:: r_{tj} = \textstyle\sum_l \sum_k \Delta^l_{tk}\, R_{l-1,kj}, \qquad R_l = S_l R_{l-1}, \qquad R_{-1} = I

    with :math:`\Delta^l_{tk}` what token k's vector gives to the logit at t through the attention of layer l, and
    :math:`R_{l-1}` what token k has drawn from the input tokens by then (`Ferrando et al. 2023, ALTI-Logit
    <https://aclanthology.org/2023.acl-long.301>`_).

    Args:
        updates: One `(batch, row, tokens)` for each layer, in the order in which the layers run; signed.
        maps: One map `(batch, tokens, tokens)` for each layer, rows summing to 1; that of the last layer is not used.

    Returns:
        `(batch, row, tokens)` in float64, signed. Rows sum to what the updates sum to.

    Raises:
        AssertionError: No layer.
        ValueError: Another number of maps than of updates.

    >>> updates = [torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[1.0, -4.0]]])]
    >>> maps = [torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])] * 2
    >>> logit_contributions(updates, maps)
    tensor([[[-1., 0.]]], dtype=torch.float64)
    """
    result: Tensor | None = None
    drawn: Tensor | None = None
    for update, layer_map in zip(updates, maps, strict=True):
        step, factor = update.double(), layer_map.double()
        share = step if drawn is None else step @ drawn
        result = share if result is None else result + share
        drawn = factor if drawn is None else factor @ drawn
    assert result is not None, "logit_contributions needs the update of at least one layer, got none."
    return result
