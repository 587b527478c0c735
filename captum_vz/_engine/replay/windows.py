"""The whole batch as it was, with some values zeroed: for layers that see their positions in windows.

One value of each window is zeroed at a time if no output depends on two windows. Otherwise the values of one position
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from captum_vz._engine.numerics.perturbation import is_changed, max_abs
from captum_vz._engine.numerics.tolerance import CannotReplayError, check_reproduced
from captum_vz._engine.replay.base import ReplayChunk, ReplayProblem
from captum_vz._engine.structure.windows import MANY_POSITIONS, NO_POSITION, Windows, find_sources

# How much larger than all values a value is that no window may overlook.
LOUD_FACTOR = 8


class WindowReplay:
    """Runs the batch once for each place in a window, or once for each group."""

    name = "windows"

    def fits(self, problem: ReplayProblem) -> bool:
        return problem.site.windows is not None or problem.site.is_reordered()

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        site = problem.site
        if site.windows is None:  # one window
            # Which tokens are hidden is known in the attention's order only.
            if site.attention.visible is not None and not site.attention.visible.all():
                raise CannotReplayError("its attention sees its tokens in another order, and not all of them")
            site = site.in_windows()
            problem = replace(problem, site=site, output=site.output)
        windows = site.windows
        assert windows is not None  # narrows the type: in_windows raises if it finds none
        batch, out = problem.targets.batch, problem.targets.out
        clean = windows.run(torch.zeros_like(windows.position, dtype=torch.bool), heads=problem.heads)
        check_reproduced(clean.flatten(0, 1), problem.output.flatten(0, 1))
        clean = clean[batch, out]
        for zeroed, group in _steps(windows, problem.ablation.groups, problem.ablation.max_groups is not None):
            target = (group[batch, out] >= 0).nonzero().flatten()
            rows = batch[target], out[target]
            output = windows.run(zeroed, heads=problem.heads)[rows]
            yield ReplayChunk(target, group[rows], output, clean, target)
        for _ in range(0 if problem.library_code else 2):  # a run may change something for the next
            check_reproduced(windows.run().flatten(0, 1), problem.output.flatten(0, 1))


def _steps(windows: Windows, groups: Tensor | None, one_by_one: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """What to zero at a time, `(slots,)`, and the group that this is for each output, `(batch, out)`, -1 for none."""
    batch, out, sources = windows.shape
    window_of_output = _window_of_output(windows)  # asked for in any case: it checks that examples are independent
    if window_of_output is not None and groups is None and not one_by_one:
        for place in windows.place.unique():
            zeroed = (windows.place == place) & (windows.position != NO_POSITION)
            held = torch.full((int(windows.window.max()) + 1,), NO_POSITION, device=windows.window.device)
            held[windows.window[zeroed]] = windows.position[zeroed] % sources
            yield zeroed, held[window_of_output].where(window_of_output != NO_POSITION, NO_POSITION)
        return
    if groups is None:
        groups = torch.arange(sources, device=windows.position.device).expand(batch, sources)
    group = groups.flatten()[windows.position].where(windows.position != NO_POSITION, NO_POSITION)
    for number in range(int(groups.max()) + 1):
        yield group == number, torch.full((batch, out), number, device=group.device)


def _window_of_output(windows: Windows) -> Tensor | None:
    """The window that each output depends on, `(batch, out)`, or NO_POSITION. None: an output depends on several.

    Found by runs with large values, and NaN, in the place of some values.
    """
    batch, out, sources = windows.shape
    held = windows.position != NO_POSITION
    example = torch.full((int(windows.window.max()) + 1,), NO_POSITION, device=windows.window.device)
    example[windows.window[held]] = windows.position[held] // sources
    if (example[windows.window[held]] != windows.position[held] // sources).any():
        raise CannotReplayError("its attention reaches from one example to another")
    clean = windows.run()
    loud = LOUD_FACTOR * max(float(max_abs(values)) for values in windows.values())

    def depend_on(slots: Tensor) -> Tensor:
        found = [is_changed(windows.run(slots, filling), clean) for filling in (torch.nan, loud)]
        return torch.stack(found).any(0).any(-1).flatten()

    own = torch.arange(batch, device=held.device).repeat_interleave(out)
    seen = find_sources(batch, lambda chosen: depend_on(chosen[example[windows.window]] & held), held.device)
    if ((seen != own) & (seen != NO_POSITION)).any():
        raise CannotReplayError("its attention reaches from one example to another")
    found = find_sources(len(example), lambda chosen: depend_on(chosen[windows.window]), held.device)
    if (found == NO_POSITION).all():
        raise CannotReplayError("its outputs seem to depend on no value")
    twice = len(torch.stack([windows.window, windows.position])[:, held].unique(dim=1).T) < held.sum()
    return None if twice or (found == MANY_POSITIONS).any() else found.view(batch, out)
