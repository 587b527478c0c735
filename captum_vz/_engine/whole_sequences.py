"""Run copies of one example through a recorded layer, each with other values of its attention zeroed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from captum_vz._engine.interface import Attend, Listener, listening
from captum_vz._engine.noise import NOISES, QUIET, are_apart, disturbed
from captum_vz._engine.precision import without_caches
from captum_vz._engine.products import FastProducts
from captum_vz._engine.recording import AttentionCall, Recording, first_tensor
from captum_vz._engine.replay import (
    NotReproducedError,
    SameAgainError,
    bare,
    check_reproduced,
    described,
    is_reproduced,
    run_again,
)
from captum_vz._engine.weights import for_query_heads, weights_used

# In place of an axis: the first one, on which each example has its heads behind each other (BLOOM's biases, WavLM's).
HEADS = -1
# How many readings of a layer's arguments are tried at most.
TRIALS = 64
# How many copies are the crowd that others are to hear nothing of, and how many it takes with these others.
CROWD = 12
ENOUGH = CROWD + 2 * len(QUIET)


class WholeSequences:
    """Replays whole sequences: `run(example, zeroed)` answers the layer's output for n copies of one example.

    Which axis of an argument holds the examples is told by its length: the likeliest of those that are as long as the
    batch, until `choose` finds others.
    """

    def __init__(self, recording: Recording, call: AttentionCall) -> None:
        self.call = call
        self.site = recording.asked_before(call)
        self.arguments, self.spec = tree_flatten(without_caches((recording.args, recording.kwargs)))
        self.axes = [self._axes_of_examples(value)[0] for value in self.arguments]
        self.layer = bare(recording.layer)

    def choose(self, output: Tensor) -> None:
        """Find the axes for which the layer returns its clean `output (batch, out, d)`, by trying.

        Raises:
            NotReproducedError: There are none, or there is nothing to choose from.
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
            except NotReproducedError:
                continue
        raise NotReproducedError("which of its arguments' axes the examples lie along cannot be told")

    def run(self, example: int, zeroed: Tensor) -> Tensor:
        """The layer's output `(n, out, d)`, values zeroed where `zeroed (n, head, in)` is True."""
        return self._on_copies(example, ZeroingCopies(self.call, self.site, zeroed))

    def check_examples_apart(self, output: Tensor) -> None:
        """Raise NotReproducedError if an example of the batch hears others: then none can be run by itself."""
        if len(output) == 1:
            return
        for noise, odd in product(NOISES, (0, 1)):
            quiet = torch.arange(len(output), device=output.device) % 2 == odd
            strengths = torch.where(quiet, 0, noise)
            answer = self._in_batch(DisturbedCopies(self.call, self.site, strengths))
            if not is_reproduced(answer[quiet], output[quiet]):
                raise NotReproducedError("what becomes of an example depends on others of the batch")

    def copies_are_apart(self, example: int, clean: Tensor) -> bool:
        """Whether copies of an example, whose output is `clean (out, d)`, hear nothing of each other."""

        def run(strengths: Tensor) -> Tensor:
            return self._on_copies(example, DisturbedCopies(self.call, self.site, strengths))

        try:
            return are_apart(run, clean, CROWD)
        except NotReproducedError:
            return False

    def _on_copies(self, example: int, copies: Copies) -> Tensor:
        each = zip(self.arguments, self.axes, strict=True)
        return self._run([self._repeat(x, axis, example, copies.count) for x, axis in each], copies)

    def _in_batch(self, copies: Copies) -> Tensor:
        # In memory of their own, for a layer may write into what it is given.
        return self._run([x.clone() if isinstance(x, Tensor) else x for x in self.arguments], copies)

    def _run(self, arguments: list[Any], copies: Copies) -> Tensor:
        args, kwargs = tree_unflatten(arguments, self.spec)
        with listening(copies), FastProducts():
            output = first_tensor(run_again(self.layer, args, kwargs))
        copies.check_asked()
        if output is None or self.call.batch_first(output).shape[:2] != (copies.count, self.call.size[2]):
            raise NotReproducedError(f"on {copies.count} examples it returned {described(output)}")
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


