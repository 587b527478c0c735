"""TODO."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import FAILURES
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.tensors import first_tensor, mask_as_bool
from captum_vz._engine.numerics.tolerance import CannotReplay
from captum_vz._engine.structure.dependence import (
    are_in_order,
    first_of_own,
    mixes_unseen,
    reads_elsewhere,
    reads_own,
    values_are_in_order,
)
from captum_vz._engine.structure.find_layers import is_stack
from captum_vz._engine.structure.streams import as_one_vector, streams_axis
from captum_vz._engine.structure.windows import Windows


def attention_call(recording: LayerRecord, attention: str, streams: bool = False) -> AttentionRecord:
    """The layer's self-attention, which comes first, or the cross-attention that follows it.

    With `streams`, tokens may have several vectors each.

    Raises:
        AssertionError: The layer called no attention that can be read, or not the one that is asked for; or its tokens
            have several vectors each.
    """
    assert attention in ("self", "cross"), f"attention is {attention!r}: pass 'self' or 'cross'."
    name = recording.name
    _join_parts(recording)
    calls = recording.calls
    assert calls, (
        f"The layer {name} called no attention that can be read{_inline_in(recording)}: looked for calls of "
        "transformers' AttentionInterface and of torch.nn.functional.scaled_dot_product_attention (by that name: one "
        "that was imported from there is not seen), and for attention modules of families that compute it inline "
        "(GPT-J, BLOOM, DeBERTa ...). Pass a whole Transformer block; layers without attention have no map."
    )
    assert len(calls) <= 2 and not (len(calls) == 2 and any(map(is_stack, recording.layer.modules()))), (
        f"The layer {name} called attention {len(calls)} times in one run: pass a single Transformer block, "
        "not a stack of them; of a block with three attentions (SAM's decoder), the part that holds the one you mean."
    )
    assert len(calls) == 1 or not _in_one_list(recording.layer, {call.module for call in calls}), (
        f"The layer {name} has a list of {len(calls)} attentions of the same kind, none of which is a cross-attention: "
        "pass the part of it that holds one of them."
    )
    assert attention == "self" or len(calls) == 2, (
        f"The layer {name} has no second attention, so there is no cross-attention to explain: pass attention='self', "
        "or the layers of a decoder that reads an encoder."
    )
    call = calls[attention == "cross"]
    assert len(calls) == 1 or calls[0].size[2:] != calls[1].size[2:] or not reads_own(recording, calls[1]), (
        f"The layer {name} runs two attentions over its own tokens, {' and '.join(map(_kind, calls))}, so that its "
        "second one is no cross-attention: pass the part of the layer that holds the one you mean."
    )
    unseen = _unseen_before(recording, call)
    assert unseen is None, (
        f"The layer {name} runs an attention that cannot be read, {unseen}, before one that can, so that which of them "
        f"attention={attention!r} means is not known: pass the part of the layer that holds the one you mean."
    )
    assert not call.dropout, (
        f"The attention of {name} runs with dropout {call.dropout}, so that no two runs of it agree: "
        "call model.eval() first."
    )
    if not is_rearranged(recording, call):
        return call
    axis = streams_axis(recording, call) if len(calls) == 1 else None
    reason = "it has two attentions"
    if axis is None or not are_in_order(as_one_vector(recording, axis), call, alone=True):
        try:
            if len(calls) == 1:
                return over_positions(recording, call)
        except CannotReplay as error:
            reason = str(error)
    if axis is not None:  # also where the values are those of another layer
        assert streams, (
            f"The layer {name} carries several vectors of each token in streams, {tuple(recording.states[0].shape)}, "
            "and this method is for one vector a token. ValueZeroing and LayerAttention have maps of such layers."
        )
        call.streams = axis
        return call
    output = first_tensor(recording.output)
    raise AssertionError(
        f"{name} returned {None if output is None else tuple(output.shape)}, but its attention computed "
        f"{call.size[::2]} (batch, tokens): a map needs a layer whose output has one vector a token. What is seen in "
        f"windows is looked for, but here {reason}. Pass a single Transformer block as `layer`."
    )


def _kind(call: AttentionRecord) -> str:
    return type(call.module).__name__


def _join_parts(recording: LayerRecord) -> None:
    """Make one of the calls that a module's forward makes for parts of its own attention, and not for another one."""
    index = 1
    while index < len(recording.calls):
        if recording.calls[index].again and reads_own(recording, recording.calls[index]):
            recording.join(index)
        else:
            index += 1


def _in_one_list(layer: nn.Module, attentions: set[nn.Module]) -> bool:
    lists = [module for module in layer.modules() if isinstance(module, nn.ModuleList)]
    return any(attentions <= set(one.children()) for one in lists)


