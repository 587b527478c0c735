"""Value projections of attention modules that compute attention inline, and the masks of their layers.

The weights of inline attention cannot be read. Hooks on the value projection show its values, and let a replay zero
them. Masks are read from the layer's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from captum_vz._engine.numerics.tensors import mask_as_bool
from captum_vz._engine.taps.changes import Changes
from captum_vz._engine.taps.handler import current_handler
from captum_vz._engine.taps.projection_table import BERT_LIKE, Mask, ValueProjection, family_of
from captum_vz._private import modules_of, tree_leaves


def is_value_projection(
    module: nn.Module | nn.Parameter, attention: nn.Module, row: ValueProjection | None = None
) -> bool:
    """Whether `module` projects values of `attention`, by the row of its class unless another is given."""
    if row is not None:
        return attrgetter(row.projection)(attention) is module
    row = family_of(attention)
    names = () if row is None else filter(None, (row.projection, row.second_projection))
    return any(getattr(attention, name, None) is module for name in names)


class ParameterProjectionMode(TorchFunctionMode):
    """Hands values that a parameter projects to the handler, as hooks do for submodules.

    With `named`, the user has named the parameter. Then the results of all functions of parameters are handed over.
    """

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.named = named

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        handler = current_handler()
        if handler is None or not isinstance(output, Tensor):
            return output
        if self.named:
            for used in tree_leaves((args, kwargs)):
                # A view of the parameter is no projection.
                if isinstance(used, nn.Parameter) and used.untyped_storage() != output.untyped_storage():
                    changed = handler.on_exit(used, args, output)
                    output = output if changed is None else changed
            return output
        parameter = next((x for x in args if isinstance(x, nn.Parameter)), None)
        if parameter is None or parameter.dim() != 3 or output.dim() != 4 or output.shape[2:] != parameter.shape[1:]:
            return output
        changed = handler.on_exit(parameter, args, output.flatten(2))
        return output if changed is None else changed.view_as(output)


def attach_to_named(layers: Sequence[nn.Module], rows: Sequence[ValueProjection], changes: Changes) -> None:
    """Let results of functions of parameters reach the handler, if the user names a parameter as a projection."""
    pairs = zip(layers, rows, strict=bool(rows))
    if any(isinstance(attrgetter(row.projection)(layer), nn.Parameter) for layer, row in pairs):
        changes.enter(ParameterProjectionMode(named=True))


class ProjectionTap:
    """Sees values that a parameter projects. Submodules that project values are seen by the hooks of each pass."""

    def attach(self, layers: Sequence[nn.Module], changes: Changes) -> None:
        rows = ((module, family_of(module)) for layer in layers for module in modules_of(layer))
        if any(row and isinstance(getattr(module, row.projection, None), nn.Parameter) for module, row in rows):
            changes.enter(ParameterProjectionMode())


def visible_by_argument(
    arguments: Any, batch: int, out: int, sources: int, row: ValueProjection = BERT_LIKE
) -> Tensor | None:
    """Which sources a layer's mask lets through, `(batch, 1, 1 or out, in)`, or None if no argument is a mask.

    The mask is the first of `arguments` that has the shape of one.
    """
    tensors = (value for value in tree_leaves(arguments) if isinstance(value, Tensor))
    found = (_read_mask(mask, batch, out, sources, row) for mask in tensors)
    return next((allowed for allowed in found if allowed is not None), None)


def _read_mask(mask: Tensor, batch: int, out: int, sources: int, row: ValueProjection) -> Tensor | None:
    """Which sources `mask` lets through, or None if it does not have the shape of a mask."""
    if row.sequence_first and mask.shape == (out, sources, batch, 1):
        return _hide_padding(mask.permute(2, 3, 0, 1) == 0)
    if row.mask is Mask.BLOCKS and mask.dim() == 5 and mask.shape[0] == batch:
        return _unfold_blocks(mask)[:, :, :out, :sources]
    if mask.shape[-1:] != (sources,):
        return None
    if mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[2] in (1, out):
        allowed = mask != 0 if row.mask is Mask.FACTOR else mask_as_bool(mask)
    elif mask.shape[:-1] in ((batch,), (batch, 1)):
        added = row.mask in (Mask.ADDED, Mask.HIDES) and mask.is_floating_point()
        if not added and not ((mask == 0) | (mask == 1)).all():
            return None
        allowed = (mask_as_bool(mask) if added else mask.bool()).view(batch, 1, 1, sources)
    else:
        return None
    return ~allowed if row.mask is Mask.HIDES and not mask.is_floating_point() else allowed


def _unfold_blocks(mask: Tensor) -> Tensor:
    """A mask of blocks (LongT5), as `(batch, 1, out, in)`. Each block sees itself and its two neighbours."""
    batch, _, blocks, rows, _ = mask.shape
    allowed = torch.zeros(batch, 1, blocks * rows, (blocks + 2) * rows, dtype=torch.bool, device=mask.device)
    for start in range(0, blocks * rows, rows):
        allowed[:, :, start : start + rows, start : start + 3 * rows] = mask[:, :, start // rows] > 0
    return allowed[..., rows:-rows]


def _hide_padding(allowed: Tensor) -> Tensor:
    """A mask `(batch, 1, out, in)` in which padding sees itself (XLNet), changed so that nothing sees padding."""
    out, sources = allowed.shape[2:]
    itself = torch.ones(out, sources, dtype=torch.bool, device=allowed.device).tril(sources - out).triu(sources - out)
    by_others = (allowed & ~itself).any(2, keepdim=True)
    of_padding = (allowed == (by_others | itself)).all(-1).all(-1) & by_others.any(-1).any(-1)
    return torch.where(of_padding[..., None, None], by_others, allowed)
