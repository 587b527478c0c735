"""The explained numbers of a model with one group of sources zeroed, on copies that share a run, or alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import ModelReplay, is_reproduced
from captum_vz._private import NullProgress, progress
from captum_vz.attr._base.captum import in_steps
from captum_vz.attr._call.output import Question
from captum_vz.errors import RefusedError


@dataclass(frozen=True)
class ZeroedNumbers:
    """The numbers of a model that lost some values.

    Attributes:
        model: The model after its clean pass.
        forward: Returns the user's call for these examples of the batch.
        question: Which numbers of an output are explained.
        members: The group of each source, `(batch, in)`.
        order: The groups of each example, `(batch, column)`.
        clean: The numbers of the clean pass, `(batch,)`.
        dtype: The least precise dtype that numbers of the model are rounded to.
    """

    model: ModelReplay
    forward: Callable[[Sequence[int]], Callable[[], Any]]
    question: Question
    members: Tensor
    order: Tensor
    clean: Tensor
    dtype: torch.dtype

    def effects(self, at_most: int, title: str | None) -> tuple[Tensor, str | None]:
        """How much the numbers fall for each group, `(batch, column)`, and a warning if memory was short.

        `at_most` groups are zeroed in one run, on copies of the batch, which must not affect each other.
        """
        return self._in_steps(self._on_copies, at_most, title)

    def effects_alone(self, title: str | None) -> Tensor:
        """The same of a model whose examples may affect each other: one run for each example and group.

        RefusedError: The model does not repeat its output. Or an example alone has another number than in the batch.
        """
        batch = len(self.members)
        self.model.run(self.forward(range(batch)), torch.zeros_like(self.members, dtype=torch.bool)[None])
        clean = torch.stack([self._alone(example, None) for example in range(batch)])
        self.check_apart(clean)

        def run(column: int, _: int) -> Tensor:
            return (clean - torch.stack([self._alone(example, column) for example in range(batch)]))[:, None]

        return self._in_steps(run, 1, title)[0]

    def check_apart(self, alone: Tensor) -> None:
        """Check that the examples have the numbers of the clean pass without each other too, `(batch,)`.

        RefusedError: they have others.
        """
        for example, (found, expected) in enumerate(zip(alone.to(self.clean), self.clean, strict=True)):
            # A number may be a difference of large numbers, whose own size does not bound its error.
            pair = (torch.stack([x, torch.ones_like(x)])[None].to(self.dtype) for x in (found, expected))
            if not is_reproduced(*pair):
                raise RefusedError(
                    f"The output at target is {found.item():.6g} for example {example} if no other example is in its "
                    f"batch, and {expected.item():.6g} in the whole batch. So the examples of a batch affect each "
                    "other: an early exit, a norm, a scale or a router sees all of them. Pass one example at a time."
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

    def _on_copies(self, start: int, stop: int) -> Tensor:
        zeroed = self.members == self.order.T[start:stop, :, None]
        zeroed = torch.cat([zeroed, torch.zeros_like(zeroed[:1])])
        copies, batch = zeroed.shape[:2]
        examples = [*range(batch)] * copies
        output = self.model.run(self.forward(examples), zeroed)
        numbers = self.question.read_each(output, examples, batch).detach().unflatten(0, (copies, batch))
        return (numbers[-1] - numbers[:-1]).T

    def _alone(self, example: int, column: int | None) -> Tensor:
        """The number `()` of one example that runs alone, with one of its groups zeroed (None: no group)."""
        zeroed = torch.zeros_like(self.members[:1], dtype=torch.bool)
        if column is not None:
            zeroed = self.members[example : example + 1] == self.order[example, column]
        output = self.model.run(self.forward([example]), zeroed[None], alone=example)
        return self.question.read_each(output, [example], len(self.members))[0].detach()
