"""The definition itself: the layer runs on its own clean input, with the values of one group of sources zeroed.

The batch and all arguments are as they were, so nothing is assumed of how they hold examples or tokens. This costs one
run of the layer for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from captum_vz._engine.capture.interventions import Intervene, ScaleNoise, SiteHandler
from captum_vz._engine.numerics.tolerance import (
    PROBE_STRENGTHS,
    CannotReplayError,
    check_reproduced,
    is_changed,
    is_reproduced,
    max_abs,
)
from captum_vz._engine.replay import ReplayChunk, ReplayProblem, run_with_noise
from captum_vz._engine.structure.dependence import values_depend_on_own_position
from captum_vz._engine.structure.layout import MANY_POSITIONS, NO_POSITION, Windows, find_sources
from captum_vz.functional.interventions import ZeroValue

if TYPE_CHECKING:
    from captum_vz._engine.capture.layer_runner import LayerRunner
    from captum_vz._engine.structure import AttentionSite

MANY_RUNS = 64  # from this number of runs of one layer on, a warning names their cost
LOUD_FACTOR = 8  # how much larger than all values a value is that no window may overlook

# How often the layer runs, and the runs, some at a time: a clean output `(batch, out, d)`, the outputs with values
# zeroed `(n, batch, out, d)`, and the group that this is for each of them, `(n, batch, out)`, or NO_POSITION.
Runs = tuple[int, Iterator[tuple[Tensor, Tensor, Tensor]]]


class DefinitionReplay:
    """Runs the batch once for each group of sources. It is right for any layer that gives the same output twice."""

    name = "definition"

    def fits(self, problem: ReplayProblem) -> bool:
        return True

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        site = problem.site
        if site.windows is None and site.is_reordered():
            # Which tokens are hidden is known in the attention's order only.
            visible = site.attention.visible
            if site.attention.causal or (visible is not None and not visible.all()):
                raise CannotReplayError("its attention sees its tokens in another order, and not all of them")
            site = site.in_windows()
            problem = replace(problem, site=site, output=site.output)
        if site.windows is not None and not isinstance(problem.intervention, ZeroValue):
            reason = "it sees its tokens in windows or in another order, where values can only be zeroed"
            raise CannotReplayError(reason)
        several = site.streams is not None and site.streams.count > 1
        if several and not values_depend_on_own_position(site.runner(), site.attention):
            raise CannotReplayError(
                "its tokens have several vectors each, and a value does not depend on its own token alone"
            )
        windows, batch, out = site.windows, problem.targets.batch, problem.targets.out
        run = partial(_run, problem, site.runner())
        plain = run if windows is None else windows.again
        whole = plain() if windows is None else windows.clean[0]
        clean = whole[batch, out]
        check_reproduced(clean, problem.clean)
        count, runs = _group_runs(problem, whole, run) if windows is None else _window_runs(problem, windows)
        if count > MANY_RUNS:
            site.layer.warnings.append(
                f"layer {site.layer.index} ({site.layer.name}) runs {count} times, once for each group of sources,"
                " as no faster replay holds for it. Pass feature_mask for fewer groups"
            )
        for own, outputs, group in runs:
            if own is not whole:
                whole, clean = own, own[batch, out]
                check_reproduced(clean, problem.clean)
            copy, target = (group[:, batch, out] != NO_POSITION).nonzero(as_tuple=True)
            rows = copy, batch[target], out[target]
            yield ReplayChunk(target, group[rows], outputs[rows], clean, target)
        if not problem.library:  # no state that the runs have changed
            check_reproduced(plain()[batch, out], problem.clean)


def _group_runs(problem: ReplayProblem, clean: Tensor, run: Callable[[Tensor], Tensor]) -> Runs:
    """One run for each group. Examples that depend on each other lose their values in runs of their own."""
    site, groups = problem.site, torch.arange(problem.targets.members.shape[1], device=problem.targets.members.device)
    (batch, _, out, _), device = site.shape, groups.device
    in_group = (problem.group_of[:, None] == groups[:, None]) & site.source_mask[:, None]  # (batch, group, in)
    active = torch.zeros(in_group.shape[:2], dtype=torch.bool, device=device)
    # All rows count, not only the wanted ones. In a layer that mixes positions, a wanted row depends on what other rows
    # attend to.
    rows = torch.arange(out, device=device)
    for example in problem.targets.batch.unique().tolist():
        reached = problem.reached(torch.full_like(rows, example), rows).any(0)
        active[example] = (in_group[example] & reached).any(-1)
    together = problem.independent or _examples_are_independent(problem)
    if not together:
        cause = f"the examples of the batch depend on each other in layer {site.layer.index} ({site.layer.name})"
        if any(".quantized.dynamic." in f"{type(one).__module__}." for one in site.layer.modules):
            cause = f"{site.layer.name} is quantised, and activations of a batch share one scale"
        site.layer.warnings.append(f"{cause}: pass one sentence at a time. The map is that of this batch")
    examples = torch.ones(1, batch, device=device) if together else torch.eye(batch, device=device)
    steps = []
    for chosen in examples.bool():
        for group in (active & chosen[:, None]).any(0).nonzero().flatten().tolist():
            zeroed = in_group[:, group] & chosen[:, None]
            number = torch.where(active[:, group] & chosen, group, NO_POSITION)
            steps.append((zeroed, number[None, :, None].expand(1, batch, out)))
    at_once = max(1, min(problem.chunk_rows // (batch * out), problem.asked.max_groups or len(steps)))
    some = (steps[start : start + at_once] for start in range(0, len(steps), at_once))
    return len(steps), (
        (clean, torch.stack([run(zeroed) for zeroed, _ in few]), torch.cat([number for _, number in few]))
        for few in some
    )


def _run(problem: ReplayProblem, runner: LayerRunner, zeroed: Tensor | None = None) -> Tensor:
    """The layer's output `(batch, out, d)` with values zeroed where `zeroed (batch, in)` is True."""
    site = problem.site
    zeroed = torch.zeros_like(site.source_mask) if zeroed is None else zeroed
    zeroed = zeroed[:, None] & problem.heads[:, None]
    handler = Intervene(site.attention, zeroed, problem.intervention, site.source_mask, on_clean_input=True)
    return _run_handled(site, runner, handler)


