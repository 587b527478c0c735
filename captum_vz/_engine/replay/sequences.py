"""TODO."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from captum_vz._engine.capture.interventions import CopiesHandler, ScaleNoise, ZeroValues
from captum_vz._engine.capture.layer_runner import run_again, without_caches, without_hooks
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.matmul import OneDnnLinears
from captum_vz._engine.numerics.perturbation import PROBE_STRENGTHS, SMALL_STRENGTHS, is_independent
from captum_vz._engine.numerics.tensors import describe, first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplay, SameAgainError, check_reproduced, is_reproduced
from captum_vz._engine.replay.base import (
    Ablation,
    TargetRows,
    chunk_rows,
    empty_map,
    group_members,
    zeroed_heads,
    zeroed_weights,
)
from captum_vz._engine.replay.trust import each_module_runs_once, is_library_code
from captum_vz._engine.replay.windows import _in_windows
from captum_vz._engine.structure.dependence import are_in_order
from captum_vz._engine.structure.site import is_reordered, over_positions
from captum_vz._engine.taps.handler import handled_by

# In place of an axis: the first one, on which each example has its heads behind each other (BLOOM's biases, WavLM's).
HEADS = -1
# How many readings of a layer's arguments are tried at most.
TRIALS = 64
# How many copies are the crowd that others are to hear nothing of, and how many it takes with these others.
CROWD_OF_COPIES = 12
SMALLEST_CROWD = CROWD_OF_COPIES + 2 * len(SMALL_STRENGTHS)
# How many whole sequences of the first chunk are run by themselves as well.
COPIES_RUN_ALONE = 4


class WholeSequences:
    """Replays whole sequences: `run(example, zeroed)` answers the layer's output for n copies of one example.

    Which axis of an argument holds the examples is told by its length: the likeliest of those that are as long as the
    batch, until `choose` finds others.
    """

    def __init__(self, recording: LayerRecord, call: AttentionRecord) -> None:
        self.call = call
        self.site = recording.asked_before(call)
        self.arguments, self.spec = tree_flatten(without_caches((recording.args, recording.kwargs)))
        self.axes = [self._axes_of_examples(value)[0] for value in self.arguments]
        self.layer = without_hooks(recording.layer)

    def choose(self, output: Tensor) -> None:
        """Find the axes for which the layer returns its clean `output (batch, out, d)`, by trying.

        Raises:
            CannotReplay: There are none, or there is nothing to choose from.
        """
        axes_of_each = [self._axes_of_examples(value) for value in self.arguments]
        if all(len(axes) == 1 for axes in axes_of_each):
            raise SameAgainError
        # Two copies, for one may lie along any axis.
        nothing = torch.zeros(2, self.call.size[1], self.call.size[3], dtype=torch.bool, device=output.device)
        for axes in islice(product(*axes_of_each), TRIALS):
            self.axes = list(axes)
            try:
                for example, clean in enumerate(output):
                    check_reproduced(self.run(example, nothing).flatten(0, 1), clean.repeat(2, 1))
                return
            except CannotReplay:
                continue
        raise CannotReplay("which of its arguments' axes the examples lie along cannot be told")

    def run(self, example: int, zeroed: Tensor) -> Tensor:
        """The layer's output `(n, out, d)`, values zeroed where `zeroed (n, head, in)` is True."""
        return self._on_copies(example, ZeroValues(self.call, self.site, zeroed))

    def check_examples_apart(self, output: Tensor) -> None:
        """Raise CannotReplay if an example of the batch hears others: then none can be run by itself."""
        if len(output) == 1:
            return
        for noise, odd in product(PROBE_STRENGTHS, (0, 1)):
            quiet = torch.arange(len(output), device=output.device) % 2 == odd
            strengths = torch.where(quiet, 0, noise)
            answer = self._in_batch(ScaleNoise(self.call, self.site, strengths))
            if not is_reproduced(answer[quiet], output[quiet]):
                raise CannotReplay("what becomes of an example depends on others of the batch")

    def copies_are_apart(self, example: int, clean: Tensor) -> bool:
        """Whether copies of an example, whose output is `clean (out, d)`, hear nothing of each other."""

        def run(strengths: Tensor) -> Tensor:
            return self._on_copies(example, ScaleNoise(self.call, self.site, strengths))

        try:
            return is_independent(run, clean, CROWD_OF_COPIES)
        except CannotReplay:
            return False

    def _on_copies(self, example: int, copies: CopiesHandler) -> Tensor:
        each = zip(self.arguments, self.axes, strict=True)
        return self._run([self._repeat(x, axis, example, copies.count) for x, axis in each], copies)

    def _in_batch(self, copies: CopiesHandler) -> Tensor:
        # In memory of their own, for a layer may write into what it is given.
        return self._run([x.clone() if isinstance(x, Tensor) else x for x in self.arguments], copies)

    def _run(self, arguments: list[Any], copies: CopiesHandler) -> Tensor:
        args, kwargs = tree_unflatten(arguments, self.spec)
        with handled_by(copies), OneDnnLinears():
            output = first_tensor(run_again(self.layer, args, kwargs))
        copies.check_asked()
        if output is None or self.call.batch_first(output).shape[:2] != (copies.count, self.call.size[2]):
            raise CannotReplay(f"on {copies.count} examples it returned {describe(output)}")
        return self.call.batch_first(output)

    def _repeat(self, value: Any, axis: int | None, example: int, copies: int) -> Any:
        """So many times one example of what has one entry an example along `axis`; anything else (None) as it is."""
        if axis is None:
            return value
        if axis == HEADS:
            return value.unflatten(0, (self.call.size[0], -1))[example].repeat(copies, 1, 1)
        shape = list(value.shape)
        shape[axis] = copies
        copied = value.narrow(axis, example, 1).expand(shape)
        return copied.contiguous() if value.dim() == 3 else copied  # hidden states, which some layers view

    def _axes_of_examples(self, value: Any) -> list[int | None]:
        """The axes that the examples may lie along, the likeliest first; None: along none."""
        if not isinstance(value, Tensor):
            return [None]
        batch, heads, out, sources = self.call.size
        if value.dim() == 3 and value.shape[::2] == (batch * heads, sources):
            return [HEADS]
        order = [1, 0] if self.call.sequence_first else [0]
        if value.dim() == 2:  # masks and the like have their examples first, wherever the layer's tokens are
            order.sort()
        if value.shape[:3] == (out, sources, batch):  # what is known of pairs (XLNet's masks, BROS' distances)
            order.insert(0 if self.call.sequence_first else 1, 2)
        fitting = [axis for axis, length in enumerate(value.shape) if length == batch]
        likely = [axis for axis in order if axis in fitting]
        # What is as long as the batch by chance is not to be taken apart: a table of positions, a causal mask.
        by_chance = [None] if batch in (heads, out, sources) or not likely else []
        return [*likely, *by_chance, *(axis for axis in fitting if axis not in likely)]


