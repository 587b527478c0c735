"""Attention weights times their positive gradients (Chefer et al., ICCV 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import AttentionSite
from captum_vz.attr._base import LayerMaps
from captum_vz.attr._call import logged
from captum_vz.attr._call.arguments import Arguments, Inputs
from captum_vz.attr._call.target import Wanted
from captum_vz.attr.layer_attention import checked_weights
from captum_vz.errors import UnsupportedLayerError
from captum_vz.functional import widen


class LayerAttentionGradient(LayerMaps):
    r"""How much the attention of each output *token* to each source token increases an explained number.

    .. math:: \bar A_{ij} = \tfrac1H \textstyle\sum_h \alpha^h_{ij}
        \max\Big(0,\, \frac{\partial y}{\partial \alpha^h_{ij}}\Big)

    where :math:`y` is the number at `target` in the model's output. `Chefer et al. 2021
    <https://arxiv.org/abs/2103.15679>`_, equation 5. The paper's relevance of a stack is
    ``Rollout(LayerAttentionGradient(..., normalize=False), residual="add")``, which adds the identity to each map and
    multiplies the maps (equation 6, for self-attention).

    The model runs once. Gradients start at the input of the stack. Parameters need no gradients and get none. Gradients
    are computed also inside `torch.no_grad`.

    Args:
        forward_func, layer, device_ids: See :class:`~captum_vz.attr.LayerMaps`. The layers run in one thread.
        attention: See :class:`~captum_vz.attr.LayerMaps`.
        normalize: Whether to divide each row by its sum. False is the paper's choice.

    >>> from captum_vz import LayerAttentionGradient, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> method = LayerAttentionGradient(model, find_layers(model)[-1])
    >>> row = method.attribute(inputs, target=(6, right), foil=(6, wrong), token=6)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    needs_graph = True
    explains_output = True

    @logged
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        feature_mask: Tensor | None = None,
        attribute_to_layer_input: bool = False,
        perturbations_per_eval: int | None = None,
        show_progress: bool = False,
        *,
        foil: Any = None,
        token: Any = None,
        run: int | None = None,
    ) -> Tensor | list[Tensor]:
        """How much the attention of each output token to each source token increases the number at `target`.

        Args:
            inputs: See :meth:`LayerMaps.attribute`, which describes the arguments that are not here.
            target: An index into the output of `forward_func`, in any of Captum's forms: a class, or `(token, entry)`.
                Or a function that takes the output and returns one number for each example. None: the output is one
                number for each example. Unlike in methods that explain tokens, `target` chooses no row.
            additional_forward_args: Further arguments for `forward_func`.
            feature_mask: The feature of each source token.
            attribute_to_layer_input: Must be False.
            perturbations_per_eval: Has no effect, because no values are zeroed.
            show_progress: Whether to show a progress bar.
            foil: The index of the number that is subtracted, in the same forms ("why target rather than foil?").
            token: The positions of the output tokens whose rows are returned. None: all tokens.
            run: The number of the explained input.

        Returns:
            A map `(batch, out, in)`, or `(batch, in)` with one output token. A list of maps if `layer` is a list.

        Raises:
            RefusedError: See :meth:`LayerMaps.attribute`. Or the output at `target` is not one number for each example.
        """
        arguments = Arguments(inputs, additional_forward_args, feature_mask, perturbations_per_eval, show_progress, run)
        self._check_layer_input(attribute_to_layer_input)
        wanted = self._wanted(token, target, foil)
        return self._selected(wanted, self._run(wanted, arguments), arguments)

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Callable[[Any], Tensor]:
        """A function of the model's output that returns weights times positive gradients, `(batch, row, group)`."""
        weights, question = checked_weights(site), wanted.question
        assert question is not None

        def scores(output: Any) -> Tensor:
            gradient = _gradient(question.read(output, len(weights)), weights, site.layer.name)
            return wanted.pool((widen(weights) * widen(gradient).relu()).mean(1))

        return scores


def _gradient(numbers: Tensor, weights: Tensor, name: str) -> Tensor:
    """The gradient of each number with respect to the weights of its example."""
    gradient = None
    if numbers.requires_grad and weights.requires_grad:
        (gradient,) = torch.autograd.grad(numbers.sum(), weights, retain_graph=True, allow_unused=True)
    if gradient is None:
        raise UnsupportedLayerError(
            f"The target does not depend on the attention weights of {name} by any gradient. Pass a forward_func "
            "without torch.no_grad and detach, and an attention function that applies the weights that it returns."
        )
    return gradient
