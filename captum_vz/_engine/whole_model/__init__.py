"""The whole model once more: on copies of its inputs with other values zeroed in each, or with gates on values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.forward_pass import LayerPass, LayerResults, check_no_dropout, layer_hooks
from captum_vz._engine.capture.interventions import Intervene
from captum_vz._engine.capture.layer_runner import LAYER_ERRORS
from captum_vz._engine.numerics import budget_of, first_numbers, first_tensor, is_out_of_memory, once_a_pass
from captum_vz._engine.numerics.tolerance import CannotReplayError, check_reproduced
from captum_vz._engine.replay import ZERO, zeroed_heads
from captum_vz._engine.replay.unknown_code import check_unknown_code
from captum_vz._engine.taps.changes import Changes, undoing
from captum_vz._engine.taps.handler import AttentionCall, AttentionHandler
from captum_vz._engine.taps.projection import attach_to_named
from captum_vz._engine.whole_model.cache import CleanCache
from captum_vz.errors import RefusedError
from captum_vz.functional.interventions import Intervention, ZeroValue, values_after

if TYPE_CHECKING:
    from captum_vz._engine.capture import AttentionRecord, LayerRecord
    from captum_vz._engine.numerics import Weights
    from captum_vz._engine.structure import AttentionSite
    from captum_vz._engine.taps.projection import ValueProjection


# So many copies share what one run of all modules costs, and the copy with no value zeroed, even outside of the cache.
LEAST_COPIES = 9


@dataclass(frozen=True)
class RecordedRun:
    """One run of a layer in the clean pass."""

    index: int
    number: int  # how often the layer ran before
    attention: AttentionRecord  # the attention in which values are zeroed, without its tensors
    heads: Tensor  # the heads that lose their values, bool `(head,)`
    output: Tensor  # what the layer returned, `(batch, out, d)`
    real: Tensor  # which sources are no padding, `(batch, in)`
    of_all_heads: bool  # whether all heads lose their values


class ModelReplay:
    """A model's clean pass, and its runs on copies of the inputs, with values zeroed in some of its layers."""

    # Which sources any token sees, `(batch, in)`, in the first run of the first layer. None: it need not be the same.
    seen: Tensor | None = None

    def __init__(
        self, layers: Sequence[nn.Module], given: Sequence[ValueProjection] = (), intervention: Intervention = ZERO
    ) -> None:
        self.layers = layers
        self.intervention = intervention
        self.given = given
        self._cache = CleanCache(layers)
        self._runs: dict[int, list[RecordedRun]] = {}  # by the index of the layer
        self._output: Tensor | None = None
        self._all_runs = True  # whether values are zeroed in each run of the layers
        self._answers_whole = True  # modules that ran before the layers may be answered as a whole

    def run_clean(
        self, forward: Callable[[], Any], compute: Callable[[LayerRecord], Tensor], chosen: Any = None
    ) -> tuple[Any, LayerResults]:
        """The clean pass: its output, and what `compute` makes of each record. `compute` calls `zero_in`.

        `chosen` holds the numbers of the runs of each layer that are recorded. None: all.
        """
        self._all_runs = chosen is None
        this = LayerPass(self.layers, compute, given=self.given, chosen=chosen)
        with undoing() as changes:
            self._cache.fill(changes)
            output = this.run(forward)
        for module in self._cache.outermost:
            check_no_dropout(module)
        self._output = first_numbers(output)
        return output, this.results

    def zero_in(self, site: AttentionSite, heads: tuple[int, ...] | None) -> None:
        """Zero values in this run of this attention, in these heads (None: all)."""
        check_unknown_code(site)
        attention, device = site.attention, site.attention.values.device
        output = attention.batch_first(site.layer.first_output).clone()
        bare = replace(attention, values=attention.values[:0], visible=None, weights=None, context=None, output=None)
        zeroed = once_a_pass(zeroed_heads, site.shape.heads, heads, device)
        run = RecordedRun(site.layer.index, site.layer.number, bare, zeroed, output, site.source_mask, heads is None)
        self._runs.setdefault(run.index, []).append(run)

    @property
    def recorded(self) -> list[RecordedRun]:
        """All runs of layers in which values are zeroed."""
        return [run for runs in self._runs.values() for run in runs]

    @property
    def only_module(self) -> nn.Module | None:
        """The module that ran, if it ran once, and no other module ran outside of it."""
        return self._cache.outermost[0] if len(self._cache.outermost) == 1 else None

    def copies_that_fit(self) -> int:
        """How many copies run at a time: as many as fit into memory, and at best into a cache."""
        device = torch.device("cpu") if self._output is None else self._output.device
        budget, bytes_of_copy = budget_of(device), max(self._cache.largest, 1)
        return min(budget.copies_bytes // bytes_of_copy, max(LEAST_COPIES, budget.chunk_bytes // bytes_of_copy))

    def run(
        self, forward: Callable[[], Any], zeroed: Tensor, alone: int | None = None, rows: Tensor | None = None
    ) -> Any:
        """What `forward` returns on copies, with values zeroed where `zeroed (copies, batch, in)` is True.

        `zeroed (copies, batch, layer, in)` says this for each layer. With `rows (batch,)`, only this output token of
        each example is not given the values: the other tokens keep their contexts.

        In the last copy nothing may be zeroed: it must reproduce the clean pass. RefusedError: it does not. With
        `alone`, `forward` runs on this example only. Nothing is reproduced then: the model may run a layer more often
        than in the clean pass, or less often.
        """
        try:
            return self._run(forward, zeroed, alone, rows)
        except (CannotReplayError, AssertionError, *LAYER_ERRORS) as error:
            if is_out_of_memory(error):
                raise
            # A module before the layers may have returned what cannot be repeated for copies. Then it runs again, and
            # an error of the model's own is raised again.
            if self._answers_whole:
                self._answers_whole = False
                return self.run(forward, zeroed, alone, rows)
            if isinstance(error, AssertionError):
                raise
            if isinstance(error, CannotReplayError):
                advice = "Pass" if zeroed.shape[1] == 1 else "Pass one example at a time, or"
                raise RefusedError(
                    f"The model ran on {len(zeroed)} copies of its inputs, and the unchanged copy gave another output "
                    f"than the first run: {error}. {advice} a forward_func that treats the examples of a batch "
                    "independently, uses no random numbers, and changes no state from call to call."
                ) from error
            ran_on = "one example alone" if alone is not None else f"{len(zeroed)} copies of its inputs"
            raise RefusedError(
                f"forward_func fails on {ran_on} ({type(error).__name__}: {error}). If it "
                "holds a tensor with one entry for each example, pass this tensor in inputs or "
                "additional_forward_args, so that it is repeated. If it holds a key-value cache, pass the whole "
                "sequence instead."
            ) from error

    def _run(self, forward: Callable[[], Any], zeroed: Tensor, alone: int | None, rows: Tensor | None) -> Any:
        copies, batch = zeroed.shape[:2]
        own = slice(None) if alone is None else slice(alone, alone + 1)
        examples = batch if alone is None else max(len(one.real) for one in self.recorded)

        def answer(changes: Changes) -> None:
            torch.set_grad_enabled(False)  # until the end of the pass, which puts it back
            self._cache.answer(changes, copies, examples, self._answers_whole, alone)

        # What ran before the layers may have as many rows as there are examples, and not be theirs.
        checked = alone is None or (self._answers_whole and not zeroed.any())
        changed = zeroed.flatten(0, 1)
        output = self.run_handled(forward, changed, copies * checked, own, rows, answer, alone is not None)
        if alone is None:
            check_last_copy(self._output, first_numbers(output), copies)
        return output

    def run_handled(
        self,
        forward: Callable[[], Any],
        changed: Tensor,
        copies: int,
        examples: slice | Tensor = slice(None),
        rows: Tensor | None = None,
        answer: Callable[[Changes], None] = lambda changes: None,
        alone: bool = False,
    ) -> Any:
        """What `forward` returns with values changed in each recorded run of a layer. See `RunHandler`.

        The last of `copies` of each layer's output must be that of the clean pass. 0: it need not. `answer` is called
        before `forward`. With `alone`, one example runs, for which layers may run more often or less often.
        CannotReplayError: else they do.
        """
        begun: Counter[int] = Counter()
        finished: Counter[int] = Counter()

        def begin(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionHandler:
            number, begun[id(layer)] = begun[id(layer)], begun[id(layer)] + 1
            recorded = self._runs[index]
            further = recorded[-1] if alone and self._all_runs else None
            of_run = next((one for one in recorded if one.number == number), further)
            if of_run is None and self._all_runs:
                raise CannotReplayError(f"layer {index} runs more than {number} times")
            if of_run is None:
                return AttentionHandler()
            seen = self.seen if (index, number) == (0, 0) else None
            return RunHandler(of_run, changed, self.intervention.in_run(index, number), examples, rows, seen)

        def end(handler: AttentionHandler, arguments: Any, output: Any, hooks: Any) -> None:
            if not isinstance(handler, RunHandler):
                return
            handler.check_called()
            run, found = handler.of_run, first_tensor(output)
            found = None if found is None else handler.attention.batch_first(found)
            if alone and (found is None or len(found) != 1):
                raise CannotReplayError(f"layer {run.index} returned more than one example")
            if copies:
                check_last_copy(_of(run.output, examples), found, copies)
            finished[run.index] += 1

        with undoing() as changes:
            attach_to_named(self.layers, self.given, changes)
            with layer_hooks(self.layers, begin, end):
                answer(changes)
                output = forward()
        expected = Counter({index: len(runs) for index, runs in self._runs.items()})
        if finished != expected and not alone:
            raise CannotReplayError(f"its layers ran {dict(finished)} times, not {dict(expected)}")
        return output


class RunHandler(Intervene):
    """Changes values in one run of a layer, in some `examples` of the clean pass, or in copies of them one by one.

    `changed (n, in)`, or `(n, layer, in)`, says which values are zeroed, or holds their gates. With `rows (batch,)`,
    only this output token of each example is given other values. `seen` are the sources that any token must see.
    """

    def __init__(
        self,
        run: RecordedRun,
        changed: Tensor,
        intervention: Intervention,
        examples: slice | Tensor,
        rows: Tensor | None,
        seen: Tensor | None,
    ) -> None:
        changed, heads = changed.to(run.real.device), run.heads[:, None]
        own = (changed if changed.dim() == 2 else changed[:, run.index])[:, None]
        by_head = own & heads if own.dtype == torch.bool else torch.where(heads, own, 1)
        real, self.seen = (_of(run.real, examples), None if seen is None else _of(seen, examples))
        super().__init__(run.attention, by_head, intervention, real.repeat(len(changed) // len(real), 1))
        self.of_run = run
        self.rows = None if rows is None else rows.to(changed.device).repeat(len(changed) // len(rows))
        self.is_idle = changed.dim() == 3 and not own.any()

    def change_call(self, call: AttentionCall) -> tuple[Tensor, Weights | None]:
        if self.seen is not None and call.obeys_mask:
            seen = torch.ones_like(self.seen) if call.visible is None else call.visible.any(1).any(1)
            if not torch.equal(seen.expand_as(self.seen), self.seen):
                raise CannotReplayError("its mask hides other tokens than in the clean pass")
        if self.is_idle:
            return call.compute(call.values)
        plain = type(self.intervention) is ZeroValue and self.zeroed.dtype == torch.bool and self.rows is None
        if not (plain and call.explained and self.of_run.of_all_heads):
            return super().change_call(call)
        # One product of the weights in the place of two. Numbers are the same: 0 times a weight, or a value times 0.
        return call.compute(call.values.masked_fill(self.zeroed[:, :1, :, None], 0))

    def new_context(self, context: Tensor, weights: Weights, values: Tensor) -> Tensor:
        changed = super().new_context(context, weights, values)
        if self.rows is None:
            return changed
        by_token, clean = (one.reshape(len(self.rows), self.of_run.output.shape[1], -1) for one in (changed, context))
        at_row = torch.arange(clean.shape[1], device=clean.device) == self.rows[:, None]
        return torch.where(at_row[..., None], by_token, clean).reshape(context.shape)

    def change_values(self, values: Tensor) -> None:
        if self.attention.inline is not None:
            gates = self.zeroed
            changed = self.of_run.heads[:, None] & ((gates != 1) | gates.requires_grad)
            new = partial(values_after, self.intervention, zeroed=gates, real=self.real)
            self.attention.inline.change(values, gates if gates.dtype == torch.bool else changed, new)


def _of(x: Tensor, examples: slice | Tensor) -> Tensor:
    return x[examples] if isinstance(examples, slice) else x[examples.to(x.device)]


def check_last_copy(clean: Tensor | None, found: Tensor | None, copies: int) -> None:
    """Raise CannotReplayError unless the last of the copies in `found` holds the numbers of the clean pass."""
    if clean is None or found is None or found.shape != (copies * len(clean), *clean.shape[1:]):
        shapes = ["no tensor" if one is None else tuple(one.shape) for one in (found, clean)]
        raise CannotReplayError(f"for {copies} copies it returned {shapes[0]}, and {shapes[1]} for the inputs alone")
    # Some models hide classes by an infinity. One number an example may be a difference of large numbers, whose own
    # size does not bound its error: it is compared with 1.
    clean, found = (x.nan_to_num(neginf=0, posinf=0).reshape(len(x), -1) for x in (clean, found[-len(clean) :]))
    one = torch.ones_like(clean[:, :1])
    check_reproduced(torch.cat([found, one], 1), torch.cat([clean, one], 1))


class ModelGates(ModelReplay):
    """A model whose clean pass is known, and its runs with gated values. A gate of 1 leaves a value, 0 zeroes it."""

    @property
    def outermost(self) -> Sequence[nn.Module]:
        """The modules that the clean pass called, without the modules inside them."""
        return self._cache.outermost

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
                output = self.run_handled(forward, torch.ones(tokens.shape, device=tokens.device), copies=1)
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
            return self.run_handled(forward, gates, 0, slice(None) if rows is None else rows)
        except CannotReplayError as error:
            raise RefusedError(
                f"The model cannot run with gated values: {error}. Pass a forward_func that runs the same layers for "
                "any values of their attention."
            ) from error
