"""TODO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import scatter
from torch.utils._pytree import tree_leaves

from captum_vz._engine.capture.forward_pass import LayerResults, refuse_dropout, run_and_record, uncompiled
from captum_vz._engine.capture.hooks import layer_hooks
from captum_vz._engine.capture.interventions import ZeroValues
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.numerics.budget import budget_of
from captum_vz._engine.numerics.tensors import first_numbers, first_tensor
from captum_vz._engine.numerics.tolerance import CannotReplay, check_reproduced
from captum_vz._engine.replay.base import zeroed_heads
from captum_vz._engine.whole_model.clean_cache import CleanCache


@dataclass(frozen=True)
class _Site:
    """One run of a layer in the clean pass: where a later run zeroes values, and what came out without."""

    call: AttentionRecord  # without its tensors
    number: int  # of attention calls before it
    heads: Tensor  # bool (head,): those that lose the value
    output: Tensor | None


class ModelReplay:
    """A model's clean pass, and its runs on copies of the inputs, with values zeroed in some of its layers."""

    def __init__(self, layers: Sequence[nn.Module], device_ids: list[int] | None = None) -> None:
        self.layers = layers
        self.device_ids = device_ids
        self.memory = CleanCache(layers)
        self.sites: dict[tuple[int, torch.device], list[_Site]] = {}
        self.output: Tensor | None = None
        self.whole = True  # modules that ran before the layers may answer as a whole

    def run_clean(self, forward: Callable[[], Any], compute: Callable[[int, LayerRecord], Tensor]) -> tuple[Any, LayerResults]:
        """The clean pass: its output, and what `compute` makes of each run of a layer; it calls `zero_in` for each."""
        outputs: list[Any] = []
        with self.memory.filling():
            runs = run_and_record(lambda: outputs.append(forward()), self.layers, compute, self.device_ids)
        for module in self.memory.outermost:
            refuse_dropout(module)
        self.output = first_numbers(outputs[0])
        return outputs[0], runs

    def zero_in(self, index: int, recording: LayerRecord, call: AttentionRecord, heads: Sequence[int] | None) -> None:
        """Zero values in this attention of this run of layer `index`, in these heads (None: all)."""
        number = recording.asked_before(call)
        output = first_tensor(recording.output)
        output = None if output is None else call.batch_first(output).clone()
        bare = replace(call, values=call.values[:0], visible=None, weights=None, context=None, answer=None)
        self.sites.setdefault((index, call.values.device), []).append(
            _Site(bare, number, zeroed_heads(call, heads), output)
        )

    def fit(self) -> int:
        """How many copies the memory holds at a time."""
        device = torch.device("cpu") if self.output is None else self.output.device
        return budget_of(device).copies_bytes // max(self.memory.largest, 1)

    def run(self, forward: Callable[[], Any], zeroed: Tensor) -> Any:
        """What `forward` returns on copies, with values zeroed where `zeroed (copies, batch, in)` is True.

        In the last copy nothing may be zeroed: it has to reproduce the clean pass.

        Raises:
            AssertionError: It does not.
        """
        if self.whole:
            try:
                return self._run(forward, zeroed)
            # What ran before the layers may have answered in a form that copies do not take; then it runs itself, and
            # an error that is the model's own comes again.
            except (CannotReplay, AssertionError, RuntimeError, ValueError, LookupError, TypeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                self.whole = False
        try:
            return self._run(forward, zeroed)
        except CannotReplay as error:
            raise AssertionError(
                f"On {len(zeroed)} copies of its inputs, one of which is left as it is, the model does not compute for "
                f"that one what it computed before: {error}. So no effect could be trusted. forward_func has to treat "
                "the examples of a batch apart from each other, and without chance."
            ) from error

    def _run(self, forward: Callable[[], Any], zeroed: Tensor) -> Any:
        copies, batch = zeroed.shape[:2]
        shares = self._shares(zeroed.flatten(0, 1))
        begun: Counter[int] = Counter()
        finished: Counter[int] = Counter()

        def begin(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ZeroValuesOfLayer:
            devices = [device for number, device in self.sites if number == index]
            if len(devices) > 1:  # a replica
                devices = [x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            sites = self.sites[index, devices[0]]
            begun[id(layer)] += 1
            return ZeroValuesOfLayer(sites[min(begun[id(layer)], len(sites)) - 1], shares[devices[0]])

        def finish(index: int, zeroing: ZeroValuesOfLayer, output: Any) -> None:
            zeroing.check_asked()
            found = first_tensor(output)
            if len(zeroing.zeroed) == copies * batch:  # a replica's share need not end with a whole copy
                _check(zeroing.clean, None if found is None else zeroing.call.batch_first(found), copies)
            finished[index] += 1

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(uncompiled())
            stack.enter_context(layer_hooks(self.layers, begin, finish))
            stack.enter_context(self.memory.answering(copies, batch, self.whole))
            output = forward()
        expected: Counter[int] = Counter()
        for (index, _), sites in self.sites.items():
            expected[index] += len(sites)
        if finished != expected:
            raise CannotReplay(f"its layers ran {dict(finished)} times, not {dict(expected)}")
        _check(self.output, first_numbers(output), copies)
        return output

    def _shares(self, zeroed: Tensor) -> dict[torch.device, Tensor]:
        """What is zeroed in the examples that each device has: all of them, or a replica's share."""
        devices = {device for _, device in self.sites}
        if len(self.sites) > len(self.layers) and self.device_ids:
            return {share.device: share for share in scatter(zeroed, self.device_ids)}
        return {device: zeroed.to(device) for device in devices}


class ZeroValuesOfLayer(ZeroValues):
    """Zeroes values in one run of a layer on copies."""

    def __init__(self, site: _Site, zeroed: Tensor) -> None:
        super().__init__(site.call, site.number, zeroed[:, None, :] & site.heads[:, None])
        self.clean = site.output


def _check(clean: Tensor | None, found: Tensor | None, copies: int) -> None:
    if clean is None or found is None or found.shape != (copies * len(clean), *clean.shape[1:]):
        shapes = ["no tensor" if one is None else tuple(one.shape) for one in (found, clean)]
        raise CannotReplay(f"it returned {shapes[0]} where it returned {shapes[1]}")
    # Some models hide classes behind an infinity. One number an example may be a difference of large ones, whose own
    # size does not tell how far it can be trusted: it is compared with 1.
    clean, found = (x.nan_to_num(neginf=0, posinf=0).reshape(len(x), -1) for x in (clean, found[-len(clean) :]))
    one = torch.ones_like(clean[:, :1])
    check_reproduced(torch.cat([found, one], 1), torch.cat([clean, one], 1))
