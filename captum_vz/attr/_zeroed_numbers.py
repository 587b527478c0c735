"""The explained numbers of a model with one group of sources zeroed, on copies that share a run, or alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import ModelReplay, Reads, is_reproduced
from captum_vz._private import NullProgress, progress
from captum_vz.attr._base.captum import in_steps
from captum_vz.errors import RefusedError

UNSURE = (
    "the model's own code reads numbers out of its tensors, so it may decide once for all examples of a batch. A few "
    "effects were compared with runs of one example, and agree. To be sure of all, pass one example at a time"
)


@dataclass(frozen=True)
class ZeroedNumbers:
    """The numbers of a model that lost some values.

    Attributes:
        model: The model after its clean pass.
        forward: Returns the user's call for these examples of the batch.
        read: `read(output, copies=copies)` is the explained numbers of an output, `(copies * batch,)`.
        members: The group of each source, `(batch, in)`.
        order: The groups of each example, `(batch, column)`.
        clean: The numbers of the clean pass, `(batch,)`.
    """

    model: ModelReplay
    forward: Callable[[Sequence[int]], Callable[[], Any]]
    read: Callable[..., Tensor]
    members: Tensor
    order: Tensor
    clean: Tensor

    def effects(self, at_most: int, title: str | None, checked: torch.dtype | None) -> tuple[Tensor, str | None]:
        """How much the numbers fall for each group, `(batch, column)`, and a warning.

        Args:
            at_most: How many groups are zeroed in one run.
            title: The title of a progress bar. None: no bar.
            checked: The least precise dtype in a model whose copies may affect each other. A few groups then run alone
                too. None: copies are known not to affect each other.
        """
        batch, columns = self.order.shape
        shared, reads = None, Reads(self.model.begun)
        try:
            run = partial(self._on_copies, None if checked is None else reads)
            shared, note = self._in_steps(run, at_most, title)
            if checked is None:
                return shared, note
            if batch > 1 or not reads.found:
                difference = self._difference(shared, checked)
                twice = self.forward([*range(batch)] * 2)
                if difference is None and not reads.found and not self.model.keeps_apart(twice, self.members):
                    difference = "another one beside a copy of the inputs whose values are large"
                if difference is None:
                    return shared, UNSURE if reads.found else note
            if batch > 1:
                raise RefusedError(
                    f"The output at target is {difference}. So the examples of a batch affect each other: an early "
                    "exit, a norm, a scale or a router sees all of them. Pass one example at a time."
                )
        except AssertionError:
            if batch > 1 or not self._is_repeatable():
                raise
        effects, _ = self._in_steps(lambda start, _: (self.clean - self._alone(0, start))[:, None], 1, title)
        if shared is not None and checked is not None and self._agree(effects[0], shared[0], checked):
            return effects, note
        return effects, (
            "copies of the example cannot share a batch, because they fail or affect each other. So the model ran "
            f"{columns} times more, once for each source"
        )

    def _in_steps(
        self, run: Callable[[int, int], Tensor], at_most: int, title: str | None
    ) -> tuple[Tensor, str | None]:
        """The effects `run(start, stop) (batch, column)` of all columns, and a warning if memory was short."""
        found, count = [], self.order.shape[1]
        steps = -(-count // at_most)
        with NullProgress() if title is None else progress(desc=title, total=steps) as bar:

            def step(start: int, stop: int) -> None:
                found.append(run(start, stop))
                bar.update()

            note = in_steps(step, count, at_most)
        return torch.cat(found, 1), note

    def _on_copies(self, reads: Reads | None, start: int, stop: int) -> Tensor:
        zeroed = self.members == self.order.T[start:stop, :, None]
        zeroed = torch.cat([zeroed, torch.zeros_like(zeroed[:1])])
        forward = self.forward([*range(zeroed.shape[1])] * len(zeroed))

        def run() -> Any:
            with nullcontext() if reads is None else reads.watching():
                return forward()

        read = partial(self.read, self.model.run(run, zeroed), copies=len(zeroed))
        numbers = (read() if reads is None else reads.during(read)).unflatten(0, zeroed.shape[:2])
        return (numbers[-1] - numbers[:-1]).T

    def _alone(self, example: int, column: int | None) -> Tensor:
        """The number `(1,)` of one example that runs alone, with one of its groups zeroed (None: no group).

        The batch holds the example as often as it held examples, because `target` may be a function that counts them.
        """
        batch = len(self.members)
        zeroed = torch.zeros_like(self.members, dtype=torch.bool)
        if column is not None:
            zeroed[:] = self.members[example] == self.order[example, column]
        output = self.model.run(self.forward([example] * batch), zeroed[None], alone=example)
        return self.read(output, copies=1)[example : example + 1]

    def _is_repeatable(self) -> bool:
        """Whether the model gives the same output if it runs a second time on its inputs."""
        nothing = torch.zeros_like(self.members, dtype=torch.bool)
        try:
            self.model.run(self.forward(range(len(nothing))), nothing[None])
        except AssertionError:
            return False
        return True

    def _difference(self, effects: Tensor, dtype: torch.dtype) -> str | None:
        """In which numbers a run alone differs from the copies that gave `effects`. None: in none.

        Compared are the groups with the largest and the smallest effect, one between them, and their examples.
        """
        ordered = effects.flatten().argsort(descending=True).tolist()
        zeroed = [divmod(place, effects.shape[1]) for place in (ordered[0], ordered[-1], ordered[len(ordered) // 2])]
        places: list[tuple[int, int | None]] = [*zeroed]
        if len(effects) > 1:
            places += [(example, None) for example, _ in zeroed]
        for example, column in dict.fromkeys(places):
            found, expected = self._alone(example, column), self.clean[example : example + 1].to(effects)
            if column is not None:
                expected = expected - effects[example, column]
            if not self._agree(found, expected, dtype):
                source = "nothing" if column is None else "one source"
                return (
                    f"{found.item():.6g} for example {example} with {source} zeroed if no other example is in its "
                    f"batch, and {expected.item():.6g} in the whole batch"
                )
        return None

    def _agree(self, found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
        """Whether numbers `(n,)` agree up to the rounding of a model in this dtype."""
        # A number may be a difference of large numbers, whose own size does not bound its error.
        one = torch.ones_like(expected)
        return is_reproduced(*(torch.stack([x.to(expected), one], 1).to(dtype) for x in (found, expected)))