class BatchReplay(WholeSequences):
    """The same for layers that run no example by itself: the batch as it was, with values of one example zeroed."""

    def run(self, example: int, zeroed: Tensor) -> Tensor:
        """See :meth:`WholeSequences.run`; no other example may hear of what is zeroed in this one."""
        answers = []
        for one in zeroed:
            answer = self._with_zeroed({example: one})
            others = torch.arange(len(answer), device=answer.device) != example
            if not is_reproduced(answer[others], self._clean[others]):
                raise CannotReplay("what is zeroed in one example changes another")
            answers.append(answer[example])
        return torch.stack(answers)

    @cached_property
    def _clean(self) -> Tensor:
        return self._with_zeroed({})

    def check_examples_apart(self, output: Tensor) -> None:
        """Nothing: each run is checked for it."""

    def copies_are_apart(self, example: int, clean: Tensor) -> bool:
        """There are none that run together."""
        return True

    def _with_zeroed(self, zeroed: Mapping[int, Tensor]) -> Tensor:
        batch, heads, _, sources = self.call.size
        values = torch.zeros(batch, heads, sources, dtype=torch.bool, device=self.call.values.device)
        for example, one in zeroed.items():
            values[example] = one
        return self._in_batch(ZeroValues(self.call, self.site, values))


