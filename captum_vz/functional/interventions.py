"""What a source loses: interventions on the values and the weights of one attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError


class Intervention:
    r"""What replaces the values of some sources, or the contexts that they lead to.

    .. math:: c_i = \sum_k \alpha_{ik} v_k \quad\longrightarrow\quad c_i^{\neg j} = \sum_k \alpha_{ik} v'_k

    Value Zeroing compares a layer's output for the context :math:`c_i` with its output for :math:`c_i^{\neg j}`. A
    subclass says in :meth:`new_values` what :math:`v'_j` is. If the weights change too, it overrides
    :meth:`new_context` in its place, and :meth:`gated_context` for gates between 0 and 1. If no source is zeroed, they
    have to return what the model computes.

    All are given the tokens of whole sequences, without padding, and a head for each query head: the attention weights
    as `weights (batch, head, out, in)`, the values as `values (batch, head, in, d_head)`, and as `zeroed`, bool
    `(batch, head, in)`, which values are zeroed. `gates (batch, head, in)` are numbers: 1 leaves a source as it is, 0
    zeroes it. Values are returned in their own shape, contexts as `(batch, head, out, d_head)`.

    >>> class Half(Intervention):
    ...     def new_values(self, values, zeroed):
    ...         return torch.where(zeroed[..., None], values / 2, values)
    >>> weights, values = torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[[4.0], [8.0]]]])
    >>> Half().new_context(weights, values, torch.tensor([[[False, True]]]))  # 0.25 * 4 + 0.75 * 4
    tensor([[[[4.]]]])
    """

    #: Whether a target changes only if it gives weight to a zeroed source. If False, all targets are computed.
    needs_weight: bool = False
    #: Whether the values of other sources count. If True, padding is left out, one example at a time. If False,
    #: examples may also share a run of the model.
    reads_others: bool = True

    def in_run(self, layer: int, run: int) -> Intervention:
        """The intervention in one run of a layer, by default itself. A subclass overrides it if layers differ.

        `layer` is the place of the layer among the layers that were passed. `run` is the number of its run, which is 0
        for a layer that runs once.
        """
        return self

    def new_values(self, values: Tensor, zeroed: Tensor) -> Tensor:
        """The values with those of zeroed sources replaced. Other values stay as they are.

        ArgumentError: The intervention changes weights, and is not given by values alone.
        """
        raise ArgumentError(
            f"{type(self).__name__} has no new_values, which layers need whose attention weights cannot be read. "
            "Use an intervention on values, such as 'zero' or 'mean'."
        )

    def new_context(self, weights: Tensor, values: Tensor, zeroed: Tensor) -> Tensor:
        """The contexts without the zeroed sources."""
        return weights @ self.new_values(values, zeroed)

    def gated_values(self, values: Tensor, gates: Tensor) -> Tensor:
        r"""The values between :math:`v_j`, for a gate of 1, and :math:`v'_j`, for a gate of 0.

        .. math:: v_j(g) = g_j v_j + (1 - g_j) v'_j

        They are differentiable in `gates`. All sources whose gate is not 1 are given to :meth:`new_values` as zeroed.
        The derivative at a gate of 1 takes all sources as zeroed.
        """
        gates = gates.to(values)
        gated = gates != 1
        new = self.new_values(values, gated)
        if gates.requires_grad:
            new = torch.where(gated[..., None], new, self.new_values(values, torch.ones_like(gated)))
        return torch.lerp(new, values, gates[..., None])

    def gated_context(self, weights: Tensor, values: Tensor, gates: Tensor) -> Tensor:
        """The contexts of gated values. A subclass whose `new_context` changes weights overrides this too.

        They are differentiable in `gates`. For gates of 0 and 1 they are those of :meth:`new_context`.

        ArgumentError: A gate is between 0 and 1, or has a gradient, and only `new_context` is overridden.
        """
        zeroed = gates == 0
        if not gates.requires_grad and bool((zeroed | (gates == 1)).all()):
            return self.new_context(weights, values, zeroed)
        by_values, by_gates, by_weights = map(self._overridden, ("new_values", "gated_context", "new_context"))
        if by_weights < min(by_values, by_gates):
            raise ArgumentError(
                f"{type(self).__name__} says by new_context what gates of 0 and 1 do, and gates between them need "
                "gated_context. Define it, or use gates of 0 and 1 without gradients (FeatureAblation)."
            )
        return weights @ self.gated_values(values, gates)

    def _overridden(self, name: str) -> int:
        """How far up the class is that defines this method."""
        return next(place for place, one in enumerate(type(self).__mro__) if name in vars(one))


class ZeroValue(Intervention):
    r"""The value becomes zero: Value Zeroing (`Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_).

    .. math:: v'_j = 0

    >>> weights, values = torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[[4.0], [8.0]]]])
    >>> ZeroValue().new_context(weights, values, torch.tensor([[[False, True]]]))
    tensor([[[[1.]]]])
    """

    needs_weight = True
    reads_others = False

    def new_values(self, values: Tensor, zeroed: Tensor) -> Tensor:
        """The values, 0 where `zeroed` is True. See :meth:`Intervention.new_values`."""
        return values.masked_fill(zeroed[..., None], 0)

    def new_context(self, weights: Tensor, values: Tensor, zeroed: Tensor) -> Tensor:
        """The sum over all other sources. See :meth:`Intervention.new_context`."""
        return (weights * ~zeroed[:, :, None]) @ values


class MeanValue(Intervention):
    r"""The value becomes the mean of the sequence's values, in each head: mean ablation.

    .. math:: v'_j = \tfrac1n \sum_k v_k

    The sum runs over the n tokens of the sequence, the source itself included, and padding left out. A value that all
    tokens share then counts for nothing, unlike with :class:`ZeroValue`.

    >>> weights, values = torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[[4.0], [8.0]]]])
    >>> MeanValue().new_context(weights, values, torch.tensor([[[False, True]]]))  # 0.25 * 4 + 0.75 * 6
    tensor([[[[5.5000]]]])
    """

    needs_weight = True

    def new_values(self, values: Tensor, zeroed: Tensor) -> Tensor:
        """The values, their mean where `zeroed` is True. See :meth:`Intervention.new_values`."""
        return torch.where(zeroed[..., None], values.mean(2, keepdim=True), values)


class Knockout(Intervention):
    r"""The source is hidden, and the remaining weights are divided by their sum: attention knockout.

    .. math:: \alpha'_{ik} = \frac{\alpha_{ik} \sum_l \alpha_{il}}{\sum_{l \ne j} \alpha_{il}} \;(k \ne j),
        \qquad \alpha'_{ij} = 0

    A softmax without the source has these weights (`Geva et al. 2023
    <https://aclanthology.org/2023.emnlp-main.751>`_). Rows whose weights do not sum to 1 (attention sinks) keep their
    sum. A target that sees zeroed sources only gets a context of zeros.

    >>> weights, values = torch.tensor([[[[0.25, 0.75]]]]), torch.tensor([[[[4.0], [8.0]]]])
    >>> Knockout().new_context(weights, values, torch.tensor([[[False, True]]]))
    tensor([[[[4.]]]])
    """

    needs_weight = True
    reads_others = False

    def new_context(self, weights: Tensor, values: Tensor, zeroed: Tensor) -> Tensor:
        """The sum over all other sources, with larger weights. See :meth:`Intervention.new_context`."""
        return self.gated_context(weights, values, (~zeroed).to(weights))

    def gated_context(self, weights: Tensor, values: Tensor, gates: Tensor) -> Tensor:
        """The sum with weights times gates, divided by their sum. See :meth:`Intervention.gated_context`."""
        left = weights * gates[:, :, None].to(weights)
        before, after = weights.sum(-1, keepdim=True), left.sum(-1, keepdim=True)
        factor = torch.where(after == 0, 0, before / after.where(after != 0, 1))
        return (left * factor) @ values


INTERVENTIONS: dict[str, Intervention] = {"zero": ZeroValue(), "mean": MeanValue(), "knockout": Knockout()}


def get_intervention(intervention: Any) -> Intervention:
    """The intervention with this name: "zero", "mean" or "knockout". An :class:`Intervention` is returned unchanged.

    >>> type(get_intervention("mean")).__name__
    'MeanValue'
    """
    if isinstance(intervention, Intervention):
        return intervention
    if not isinstance(intervention, str) or intervention not in INTERVENTIONS:
        shown = intervention.__name__ if isinstance(intervention, type) else repr(intervention)
        raise ArgumentError(
            f"intervention is {shown}: pass one of {', '.join(map(repr, INTERVENTIONS))}, or an object of a subclass "
            "of captum_vz.functional.Intervention."
        )
    return INTERVENTIONS[intervention]


def contexts_after(
    intervention: Intervention, weights: Tensor, values: Tensor, zeroed: Tensor, real: Tensor | None
) -> Tensor:
    """The contexts `(n, head, out, d_head)` after an intervention. Padding is left out where it would count.

    `real (n, in)` says which sources are no padding; None: all. With gates `(n, head, in)` in the place of `zeroed`,
    values are gated.
    """
    change = intervention.new_context if zeroed.dtype == torch.bool else intervention.gated_context
    if real is None or not intervention.reads_others or bool(real.all()):
        return change(weights, values, zeroed)
    each = zip(weights[:, None], values[:, None], zeroed[:, None], real, strict=True)
    return torch.cat([change(w[..., kept], v[:, :, kept], z[..., kept]) for w, v, z, kept in each])


def values_after(intervention: Intervention, values: Tensor, zeroed: Tensor, real: Tensor | None) -> Tensor:
    """The values `(n, head, in, d_head)` after an intervention, see `contexts_after`."""
    change = intervention.new_values if zeroed.dtype == torch.bool else intervention.gated_values
    if real is None or not intervention.reads_others or bool(real.all()):
        return change(values, zeroed)
    changed = values.clone()
    for number, kept in enumerate(real):
        own = slice(number, number + 1)
        changed[own, :, kept] = change(values[own][:, :, kept], zeroed[own][..., kept])
    return changed
