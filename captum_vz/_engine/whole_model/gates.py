"""The whole model, with a number for each source that scales its value: a gate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.forward_pass import check_no_dropout, layer_hooks
from captum_vz._engine.capture.interventions import Intervene
from captum_vz._engine.numerics.attention import Weights
from captum_vz._engine.numerics.tensors import first_numbers, first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.taps.changes import Changes, undoing
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._engine.taps.projection import attach_to_named
from captum_vz._engine.whole_model.replay import CleanCache, ModelReplay, RecordedRun, check_last_copy
from captum_vz._private import is_replica
from captum_vz.errors import RefusedError
from captum_vz.functional.interventions import Intervention, values_after

if TYPE_CHECKING:
    from captum_vz._engine.structure.site import AttentionSite


class ModelGates(ModelReplay):
    """A model whose clean pass is known, and its runs with gated values. A gate of 1 leaves a value, 0 zeroes it.

    Attributes:
        seen: Which sources any token sees, `(batch, in)`, in the first run of the first layer. None: it is unknown.
    """

    seen: Tensor | None = None

    def zero_in(self, site: AttentionSite, heads: tuple[int, ...] | None) -> None:
        """Gate values in this run of this attention, in these heads (None: all)."""
        super().zero_in(site, heads)
        readable = site.attention.inline is None and site.attention.calls == 1 and not is_replica(site.layer.layer)
        if readable and (site.layer.index, site.layer.number) == (0, 0):
            self.seen = site.attention.is_seen().any(1)

    def check_ones(self, forward: Callable[[], Any], tokens: Tensor) -> None:
        """Check that gates of 1 reproduce the clean pass, and forget its outputs. `tokens` is `(batch, in)`.

        RefusedError: they do not.
        """
        try:
            with torch.no_grad():
                output = self._run_gated(forward, torch.ones(tokens.shape, device=tokens.device), None, checked=True)
            check_last_copy(self._output, first_numbers(output), 1)
        except CannotReplayError as error:
            raise RefusedError(
                f"With gates of 1, the model gave another output than without gates: {error}. Pass a forward_func that "
                "uses no random numbers, and changes no state from call to call."
            ) from error
        self._output = None
        outermost = self._cache.outermost
        self._cache = CleanCache(self.layers)
        self._cache.outermost = outermost
        for place, runs in self._runs.items():
            self._runs[place] = [replace(one, output=one.output[:0]) for one in runs]

    def run_gated(self, forward: Callable[[], Any], gates: Tensor, rows: Tensor | None) -> Any:
        """What `forward` returns with gated values, in the grad mode of this thread.

        Args:
            forward: The user's call on a batch of examples.
            gates: `(batch, in)`.
            rows: Which example of the clean pass each example is, `(batch,)`. None: they are the same.

        Raises:
            RefusedError: A module has active dropout. A layer ran more or less often than in the clean pass, or called
                attention otherwise.
        """
        for module in self._cache.outermost:
            check_no_dropout(module)
        try:
            return self._run_gated(forward, gates, rows)
        except CannotReplayError as error:
            raise RefusedError(
                f"The model cannot run with gated values: {error}. Pass a forward_func that runs the same layers for "
                "any values of their attention."
            ) from error

    def _run_gated(self, forward: Callable[[], Any], gates: Tensor, rows: Tensor | None, checked: bool = False) -> Any:
        shares = self._shares(gates)
        finished: Counter[int] = Counter()
        begun: Counter[tuple[int, torch.device]] = Counter()

        def begin(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionHandler:
            device = self._device_of(index, (args, kwargs))
            number, begun[index, device] = begun[index, device], begun[index, device] + 1
            of_run = next((one for one in self._runs[index, device] if one.number == number), None)
            if of_run is None and self._all_runs:
                raise CannotReplayError(f"layer {index} runs more than {number} times")
            if of_run is None:
                return AttentionHandler()
            seen = self.seen if (of_run.index, of_run.number) == (0, 0) else None
            return _Gated(of_run, shares[device], self.intervention.in_run(index, number), rows, seen)

        def end(handler: AttentionHandler, arguments: Any, output: Any, hooks: Any) -> None:
            if not isinstance(handler, _Gated):
                return
            handler.check_called()
            finished[handler.of_run.index] += 1
            if checked:
                found = first_tensor(output)
                found = None if found is None else handler.attention.batch_first(found)
                check_last_copy(handler.of_run.output, found, 1)

        def run(changes: Changes) -> Any:
            attach_to_named(self.layers, self.given, changes)
            with layer_hooks(self.layers, begin, end):
                return forward()

        output = undoing(run)
        expected = Counter(index for (index, _), runs in self._runs.items() for _ in runs)
        if finished != expected:
            raise CannotReplayError(f"its layers ran {dict(finished)} times, not {dict(expected)}")
        return output


class _Gated(Intervene):
    """Scales the values of one run of a layer by `gates (n, in)`, in the heads that are selected."""

    def __init__(
        self, run: RecordedRun, gates: Tensor, intervention: Intervention, rows: Tensor | None, seen: Tensor | None
    ) -> None:
        real = run.real if rows is None else run.real[rows.to(run.real.device)]
        self.seen = seen if rows is None or seen is None else seen[rows.to(seen.device)]
        if len(gates) != len(real) and intervention.reads_others and not real.all():
            raise RefusedError(
                f"{type(intervention).__name__} reads all values of a sequence, but replicas of the model have parts "
                "of the batch, in which padding is unknown. Pass the module that DataParallel wraps."
            )
        by_head = torch.where(run.heads[:, None], gates[:, None], 1)
        super().__init__(run.attention, by_head, intervention, real if len(gates) == len(real) else None)
        self.of_run = run
        self.changed = run.heads[:, None] & ((by_head != 1) | by_head.requires_grad)

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        if self.seen is not None and call.obeys_mask:
            seen = torch.ones_like(self.seen) if call.visible is None else call.visible.any(1).any(1)
            if not torch.equal(seen.expand_as(self.seen), self.seen):
                raise CannotReplayError("its mask hides other tokens than in the clean pass")
        return super().change_call(call)

    def change_values(self, values: Tensor) -> None:
        if self.attention.inline is not None:
            new = partial(values_after, self.intervention, zeroed=self.zeroed, real=self.real)
            self.attention.inline.change(values, self.changed, new)
