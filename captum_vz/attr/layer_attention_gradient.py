"""Attention weights times their positive gradients (Chefer et al., ICCV 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import AttentionSite
from captum_vz.attr._base.layer_maps import LayerMaps
from captum_vz.attr._call.parts import Attention
from captum_vz.attr._call.target import Wanted
from captum_vz.attr.layer_attention import checked_weights
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import widen


class LayerAttentionGradient(LayerMaps):
    r"""How much the attention of each output *token* to each source token increases an explained number.

    .. math:: \bar A_{ij} = \tfrac1H \textstyle\sum_h \alpha^h_{ij}
        \max\Big(0,\, \frac{\partial y}{\partial \alpha^h_{ij}}\Big)

    where :math:`y` is the number that `objective` reads from the model's output. `Chefer et al. 2021
    <https://arxiv.org/abs/2103.15679>`_, equation 5. The paper's relevance of a stack is
    ``Rollout(LayerAttentionGradient(..., normalize=False), residual="add")``, which adds the identity to each map and
    multiplies the maps (equation 6, for self-attention).

    The model runs once. Gradients start at the input of the stack. Parameters need no gradients and get none. Gradients
    are computed also inside `torch.no_grad`.

    Args:
        forward_func: A model, or a function that runs the layers, in one thread.
        layer: A layer (a whole Transformer block), or a list of layers. `captum_vz.find_layers(model)` returns all
            layers. For a list, `attribute` returns a list of maps.
        device_ids: Not used.
        objective: A function that takes the output of `forward_func` and returns one number for each example.
        attention: "self", or "cross" for the cross-attention of a decoder block. If a layer has others (SAM 3's decoder
            has three attentions), the attention module of the layer; for several layers, a list of such modules.
        normalize: Whether to divide each row by its sum. False is the paper's choice.

    >>> from captum_vz import LayerAttentionGradient, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> are = tokenizer.convert_tokens_to_ids("are")
    >>> logit = lambda output: output.logits[:, 6, are]
    >>> method = LayerAttentionGradient(model, find_layers(model)[-1], objective=logit)
    >>> row = method.attribute(inputs, token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    needs_graph = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        objective: Callable[[Any], Tensor],
        attention: Attention = "self",
        normalize: bool = True,
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        if not callable(objective):
            raise ArgumentError(
                f"objective is of type {type(objective).__name__}: pass a function that takes the output of "
                "forward_func and returns one number for each example."
            )
        self.objective = objective

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Callable[[Any], Tensor]:
        """A function of the model's output that returns weights times positive gradients, `(batch, row, group)`."""
        weights = checked_weights(site)

        def scores(output: Any) -> Tensor:
            gradient = _gradient(self._explained(output, len(weights)), weights, site.layer.name)
            return wanted.pool((widen(weights) * widen(gradient).relu()).mean(1))

        return scores

    def _explained(self, output: Any, batch: int) -> Tensor:
        """The numbers that are explained, `(batch,)`."""
        numbers = self.objective(output)
        shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        if not isinstance(numbers, Tensor) or shape != (batch,):
            raise ArgumentError(
                f"objective gave {shape} for {batch} examples: expected ({batch},). Pass a function that takes the "
                "output of forward_func and returns one number for each example."
            )
        if not numbers.isfinite().all():
            raise RefusedError("objective gave numbers that are not finite (NaN or infinity): check the output.")
        return numbers


def _gradient(numbers: Tensor, weights: Tensor, name: str) -> Tensor:
    """The gradient of each number with respect to the weights of its example."""
    gradient = None
    if numbers.requires_grad and weights.requires_grad:
        (gradient,) = torch.autograd.grad(numbers.sum(), weights, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise UnsupportedLayerError(
            f"The objective does not depend on the attention weights of {name} by any gradient: forward_func must not "
            "switch gradients off (torch.no_grad, detach). The objective must read an output that depends on the "
            "layer, and the layer must apply the weights that it returns."
        )
    return gradient
