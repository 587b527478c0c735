"""Receptive fields: how many tokens a token reaches through a stack of layers."""

from collections.abc import Iterable

from torch import Tensor

from captum_vz.functional.rollout import Residual, add_residual


def receptive_fields(maps: Iterable[Tensor], residual: Residual = None) -> list[Tensor]:
    r"""How many output tokens each input token reaches, through all layers up to one.

    .. math:: n_{lj} = \textstyle\sum_i \big[ (S_l S_{l-1} \cdots S_0)_{ij} \neq 0 \big]

    with :math:`S_l` the map of layer l, its residual added. In a causal stack of n tokens that is :math:`n - j`, so
    that rollout and flow, summed over output tokens, favour early input tokens: `Abnar & Zuidema 2020
    <https://aclanthology.org/2020.acl-main.385>`_ advise to normalise by the receptive field there.

    Args:
        maps: One map `(batch, tokens, tokens)` for each layer, in the order in which the layers run; or all of them in
            one tensor `(layers, batch, tokens, tokens)`.
        residual: None, 0.5 or "renormalize", see :func:`add_residual`.

    Returns:
        The counts after each layer, `(batch, tokens)` in float64; 0 for padding.

    Raises:
        AssertionError: No map, maps of different shapes, or another residual.

    >>> import torch
    >>> causal = torch.tensor([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]])
    >>> receptive_fields([causal, causal])[-1]
    tensor([[3., 2., 1.]], dtype=torch.float64)
    """
    reached: list[Tensor] = []
    for scores in maps:
        step = (add_residual(scores, residual) != 0).double()
        assert not reached or step.shape == reached[-1].shape, (
            f"All maps need one shape: map {len(reached)} is {tuple(step.shape)}, "
            f"those before it are {tuple(reached[-1].shape)}."
        )
        # Counts of paths, cut to 1: products of the maps themselves would vanish in a deep stack.
        reached.append((step @ reached[-1]).clamp_max(1) if reached else step)
    assert reached, "receptive_fields needs the map of at least one layer, got none."
    return [one.sum(-2) for one in reached]