def _whole_sequences(
    recording: LayerRecord,
    call: AttentionRecord,
    output: Tensor,
    zeroing: Ablation,
    targets: TargetRows,
    choose: bool = False,
    kind: type[WholeSequences] = WholeSequences,
) -> Tensor:
    # Which axis holds the tokens was told by a shape. Packed pairs fail where it is another; whole sequences would not.
    if call.streams is not None and not are_in_order(recording, call, alone=True):
        raise CannotReplay("its tokens have several vectors each, and a value does not depend on its own alone")
    if is_reordered(recording, call):
        # Which tokens are hidden is known in the attention's order only.
        if call.visible is not None and not call.visible.all():
            raise CannotReplay("its attention sees its tokens in another order, and not all of them")
        return _in_windows(recording, over_positions(recording, call), output, zeroing, targets)
    members = group_members(call, zeroing)
    scores = empty_map(call, zeroing, members)
    replay = kind(recording, call)
    if choose:
        replay.choose(output)
    replay.check_examples_apart(output)
    count = members.shape[1]
    copies = max(1, chunk_rows(recording, output) // output.shape[1])
    copies = copies if zeroing.at_most is None else min(copies, zeroing.at_most)
    heads = zeroed_heads(call, zeroing.heads)
    examples = targets.batch.unique().tolist()
    together = is_library_code(recording) and each_module_runs_once(recording)
    if not together and copies >= SMALLEST_CROWD:
        together = replay.copies_are_apart(examples[0], output[examples[0]])

    for example in examples:
        mine = targets.batch == example
        out, place = targets.out[mine], targets.place[mine]
        nothing = torch.zeros(1, len(heads), targets.sources.shape[1], dtype=torch.bool, device=output.device)
        in_group = torch.zeros(count, targets.sources.shape[1] + 1, dtype=torch.bool, device=output.device)
        in_group = in_group.scatter(1, members[example] % in_group.shape[1], True)[:, :-1] & targets.sources[example]
        # Seen by any row, not by the wanted alone: a layer that mixes positions hands on what their neighbours saw.
        rows = torch.arange(call.size[2], device=output.device)
        weights = zeroed_weights(call, zeroing, targets.sources, torch.full_like(rows, example), rows)
        active = (in_group & weights.ne(0).any(-1).any(0)).any(-1).nonzero().flatten()
        alone = None if together else replay.run(example, nothing)[:, out]
        for part in active.split(copies if together else 1):
            zeroed = in_group[part][:, None, :] & heads[:, None]
            if alone is None:
                # The last copy is left as it is and checked: copies may compete too, for experts of limited capacity.
                answer = replay.run(example, torch.cat([zeroed, nothing]))[:, out]
            else:
                answer = torch.cat([replay.run(example, zeroed)[:, out], alone])
            check_reproduced(answer[-1], output[example, out])
            # And some that are zeroed are to be the same each alone: one that is not may win against those that are.
            first = together and example == examples[0] and part[0] == active[0] and len(part) > 1
            for number in range(0, len(part) if first else 0, -(-len(part) // COPIES_RUN_ALONE)):
                check_reproduced(replay.run(example, zeroed[number][None])[0, out], answer[number])
            prepared = zeroing.measure.prepare(answer)
            distance = zeroing.measure.between(prepared[:-1], prepared[-1].expand_as(prepared[:-1]))
            scores[example, place[:, None], part] = distance.T.to(scores)
    return scores


def _whole_by_trial(
    recording: LayerRecord, call: AttentionRecord, output: Tensor, zeroing: Ablation, targets: TargetRows
) -> Tensor:
    """Whole sequences, the examples being along other axes: where the batch is as long as something else."""
    return _whole_sequences(recording, call, output, zeroing, targets, choose=True)


def _in_its_batch(
    recording: LayerRecord, call: AttentionRecord, output: Tensor, zeroing: Ablation, targets: TargetRows
) -> Tensor:
    """Whole sequences that run in the batch as it was: slower by the number of examples."""
    return _whole_sequences(recording, call, output, zeroing, targets, kind=BatchReplay)
