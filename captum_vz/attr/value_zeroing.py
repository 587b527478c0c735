"""Value Ablation (Mohebbi et al., EACL 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from captum_vz._engine.capture.float32 import HALF, in_float32
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.replay.base import Ablation, OutputDistance
from captum_vz._engine.value_zeroing import value_zeroing_map
from captum_vz.attr._arguments import listed
from captum_vz.attr._heads import Heads, select_heads
from captum_vz.attr._layer_maps import LayerMaps
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

    A layer that runs more than once in a pass (ALBERT) gives the map of
    its last run. Rows that change by hardly more than the model's number type rounds are told of by a warning. The
    other arguments of the constructor and those of `attribute`, what comes back and what is raised are described in
    :class:`~captum_vz.attr.LayerMaps`.

    Args:
        forward_func: See :class:`~captum_vz.attr.LayerMaps`, like `layer`, `device_ids`, `attention`, `normalize`.
        distance: "cosine", "euclidean", "l1", or a function `(..., d), (..., d) -> (...)`.
        heads: Zero the value in these (query) heads only: an int or a list of ints for all layers, or a list with one
            such selection for each layer. Where heads share keys and values, only the chosen ones lose theirs.
        final_norm: A module applied to both outputs before the distance is taken, such as the norm after the last
            layer of a pre-norm stack.
        normalize: False gives the raw distances.
        precision: "exact", or "fast": what changes when a value is zeroed goes through the feed-forward's matrices in
            bfloat16, and is added to what does not change. On hardware with units for bfloat16 a map then takes 0.7 to
            0.9 of the time, and scores are off by parts in ten thousand (of real weights, above 0.001: half of them by
            less than 0.04 %, the worst by 0.6 %). Without such units, and for layers of another shape than the usual
            (linear or gated, behind a norm), a warning says so and the map is exact; so are a few rows, short sentences
            and small models, which would gain nothing.

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

    _replays = True
    _of_streams = True

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
        precision: str = "exact",
    ) -> None:
        super().__init__(forward_func, layer, device_ids, attention=attention, normalize=normalize)
        self.distance = get_distance(distance)
        self.heads = heads
        self.final_norm = final_norm
        assert precision in ("exact", "fast"), f"precision is {precision!r}: pass 'exact' or 'fast'."
        self.precision = precision

    def _layer_map(
        self,
        index: int,
        recording: LayerRecord,
        call: AttentionRecord,
        rows: Tensor | None,
        groups: Tensor | None,
        at_most: int | None,
    ) -> Tensor:
        assert call.streams is None or self.final_norm is None, (
            f"The layer {recording.name} carries several vectors of each token, and final_norm is for one: omit it."
        )
        heads = select_heads(self.heads, index, len(listed(self.layer)), call.size[1])
        zeroing = Ablation(self._measure(), rows, groups, heads, at_most, fast=self.precision == "fast")
        scores, lost = value_zeroing_map(recording, call, zeroing)
        if lost:
            dtype = str(scores.dtype).removeprefix("torch.")
            recording.notes.append(
                f"{lost} row(s) of layer {index} ({recording.name}) change by hardly more than "
                f"{dtype} rounds" + ("" if dtype == "float64" else ": run the model in float64 (model.double())")
            )
        return scores

    def _measure(self) -> OutputDistance:
        norm = self.final_norm
        if norm is not None and any(parameter.dtype in HALF for parameter in norm.parameters()):
            norm = in_float32(norm)
        # The cosine's unit vectors are computed once for a clean output, and not once a pair.
        by_angle = self.distance is cosine_distance
        distance = half_squared_distance if by_angle else self.distance

        def prepare(outputs: Tensor) -> Tensor:
            outputs = outputs if norm is None else norm(outputs)
            return unit_vectors(outputs) if by_angle else outputs

        def between(zeroed: Tensor, clean: Tensor) -> Tensor:
            distances = distance(zeroed, clean)
            assert distances.shape == zeroed.shape[:-1], (
                f"distance gave {tuple(distances.shape)} for two tensors {tuple(zeroed.shape)}: it takes (..., d), "
                f"(..., d) and gives one number for each pair of vectors, here {tuple(zeroed.shape[:-1])}."
            )
            assert distances.isfinite().all(), "distance gave values that are not finite (NaN or infinity)."
            return distances

        return OutputDistance(prepare, between)
