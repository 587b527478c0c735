"""Packed pairs of layers that were looked at first: a replay that gives back the clean output may be wrong for others.

The clean output does not show that the values stand in another order than the layer's tokens, that the context is cut
where no clean one reaches, or that positions compete where the clean ones get along. What torch and transformers bring
along does nothing of the kind, but that experts may have room for few; anybody's own layer may.
"""

from __future__ import annotations

import inspect
from itertools import product

import torch
from torch import Tensor, nn

from captum_vz._engine.origins import NOISES, attention_answers, chance, noise_like, values_are_in_order
from captum_vz._engine.recording import AttentionCall, Recording, at
from captum_vz._engine.replay import NotReproducedError, PackedPairs, check_reproduced, is_reproduced
from captum_vz._engine.watching import is_hooked
from captum_vz._engine.weights import for_query_heads

KNOWN = ("torch.nn.", "transformers.")
# Positions that run beside noise, and how many times as many that are noise.
FEW, LOUDER = 8, 3


def packed_pairs(
    recording: Recording, call: AttentionCall, output: Tensor, batch: Tensor, out: Tensor, only_first: bool = False
) -> PackedPairs:
    """What replays packed positions of a layer, some of them being `(batch, out)`.

    Raises:
        NotReproducedError: They cannot be told from what they are replayed beside, or by their sources.
    """
    known = is_known(recording)
    replay = PackedPairs(recording, call, only_first)
    if not known:
        if not values_are_in_order(recording, call):
            raise NotReproducedError("its values stand in another order than its tokens")
        if not _projects_any_context(recording, call):
            replay = PackedPairs(recording, call, only_first, by_module=False)
    if not known or not _runs_each_module_on_each_position(recording):
        _check_apart(replay, call, output, batch, out)
    return replay


def is_known(recording: Recording) -> bool:
    """Whether what a layer does is written in torch and transformers, and nowhere else."""
    return all(_is_known(m) and (m is recording.layer or not is_hooked(m)) for m in recording.layer.modules())


def _is_known(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    # Accelerate's wrapper of a forward moves what goes in and out. What it released keeps its own among its attributes.
    moved = hook and all(type(one).__module__ == "accelerate.hooks" for one in (hook, *getattr(hook, "hooks", ())))
    forward = vars(module)["_old_forward"] if moved else module.forward
    forward = getattr(forward, "__func__", forward)
    where = getattr(inspect.unwrap(forward), "__module__", None) or ""
    return f"{where}.".startswith(KNOWN) and forward is type(module).forward


def _runs_each_module_on_each_position(recording: Recording) -> bool:
    """Whether each module with parameters, but those of the attention, ran once and on all positions: no experts."""
    batch, _, out, _ = recording.calls[0].size
    inside = {id(module) for call in recording.calls for module in call.module.modules()}
    holders = [m for m in recording.layer.modules() if id(m) not in inside and m._parameters]
    matrices = all(x is None or x.dim() <= 2 for module in holders for x in module._parameters.values())
    return matrices and all(recording.rows.get(id(module)) == [batch * out] for module in holders)


def _projects_any_context(recording: Recording, call: AttentionCall) -> bool:
    """Whether the attention module makes of any context what the submodule that projects it makes of that.

    Of the largest and the smallest entries that weighted sums of the values, or of some of them, may have.
    """
    if not call.answered or call.module is recording.layer:
        return True  # its own code runs in any case
    assert call.context is not None  # it was answered
    values = for_query_heads(call.values.nan_to_num(0, 0, 0), call.size[1]).transpose(1, 2)  # (batch, in, head, d_head)
    most, least = values.amax((0, 1)).clamp_min(0), values.amin((0, 1)).clamp_max(0)
    drawn = chance(call.context) < 0
    for corners in (drawn, ~drawn):
        context = torch.where(corners, most, least)
        found = attention_answers(recording, call, context)
        expected = context.flatten(2) if call.projection is None else call.projection(context.flatten(2))
        if found is None or found.shape != expected.shape:
            return False
        if not is_reproduced(found.flatten(0, 1), expected.flatten(0, 1)):
            return False
    return True


def _check_apart(replay: PackedPairs, call: AttentionCall, output: Tensor, batch: Tensor, out: Tensor) -> None:
    """Raise NotReproducedError if positions `(batch, out)` hear others that run beside them, whatever those carry."""
    assert call.context is not None  # PackedPairs saw to it
    few = torch.arange(len(batch), device=batch.device).flip(0)[:FEW]
    beside = few[:1].expand(LOUDER * len(few))
    clean = at(output, batch[few], out[few])
    # Who comes first may be served first, or last.
    for noise, at_end in product(NOISES, (False, True)):
        everyone = torch.cat([few, beside] if at_end else [beside, few])
        mine = slice(len(few)) if at_end else slice(len(beside), None)
        context = at(call.context, batch[everyone], out[everyone]).flatten(1)
        disturbed = noise_like(context, noise)
        disturbed[mine] = context[mine]
        try:
            check_reproduced(replay.run(batch[everyone], out[everyone], disturbed)[mine], clean)
        except NotReproducedError as error:
            raise NotReproducedError(f"beside noise, {error}") from error
