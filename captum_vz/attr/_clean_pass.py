"""The clean pass of a whole model in which values are changed afterwards: which attention, which tokens, and checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captum_vz._engine import LayerRecord, ModelReplay, attention_site, is_half
from captum_vz.attr._base.captum import warn
from captum_vz.attr._base.runs import Runs
from captum_vz.attr._call.arguments import FeatureGroups, Inputs, begins_with_padding, bind_forward, end_of_inputs
from captum_vz.attr._call.misuse import check_no_cache
from captum_vz.attr._call.padding import LeftPadding
from captum_vz.attr._call.parts import Attention, Heads, attentions_of_layers, select_heads
from captum_vz.errors import ArgumentError, UnsupportedLayerError

HALF_PRECISION = "the model runs in half precision: effects are differences of rounded outputs. Load it in float32"


class CleanPass(NamedTuple):
    """What a clean pass shows.

    Attributes:
        output: What `forward_func` returned.
        members: The group of each source, `(batch, in)`. -1 for tokens that are padding in all layers.
        end: Where padding begins that the model itself added. None: it added none.
        dtypes: The dtypes that numbers of the model are rounded to.
        tokens_first: Whether the tensors of the first layer are `(tokens, batch, d)`.
    """

    output: Any
    members: Tensor
    end: int | None
    dtypes: list[torch.dtype]
    tokens_first: bool


def run_clean(
    name: str,
    model: ModelReplay,
    forward_func: Callable[..., Any],
    inputs: Inputs,
    further: Any,
    *,
    masks: FeatureGroups,
    attention: Attention,
    heads: Heads | Sequence[Heads],
    run: int | None,
) -> CleanPass:
    """Run `forward_func` once. `model` then knows where values are changed. `name` is used in errors and warnings.

    Raises:
        RefusedError: See :class:`~captum_vz.ValueZeroingEffect`.
    """
    check_no_cache(inputs, further)
    layers = model.layers
    attentions = attentions_of_layers(attention, layers)
    notes: list[str] = []
    dtypes: list[torch.dtype] = []
    ends: list[int | None] = []
    orders: list[bool] = []

    def compute(record: LayerRecord) -> Tensor:
        runs.note(record)
        record.inputs = inputs, further
        site = attention_site(record, attentions[record.index])
        if site.windows is not None or site.is_reordered():
            raise UnsupportedLayerError(
                f"The attention of {record.name} sees the layer's tokens in windows, or in another order, where "
                f"{name} cannot zero values. Use ValueZeroing for the maps of such layers. If a part of the layer "
                "projects its tokens in their order, name this part, such as values=layer.attn.to_v."
            )
        model.zero_in(site, select_heads(heads, record.index, len(layers), site.shape.heads))
        if not padding and begins_with_padding(site):
            padding.append(LeftPadding(site))
        ends.append(end_of_inputs(site, inputs))
        orders.append(site.attention.tokens_first)
        half = is_half(record)
        notes.extend([*record.warnings, *([HALF_PRECISION] if half else [])])
        dtypes.append(torch.bfloat16 if half else record.first_output.dtype)
        each = torch.arange(site.shape.sources, device=site.source_mask.device).expand_as(site.source_mask)
        return (each if (groups := masks.of(site, ends[-1])) is None else groups).where(site.source_mask, -1)

    forward = bind_forward(forward_func, inputs, further)
    runs, padding = Runs(forward, layers, run), list[LeftPadding]()
    with runs.checked():
        output, groups = model.run_clean(forward, compute, runs.chosen)
        runs.output = output
    notes.extend(said for one in padding for said in one.warnings(forward_func, inputs, further))
    if notes:
        warn(f"{name}: {'; '.join(dict.fromkeys(notes))}.")
    return CleanPass(output, _members([one for _, one in groups]), ends[0], dtypes, orders[0])


def _members(groups: list[Tensor]) -> Tensor:
    shapes = {tuple(one.shape) for one in groups}
    if len(shapes) != 1:
        raise ArgumentError(
            f"The layers' attentions have different examples and sources: {sorted(shapes)}. Values can be zeroed "
            "together only where their tokens are the same: pass layers of one stack."
        )
    return torch.stack([one.to(groups[0].device) for one in groups]).amax(0)