def _inline_in(recording: LayerRecord) -> str:
    """What to add about a layer whose attention was not seen."""
    kinds = [type(module).__name__ for module in recording.ran if type(module).__name__.endswith("Attention")]
    return f" (its {kinds[-1]} computes it in a way that is not known)" if kinds else ""


def _unseen_before(recording: LayerRecord, call: AttentionRecord) -> str | None:
    """What to call an attention that ran before `call` and could not be read, if any did.

    It has a class of such a name; or `call`, the only one, reads other states, and still the layer's own tokens mix.
    """
    inside = {id(module) for seen in recording.calls for module in seen.module.modules()}
    for module in recording.ran:
        if module is call.module:
            break
        if type(module).__name__.endswith("Attention") and id(module) not in inside:
            parts = set(module.modules())
            if not any(seen.module in parts for seen in recording.calls):
                return type(module).__name__
    alone = len(recording.calls) == 1 and call.module is not recording.layer and not is_rearranged(recording, call)
    if alone and reads_elsewhere(recording, call) and mixes_unseen(recording, call):
        return "or something else that mixes its tokens"
    return None


def end_of_given(recording: LayerRecord, call: AttentionRecord, given: int | None) -> int | None:
    """Where the padding begins that the model itself put behind the `given` tokens; None: it put none there."""
    if not call.pads or given is None or not given < call.size[2] == call.size[3]:
        return None
    rows, sources = valid_positions(recording, call)
    return None if rows[:, given:].any() or sources[:, given:].any() else given


def valid_positions(recording: LayerRecord, call: AttentionRecord) -> tuple[Tensor, Tensor]:
    """Which rows `(batch, out)` and sources `(batch, in)` of an attention are not padding, read from the masks.

    Padding is what no token sees in self-attention, not even it itself; where the layer chooses what is seen (sparse
    attention), the mask that it was given tells. A source that no valid row sees is padding.
    """
    if call.valid is None:
        call.valid = _read_positions(recording, call)
    return call.valid


def _read_positions(recording: LayerRecord, call: AttentionRecord) -> tuple[Tensor, Tensor]:
    first = call if call.windows is not None else recording.calls[0]
    batch, _, out, sources = first.size
    rows = torch.ones(batch, out, dtype=torch.bool, device=call.values.device)
    sees = None if first.visible is None or sources < out else first.sees()
    # What a cross-attention by itself sees says nothing of its rows.
    if sees is not None and not (len(recording.calls) == 1 and not sees.all() and reads_elsewhere(recording, first)):
        assert sources == out or sees[..., -1].any(), (
            f"The attention of {recording.name} has {sources} sources for {out} tokens, and no token "
            "sees the last of them: a static cache does not tell where the tokens stand. Pass use_cache=False, or a "
            "DynamicCache."
        )
        before = first_of_own(recording, first)
        if before is None or before + out > sources:
            before = sources - out - recording.read_beside(first)  # those in a cache
        rows = sees.any(1)[:, before : before + out]
        given = recording.kwargs.get("attention_mask")
        inline = first.value_projection is not None
        if isinstance(given, Tensor) and given.shape[2:] == (out, sources) and not inline:
            rows = rows | mask_as_bool(given).any(1).any(1)[:, before : before + out]
    if call.visible is None:
        return rows, torch.ones(batch, call.size[3], dtype=torch.bool, device=rows.device)
    return rows, (call.sees() & rows[:, :, None]).any(1)


def is_rearranged(recording: LayerRecord, call: AttentionRecord) -> bool:
    """Whether the layer's output is not `(batch, out, d)` with one vector for each row of its attention."""
    output = first_tensor(recording.output)
    return output is None or output.dim() != 3 or call.batch_first(output).shape[:2] != call.size[::2]


def is_reordered(recording: LayerRecord, call: AttentionRecord) -> bool:
    """Whether an attention has all of the layer's tokens, one each, but in another order."""
    if len(recording.calls) > 1 or call.parts > 1 or call.sequence_first or call.size[2] != call.size[3]:
        return False
    return call.windows is None and not values_are_in_order(recording, call)


def over_positions(recording: LayerRecord, call: AttentionRecord) -> AttentionRecord:
    """A rearranged attention as one over the layer's own positions; grids are read row by row.

    Raises:
        CannotReplay: Which position a value belongs to cannot be told.
    """
    reasons = []
    for axis in (-1, 1):  # features last, or as convolutions have them: (batch, d, height, width)
        try:
            windows = Windows(recording, call, axis)
        except FAILURES as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reasons.append(str(error))
            continue
        batch, out, sources = windows.shape
        size = (batch, call.size[1], out, sources)
        return replace(call, size=size, visible=None, weights=None, context=None, windows=windows)
    raise CannotReplay(reasons[0])
