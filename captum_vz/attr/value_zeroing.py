"""Value Zeroing (Mohebbi et al., EACL 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import (
    HALF,
    OUTPUT_ROUNDING,
    AttentionSite,
    ImpreciseError,
    OutputDistance,
    Readings,
    Request,
    in_float32,
    value_zeroing_scores,
)
from captum_vz.attr._base import LayerMaps
from captum_vz.attr._call import Attention, Heads, Values, as_list, check_one_of, select_heads
from captum_vz.attr._call.target import Wanted
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import Distance, cosine_distance, half_squared_distance, unit_vectors, widen
from captum_vz.functional.interventions import Intervention, get_intervention
from captum_vz.functional.scores import get_distance, is_safe_length


class ValueZeroing(LayerMaps):
    r"""How much each output *token* of a layer changes when the value vector of a source token is set to zero.

    .. math:: C_{ij} = \operatorname{dist}\big(\tilde y_i^{\neg j},\, \tilde y_i\big), \qquad
        \hat C_{ij} = C_{ij} \big/ \textstyle\sum_k C_{ik}

    where :math:`\tilde y_i` is the layer's output at token i. :math:`\tilde y_i^{\neg j}` is the output with
    :math:`v_j = 0` in every selected head. The attention weights keep their values. Each layer is tested separately, on
    its clean input. If a layer has several vectors for each token (Gemma 3n, DeepSeek-V4), its output consists of all
    these vectors. `Mohebbi et al., EACL 2023 <https://aclanthology.org/2023.eacl-main.245>`_, section 3.

    If a layer runs more than once in a pass (ALBERT), the result is the map of its last run. A warning names rows whose
    changes are close to the rounding error of the model's dtype.

    Args:
        forward_func: A model, or a function that runs the layers.
        layer: A layer (a whole Transformer block), or a list of layers. None: all layers of the model, as
            `captum_vz.find_layers` returns them. For a list and for None, `attribute` returns a list of maps.
        device_ids: Not used.
        distance: The distance of two outputs: "cosine", "euclidean", "l1", or a function `(..., d), (..., d) -> (...)`.
        attention: "self", or "cross" for the cross-attention of a decoder block. If a layer has others (SAM 3's decoder
            has three attentions), the attention module of the layer, or a list of modules that are heads of one
            attention; for several layers, a list with this for each layer.
        heads: The query heads in which values are zeroed: an int or a list of ints for all layers, or a list with one
            such selection for each layer. None: all heads. If query heads share a value, the value is zeroed in the
            selected heads only.
        reduce_heads: "joint": values are zeroed in all selected heads at once. None: in one head at a time, which gives
            one map for each selected head, `(batch, head, out, in)`, in one pass of the model. Each is the map of
            `heads=head`.
        normalize: Whether to divide each row by its sum. False returns the distances themselves.
        final_norm: A module that is applied to both outputs before the distance is computed, such as the norm after the
            last layer of a pre-norm stack.
        values: Where the values are, for a layer that computes attention in its own code, without a function that the
            package can read, or that calls such a function in parts or in another order. A submodule or parameter of
            the layer, whose rows are the values `(batch, in, d)`. Or `(part, select)`: `select` is given what the part
            returns, and returns the values in it, a view `(batch, in, d)` or `(batch, in, head, d_head)`. Or a list of
            these, if each head has a module of its own. For several layers, a list with this for each layer, or a
            function that takes a layer and returns it.
        intervention: What happens to a source. "zero": its value is zero, as in the paper. "mean": its value is the
            mean of the sequence's values. "knockout": it is hidden, and the other weights are divided by their sum. Or
            an object of a subclass of :class:`~captum_vz.functional.Intervention`.

    >>> from captum_vz import ValueZeroing, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> mask = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    >>> layers = find_layers(model)
    >>> maps = ValueZeroing(model, layers).attribute(inputs)  # one map (batch, out, in) for each layer
    >>> row = ValueZeroing(model, layers[-1]).attribute(inputs, token=mask)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    replays_layers = True
    accepts_streams = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        distance: str | Distance = "cosine",
        attention: Attention = "self",
        heads: Heads | Sequence[Heads] = None,
        reduce_heads: str | None = "joint",
        normalize: bool = True,
        final_norm: nn.Module | None = None,
        values: Values = None,
        intervention: str | Intervention = "zero",
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        get_distance(distance)
        get_intervention(intervention)
        self.intervention = intervention
        self.distance = distance
        self.heads = heads
        check_one_of("reduce_heads", reduce_heads, "joint", None)
        self.reduce_heads = reduce_heads
        self.final_norm = final_norm
        self.values = values

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The distances between clean and changed outputs, `(batch, row, group)`, or `(batch, head, row, group)`."""
        check_one_of("reduce_heads", self.reduce_heads, "joint", None)
        heads = select_heads(self.heads, site.layer.index, len(as_list(self.layer)), site.shape.heads)
        asked = Request(
            rows=wanted.rows,
            groups=wanted.groups,
            max_groups=wanted.max_groups,
            heads=heads,
            intervention=get_intervention(self.intervention),
            steps=wanted.steps,
        )
        distance = self._distance(site)
        if self.reduce_heads is not None:
            return value_zeroing_scores(site, distance, asked)
        each = range(site.shape.heads) if heads is None else heads
        return torch.stack([value_zeroing_scores(site, distance, replace(asked, heads=(head,))) for head in each], 1)

    def _distance(self, site: AttentionSite) -> OutputDistance:
        norm = self.final_norm
        if site.streams is not None and norm is not None:
            raise UnsupportedLayerError(
                f"The layer {site.layer.name} carries several vectors of each token, and final_norm is for one: leave "
                "it None."
            )
        if norm is not None and any(parameter.dtype in HALF for parameter in norm.parameters()):
            norm = in_float32(norm)
        # The unit vector of a clean output is computed once, not once for each pair of tokens.
        own = get_distance(self.distance)
        by_angle = own is cosine_distance
        distance = half_squared_distance if by_angle else own

        def prepare(outputs: Tensor, readings: Readings) -> Tensor:
            outputs = outputs if norm is None else norm(outputs)
            return _unit_vectors(outputs, readings) if by_angle else outputs

        def prepare_carefully(outputs: Tensor, readings: Readings) -> Tensor:
            return unit_vectors(outputs if norm is None else norm(outputs))

        def between(zeroed: Tensor, clean: Tensor) -> Tensor:
            distances = distance(zeroed, clean)
            if distances.shape != zeroed.shape[:-1]:
                raise ArgumentError(
                    f"distance gave {tuple(distances.shape)} for two of {tuple(zeroed.shape)}: give one number for "
                    f"each pair of vectors, {tuple(zeroed.shape[:-1])}."
                )
            return distances

        if not by_angle:
            return OutputDistance(prepare, between)
        careful = OutputDistance(prepare_carefully, between)
        return OutputDistance(prepare, between, careful, _rounding_of_angle if norm is None else None)


def _unit_vectors(outputs: Tensor, readings: Readings) -> Tensor:
    """`unit_vectors` in two calls. Whether that is precise is read later."""
    outputs = widen(outputs)
    length = torch.linalg.vector_norm(outputs, dim=-1, keepdim=True)
    if length.numel():
        check = partial(_refuse_length, outputs.dtype)
        for number in length.aminmax():
            readings.add(number, check)
    return outputs / length


def _refuse_length(dtype: torch.dtype, length: float) -> None:
    if not is_safe_length(length, length, dtype):
        raise ImpreciseError


def _rounding_of_angle(dtype: torch.dtype) -> float:
    """Upper bound on the cosine distance by which rounding alone moves outputs: each is rounded, and its direction."""
    return (2 * OUTPUT_ROUNDING * torch.finfo(dtype).eps) ** 2
