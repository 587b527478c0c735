"""The whole model, with a number for each source that scales its value: a gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from captum_vz._engine.capture.forward_pass import check_no_dropout
from captum_vz._engine.numerics.attention import Weights
from captum_vz._engine.numerics.tensors import first_numbers
from captum_vz._engine.numerics.tolerance import CannotReplayError
from captum_vz._engine.taps.handler import AttentionCall
from captum_vz._engine.whole_model.cache import CleanCache
from captum_vz._engine.whole_model.replay import ModelReplay, RecordedRun, RunHandler, check_last_copy
from captum_vz.errors import RefusedError
from captum_vz.functional.interventions import Intervention, values_after

if TYPE_CHECKING:
    from captum_vz._engine.structure.site import AttentionSite


class ModelGates(ModelReplay):
    """A model whose clean pass is known, and its runs with gated values. A gate of 1 leaves a value, 0 zeroes it."""

    # Which sources any token sees, `(batch, in)`, in the first run of the first layer. None: it is unknown.
    seen: Tensor | None = None

    def zero_in(self, site: AttentionSite, heads: tuple[int, ...] | None) -> None:
        """Gate values in this run of this attention, in these heads (None: all)."""
        super().zero_in(site, heads)
        readable = site.attention.inline is None and site.attention.calls == 1
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

        `gates` are `(batch, in)`. `rows (batch,)` says which example of the clean pass each example is. None: the same.
        RefusedError: a module has active dropout, or a layer ran or called attention otherwise than in the clean pass.
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
        def handler(run: RecordedRun, share: Tensor, intervention: Intervention) -> RunHandler:
            return _Gated(run, share, intervention, rows, self.seen if (run.index, run.number) == (0, 0) else None)

        def check(handler: RunHandler, found: Tensor | None) -> None:
            if checked:
                check_last_copy(handler.of_run.output, found, 1)

        return self.run_handled(forward, gates, handler, check)


class _Gated(RunHandler):
    """Scales the values of one run of a layer by `gates (n, in)`, in the heads that are selected."""

    def __init__(
        self, run: RecordedRun, gates: Tensor, intervention: Intervention, rows: Tensor | None, seen: Tensor | None
    ) -> None:
        by_head = torch.where(run.heads[:, None], gates[:, None], 1)
        super().__init__(run, by_head, intervention, run.real if rows is None else run.real[rows.to(run.real.device)])
        self.seen = seen if rows is None or seen is None else seen[rows.to(seen.device)]
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