class InItsBatch(WholeSequences):
    """The same for layers that run no example by itself: the batch as it was, with values of one example zeroed."""

    def run(self, example: int, zeroed: Tensor) -> Tensor:
        """See :meth:`WholeSequences.run`; no other example may hear of what is zeroed in this one."""
        answers = []
        for one in zeroed:
            answer = self._with_zeroed({example: one})
            others = torch.arange(len(answer), device=answer.device) != example
            if not is_reproduced(answer[others], self._clean[others]):
                raise NotReproducedError("what is zeroed in one example changes another")
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
        return self._in_batch(ZeroingCopies(self.call, self.site, values))


class Copies(Listener):
    """Changes what one attention of a layer answers, in each of `count` copies otherwise."""

    def __init__(self, call: AttentionCall, site: int, count: int) -> None:
        self.call = call
        self.site = site
        self.count = count
        self.attentions = 0
        self.times = 0

    def check_asked(self) -> None:
        if self.times != self.call.parts:
            raise NotReproducedError(f"the values of its attention were asked for {self.times} times in one run")

    def attend(
        self, module: nn.Module | None, attend: Attend, values: Tensor, visible: Tensor | None, dropout: float
    ) -> tuple[Tensor, Tensor]:
        context, weights = attend(values)
        self.attentions += 1
        first, last = self.site + 1, self.site + self.call.parts
        if self.call.value_projection is not None or not first <= self.attentions <= last:
            return context, weights
        self.times += 1
        used = weights_used(self.call.module, attend, values, context, weights)
        # In the memory format of the context, for a module may take a view of it.
        return torch.empty_like(context).copy_(self.changed(context, used, values)), weights

    def returned(self, module: nn.Module | nn.Parameter, inputs: tuple[Any, ...], output: Any) -> Any:
        if not self.call.projects(module):
            return None
        self.times += 1
        projected = first_tensor(output)
        assert projected is not None  # it was one in the clean pass
        projected = projected.clone()
        self.change(projected.transpose(0, 1) if self.call.transposed else self.call.batch_first(projected))
        return projected if isinstance(output, Tensor) else (projected, *output[1:])

    @abstractmethod
    def changed(self, context: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        """What stands for the context `(copies, out, ...)`, of values `(copies, key-value head, in, d_head)`."""

    @abstractmethod
    def change(self, values: Tensor) -> None:
        """Write into what an inline attention's values are projected to, `(copies, in, features)`."""


class ZeroingCopies(Copies):
    """Computes one attention of a layer with a different set of values zeroed in each copy."""

    def __init__(self, call: AttentionCall, site: int, zeroed: Tensor) -> None:
        super().__init__(call, site, len(zeroed))
        self.zeroed = zeroed

    def changed(self, context: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        # Summed over the others: the context less what is lost would be rounding where nearly all of it is.
        left = (weights * ~self.zeroed[:, :, None]) @ for_query_heads(values, weights.shape[1])
        return left.transpose(1, 2).reshape(context.shape)

    def change(self, values: Tensor) -> None:
        for head, columns in enumerate(self.call.value_columns):
            zeroed = self.zeroed[:, head, :, None]
            sharing = [self.zeroed[:, other] for other, same in enumerate(self.call.value_columns) if same == columns]
            if any(not torch.equal(other, sharing[0]) for other in sharing):
                raise NotReproducedError("its heads share their values, which cannot be zeroed for some of them alone")
            zero = self.call.zero if isinstance(self.call.zero, float) else self.call.zero[head]
            values[..., columns] = torch.where(zeroed, zero, values[..., columns])


class DisturbedCopies(Copies):
    """Puts noise in the place of what an attention answers, in each copy so many times as large; 0: in this not."""

    def __init__(self, call: AttentionCall, site: int, strengths: Tensor) -> None:
        super().__init__(call, site, len(strengths))
        self.strengths = strengths

    def changed(self, context: Tensor, weights: Tensor, values: Tensor) -> Tensor:
        return disturbed(context, self.strengths)

    def change(self, values: Tensor) -> None:
        values.copy_(disturbed(values, self.strengths))