def _run_handled(site: AttentionSite, runner: LayerRunner, handler: SiteHandler) -> Tensor:
    output = runner.run(handler)
    handler.check_called()
    output = site.attention.batch_first(output)
    if output.shape[:2] != (site.shape.batch, site.shape.out):
        raise CannotReplayError(f"on {site.shape.batch} examples it returned a tensor {tuple(output.shape)}")
    return output


def _examples_are_independent(problem: ReplayProblem) -> bool:
    """Whether no example depends on others of the batch: noise in every second example moves no other one."""
    site, output, runner = problem.site, problem.output, problem.site.runner()
    for strength, odd in product(PROBE_STRENGTHS, (0, 1) if len(output) > 1 else ()):
        clean = torch.arange(len(output), device=output.device) % 2 == odd
        handler = ScaleNoise(site.attention, torch.where(clean, 0, strength))
        answer = run_with_noise(partial(_run_handled, site, runner, handler), strength)
        if answer is not None and not is_reproduced(answer[clean], output[clean]):
            return False
    return True


def _window_runs(problem: ReplayProblem, windows: Windows) -> Runs:
    """One run for each place in a window if no output depends on two windows, else one for each group."""
    batch, out, sources = windows.shape
    position, held = windows.position, windows.position != NO_POSITION
    window_of_output = _window_of_output(windows)  # asked for in any case: it checks that examples are independent
    if window_of_output is not None and problem.asked.groups is None and problem.asked.max_groups is None:
        places, place = windows.place.unique(return_inverse=True)
        zeroed = (windows.place == places[:, None]) & held
        source = torch.full((len(places), windows.count), NO_POSITION, device=position.device)
        source[place, windows.window] = (position % sources).where(held, NO_POSITION)
        group = source[:, window_of_output].where(window_of_output != NO_POSITION, NO_POSITION)
    else:
        number = torch.arange(problem.targets.members.shape[1], device=position.device)[:, None]
        zeroed = (problem.group_of.flatten()[position] == number) & held
        group = number[..., None].expand(-1, batch, out)
    at_once = min(windows.at_once, problem.asked.max_groups or len(zeroed))
    at_once = min(at_once, max(1, problem.chunk_rows // (batch * max(out, sources))))  # where memory was short
    heads = None if problem.asked.heads is None else problem.heads
    some = zip(zeroed.split(at_once), group.split(at_once), strict=True)
    return len(zeroed), ((*windows.filled(few, 0.0, heads), number) for few, number in some)


def _window_of_output(windows: Windows) -> Tensor | None:
    """The window that each output depends on, `(batch, out)`, or NO_POSITION. None: an output depends on several.

    Found by runs with large values, and NaN, in the place of some values.
    """
    batch, out, sources = windows.shape
    held, device = windows.position != NO_POSITION, windows.position.device
    loud = LOUD_FACTOR * float(max_abs(windows.clean[1]))

    def depend_on(slots: Tensor) -> Tensor:
        runs = [windows.filled(slots, filling) for filling in (torch.nan, loud)]
        return torch.stack([is_changed(outputs, clean) for clean, outputs in runs]).any(0).any(-1).flatten(1)

    if batch > 1:
        own = torch.arange(batch, device=device).repeat_interleave(out)
        example = torch.full((windows.count,), NO_POSITION, device=device)
        example[windows.window[held]] = windows.position[held] // sources
        of_example = example[windows.window]
        if (of_example[held] != windows.position[held] // sources).any():
            raise CannotReplayError("its attention reaches from one example to another")
        seen = find_sources(batch, lambda chosen: depend_on(chosen[:, of_example] & held), device, windows.at_once)
        if ((seen != own) & (seen != NO_POSITION)).any():
            raise CannotReplayError("its attention reaches from one example to another")
    found = find_sources(windows.count, lambda chosen: depend_on(chosen[:, windows.window]), device, windows.at_once)
    if (found == NO_POSITION).all():
        raise CannotReplayError("its outputs seem to depend on no value")
    twice = len(torch.stack([windows.window, windows.position])[:, held].unique(dim=1).T) < held.sum()
    return None if twice or (found == MANY_POSITIONS).any() else found.view(batch, out)
