"""Value Zeroing (Mohebbi et al., EACL 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from captum_vz._engine import HALF, AttentionSite, OutputDistance, in_float32, value_zeroing_scores
from captum_vz.attr._arguments import as_list
from captum_vz.attr._heads import Heads, select_heads
from captum_vz.attr._layer_maps import LayerMaps
from captum_vz.attr._wanted import Wanted
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import Distance, cosine_distance, half_squared_distance, unit_vectors
from captum_vz.functional.distances import get_distance


class ValueZeroing(LayerMaps):
    r"""How far each output *token* of a layer moves when the value vector of a source token is set to zero.

    .. math:: C_{ij} = \operatorname{dist}\big(\tilde y_i^{\neg j},\, \tilde y_i\big), \qquad
        \hat C_{ij} = C_{ij} \big/ \textstyle\sum_k C_{ik}

    where :math:`\tilde y_i` is the layer's output at token i and :math:`\tilde y_i^{\neg j}` the same with
    :math:`v_j = 0` in every chosen head, attention weights and everything else as they were. Each layer is changed by
    itself, on its clean input. Where layers carry several vectors of each token (Gemma 3n, DeepSeek-V4), its output is
    all of them. `Mohebbi et al., EACL 2023 <https://aclanthology.org/2023.eacl-main.245>`_, section 3.

    A layer that runs more than once in a pass (ALBERT) gives the map of its last run. A warning names rows that change
    by hardly more than the model's number type rounds.

    Args:
        forward_func: A model, or any function that runs the layers.
        layer: A layer (a whole Transformer block) or a list of layers, for which `attribute` returns a list of maps.
            `captum_vz.find_layers(model)` gives all layers.
        device_ids: The devices of a DataParallel model, needed only if `forward_func` runs one without being one.
        distance: "cosine", "euclidean", "l1", or a function `(..., d), (..., d) -> (...)`.
        attention: "self", or "cross" for the second attention of a decoder block.
        heads: Zero the value in these (query) heads only: an int or a list of ints for all layers, or a list with one
            such selection for each layer. Where heads share keys and values, only the chosen ones lose theirs.
        normalize: Whether each row is divided by its sum. False gives the distances themselves.
        final_norm: A module applied to both outputs before the distance is taken, such as the norm after the last
            layer of a pre-norm stack.
        matmul_precision: "highest" or "medium", as in torch.set_float32_matmul_precision. With "medium", what changes
            when a value is zeroed goes through the feed-forward's matrices in bfloat16. On hardware with bfloat16
            units a map then takes 0.7 to 0.9 of the time, and scores are off by parts in ten thousand (of scores above
            0.001 on real weights, half by less than 0.04 %, the worst by 0.6 %). Otherwise, and for layers of another
            shape than linear or gated after a norm, the map is exact and a warning says so. A few rows, short
            sentences and small models are exact as well, because they would gain nothing.

    >>> from captum_vz import ValueZeroing, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> mask = inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)
    >>> layers = find_layers(model)
    >>> maps = ValueZeroing(model, layers).attribute(inputs)  # one map (batch, out, in) a layer
    >>> row = ValueZeroing(model, layers[-1]).attribute(inputs, token=mask)  # (batch, in)
    >>> row.shape == inputs["input_ids"].shape, round(row.sum().item(), 4)
    (True, 1.0)
    """

    replays_layers = True
    accepts_streams = True

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        distance: str | Distance = "cosine",
        attention: str = "self",
        heads: Heads | Sequence[Heads] = None,
        normalize: bool = True,
        final_norm: nn.Module | None = None,
        matmul_precision: str = "highest",
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        get_distance(distance)
        self.distance = distance
        self.heads = heads
        self.final_norm = final_norm
        if matmul_precision not in ("highest", "medium"):
            raise ArgumentError(f"matmul_precision is {matmul_precision!r}: pass 'highest' or 'medium'.")
        self.matmul_precision = matmul_precision

    def layer_scores(self, site: AttentionSite, wanted: Wanted) -> Tensor:
        """The distances that the outputs move, `(batch, row, group)`."""
        fast = self.matmul_precision == "medium"
        return value_zeroing_scores(site, wanted.ablation(self._heads(site), fast), self._distance(site))

    def _heads(self, site: AttentionSite) -> tuple[int, ...] | None:
        return select_heads(self.heads, site.layer.index, len(as_list(self.layer)), site.shape.heads)

    def _distance(self, site: AttentionSite) -> OutputDistance:
        norm = self.final_norm
        if site.streams is not None and norm is not None:
            raise UnsupportedLayerError(
                f"The layer {site.layer.name} carries several vectors of each token, and final_norm is for one: omit "
                "it."
            )
        if norm is not None and any(parameter.dtype in HALF for parameter in norm.parameters()):
            norm = in_float32(norm)
        # The cosine's unit vectors are computed once for a clean output, and not once a pair.
        own = get_distance(self.distance)
        by_angle = own is cosine_distance
        distance = half_squared_distance if by_angle else own

        def prepare(outputs: Tensor) -> Tensor:
            outputs = outputs if norm is None else norm(outputs)
            return unit_vectors(outputs) if by_angle else outputs

        def between(zeroed: Tensor, clean: Tensor) -> Tensor:
            distances = distance(zeroed, clean)
            if distances.shape != zeroed.shape[:-1]:
                raise ArgumentError(
                    f"distance gave {tuple(distances.shape)} for two tensors {tuple(zeroed.shape)}: it takes (..., d), "
                    f"(..., d) and gives one number for each pair of vectors, here {tuple(zeroed.shape[:-1])}."
                )
            if not distances.isfinite().all():
                raise RefusedError("distance gave values that are not finite (NaN or infinity).")
            return distances

        return OutputDistance(prepare, between)
