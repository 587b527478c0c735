"""Whole sequences: copies of one example run through the layer, each with other values of its attention zeroed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from captum_vz._engine.capture.interventions import ContextHandler, ScaleNoise, ZeroValues
from captum_vz._engine.numerics.matmul import OneDnnLinears
from captum_vz._engine.numerics.perturbation import PROBE_STRENGTHS, SMALL_STRENGTHS
from captum_vz._engine.numerics.tolerance import CannotReplayError, check_reproduced, is_reproduced
from captum_vz._engine.replay.base import ReplayChunk, ReplayProblem, zeroed_weights
from captum_vz._engine.replay.trust import is_independent, run_with_noise
from captum_vz._engine.structure.dependence import values_depend_on_own_position
from captum_vz._private import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from captum_vz._engine.structure.site import AttentionSite

# In place of an axis: the first one, on which each example has its heads one after the other (BLOOM's biases, WavLM).
HEADS = -1
# How many readings of a layer's arguments are tried at most.
TRIALS = 64
# The number of noisy copies in the test of independence, and the number of all copies of that run.
CROWD_SIZE = 12
SMALLEST_CROWD = CROWD_SIZE + 2 * len(SMALL_STRENGTHS)
# How many copies of the first chunk run alone as well.
COPIES_RUN_ALONE = 4


class SequenceReplay:
    """Runs copies of one example at a time, with one group zeroed in each copy.

    Attributes:
        search_axes: Whether the axes along which arguments hold examples are found by running the layer. Otherwise
            the length of an axis decides. Another axis may have the same length.
    """

    def __init__(self, search_axes: bool = False) -> None:
        self.search_axes = search_axes
        self.name = "whole sequences, axes by trial" if search_axes else "whole sequences"

    def fits(self, problem: ReplayProblem) -> bool:
        if problem.site.windows is not None:
            return False
        return not self.search_axes or any(len(axes) > 1 for axes in ExampleCopies(problem.site).possible_axes)

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        site = problem.site
        # The axis of the tokens is chosen by its length. Packed pairs fail for a wrong axis. Whole sequences do not, so
        # the values are tested here.
        several = site.streams is not None and site.streams.count > 1
        if several and not values_depend_on_own_position(site.runner(), site.attention):
            raise CannotReplayError(
                "its tokens have several vectors each, and a value does not depend on its own token alone"
            )
        if site.is_reordered():
            raise CannotReplayError("its attention sees its tokens in another order")
        copies = ExampleCopies(site)
        if self.search_axes:
            copies.search_axes(problem.output)
        copies.check_examples_independent(problem.output)
        examples = problem.targets.batch.unique().tolist()
        count = max(1, problem.chunk_rows // problem.output.shape[1])
        count = count if problem.ablation.max_groups is None else min(count, problem.ablation.max_groups)
        independent = problem.independent
        if not independent and count >= SMALLEST_CROWD:
            count = SMALLEST_CROWD  # no run may be larger than the one that is tested
            independent = copies.are_independent(examples[0], problem.output[examples[0]])
        for example in examples:
            yield from self._example(problem, copies, example, count, independent, first=example == examples[0])

    def _example(
        self, problem: ReplayProblem, copies: ExampleCopies, example: int, count: int, independent: bool, first: bool
    ) -> Iterator[ReplayChunk]:
        """The chunks of one example, `count` copies at a time. If copies are not independent, each runs alone."""
        target = (problem.targets.batch == example).nonzero().flatten()
        out, clean = problem.targets.out[target], problem.output[example]
        sources, members = problem.site.shape.sources, problem.members[example]
        belongs = torch.zeros(len(members), sources + 1, dtype=torch.bool, device=members.device)  # (group, in)
        in_group = belongs.scatter(1, members % (sources + 1), True)[:, :-1] & problem.site.source_mask[example]
        nothing = torch.zeros(1, *problem.heads.shape, sources, dtype=torch.bool, device=clean.device)
        # All rows count, not only the wanted ones. In a layer that mixes positions, a wanted row depends on what other
        # rows attend to.
        rows = torch.arange(problem.site.shape.out, device=clean.device)
        weights = zeroed_weights(problem.site, problem.heads, torch.full_like(rows, example), rows)
        active = (in_group & weights.ne(0).any(-1).any(0)).any(-1).nonzero().flatten()
        unchanged = None if independent else copies.run(example, nothing)[:, out]
        for number, groups in enumerate(active.split(count if independent else 1)):
            zeroed = in_group[groups][:, None, :] & problem.heads[:, None]
            if unchanged is None:
                # The last copy is unchanged, and checked. Copies may compete, for experts of limited capacity.
                answer = copies.run(example, torch.cat([zeroed, nothing]))[:, out]
            else:
                answer = torch.cat([copies.run(example, zeroed)[:, out], unchanged])
            check_reproduced(answer[-1], clean[out])
            # Some copies run alone as well: capacity shared between copies would change their output.
            together = independent and first and not number and len(groups) > 1
            for one in range(0, len(groups) if together else 0, -(-len(groups) // COPIES_RUN_ALONE)):
                check_reproduced(copies.run(example, zeroed[one][None])[0, out], answer[one])
            yield ReplayChunk(
                target.repeat(len(groups)),
                groups.repeat_interleave(len(target)),
                answer[:-1].flatten(0, 1),
                answer[-1],
                torch.arange(len(target), device=clean.device).repeat(len(groups)),
            )
        # Twice, because what a run changes for the next may come back to what it was.
        for _ in range(0 if independent or problem.library_code else 2):
            check_reproduced(copies.run(example, nothing)[0, out], clean[out])


class ExampleCopies:
    """Runs copies of one example of the batch through a layer.

    The axis along which an argument holds examples has the length of the batch. If several axes have this length, the
    likeliest is used, until `search_axes` finds another.
    """

    def __init__(self, site: AttentionSite) -> None:
        self.attention = site.attention
        self.runner = site.runner()
        self.arguments, self.spec = tree_flatten(self.runner.arguments)
        self.possible_axes = list(map(self._axes_of_examples, self.arguments))
        self.axes = [axes[0] for axes in self.possible_axes]

    def search_axes(self, output: Tensor) -> None:
        """Find axes for which the layer returns its clean `output (batch, out, d)`, by trying.

        CannotReplayError: there are none.
        """
        # Two copies, because one copy may lie along any axis.
        shape = self.attention.shape
        nothing = torch.zeros(2, shape.heads, shape.sources, dtype=torch.bool, device=output.device)
        for axes in islice(product(*self.possible_axes), TRIALS):
            self.axes = list(axes)
            try:
                for example, clean in enumerate(output):
                    check_reproduced(self.run(example, nothing).flatten(0, 1), clean.repeat(2, 1))
                return
            except CannotReplayError:
                continue
        raise CannotReplayError("the axes along which its arguments hold examples are unknown")

    def run(self, example: int, zeroed: Tensor) -> Tensor:
        """The layer's output `(n, out, d)`, with values zeroed where `zeroed (n, head, in)` is True."""
        return self._run_copies(example, ZeroValues(self.attention, zeroed))

    def check_examples_independent(self, output: Tensor) -> None:
        """Raise CannotReplayError if an example of the batch depends on others: then none can run alone."""
        if len(output) == 1:
            return
        for strength, odd in product(PROBE_STRENGTHS, (0, 1)):
            clean = torch.arange(len(output), device=output.device) % 2 == odd
            handler = ScaleNoise(self.attention, torch.where(clean, 0, strength))
            # In memory of their own, because a layer may write into its arguments.
            arguments = [x.clone() if isinstance(x, Tensor) else x for x in self.arguments]
            answer = run_with_noise(partial(self._run, arguments, handler), strength)
            if answer is not None and not is_reproduced(answer[clean], output[clean]):
                raise CannotReplayError("an example depends on others of the batch")

    def are_independent(self, example: int, clean: Tensor) -> bool:
        """Whether copies of an example, whose output is `clean (out, d)`, do not depend on each other."""

        def run(strengths: Tensor) -> Tensor:
            return self._run_copies(example, ScaleNoise(self.attention, strengths))

        try:
            return is_independent(run, clean, CROWD_SIZE)
        except CannotReplayError:
            return False

    def _run_copies(self, example: int, handler: ContextHandler) -> Tensor:
        each = zip(self.arguments, self.axes, strict=True)
        return self._run([self._repeat(x, axis, example, handler.count) for x, axis in each], handler)

    def _run(self, arguments: list[Any], handler: ContextHandler) -> Tensor:
        output = self.runner.run(handler, tree_unflatten(arguments, self.spec), around=OneDnnLinears)
        handler.check_called()
        output = self.attention.batch_first(output)
        if output.shape[:2] != (handler.count, self.attention.shape.out):
            raise CannotReplayError(f"on {handler.count} examples it returned a tensor {tuple(output.shape)}")
        return output

    def _repeat(self, value: Any, axis: int | None, example: int, copies: int) -> Any:
        """Copies of one example of what holds examples along `axis`. None: the value as it is."""
        if axis is None:
            return value
        if axis == HEADS:
            return value.unflatten(0, (self.attention.shape.batch, -1))[example].repeat(copies, 1, 1)
        shape = list(value.shape)
        shape[axis] = copies
        copied = value.narrow(axis, example, 1).expand(shape)
        return copied.contiguous() if value.dim() == 3 else copied  # hidden states, which some layers view

    def _axes_of_examples(self, value: Any) -> list[int | None]:
        """The axes along which examples may lie, the likeliest first. None: along none."""
        if not isinstance(value, Tensor):
            return [None]
        batch, heads, out, sources = self.attention.shape
        if value.dim() == 3 and value.shape[::2] == (batch * heads, sources):
            return [HEADS]
        order = [1, 0] if self.attention.tokens_first else [0]
        if value.dim() == 2:  # masks have their examples first, wherever the layer's tokens are
            order.sort()
        if value.shape[:3] == (out, sources, batch):  # what is known of pairs (XLNet's masks, BROS' distances)
            order.insert(0 if self.attention.tokens_first else 1, 2)
        fitting = [axis for axis, length in enumerate(value.shape) if length == batch]
        likely = [axis for axis in order if axis in fitting]
        # A table of positions, or a causal mask, may be as long as the batch by coincidence.
        by_chance = [None] if batch in (heads, out, sources) or not likely else []
        return [*likely, *by_chance, *(axis for axis in fitting if axis not in likely)]
