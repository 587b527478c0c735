"""Value Zeroing's driver: the first replay that serves, distances, and the map of one layer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from captum_vz._engine.numerics import SHORT_OF_MEMORY, by_rows, for_query_heads, is_out_of_memory
from captum_vz._engine.numerics.tolerance import CannotReplayError, Readings, same_numbers, with_rounding
from captum_vz._engine.replay import Replay, ReplayChunk, ReplayProblem, Request
from captum_vz._engine.replay.definition import DefinitionReplay
from captum_vz._engine.replay.folded import FoldedReplay
from captum_vz._engine.replay.packed import PackedReplay
from captum_vz._engine.replay.unknown_code import check_unknown_code
from captum_vz._engine.taps.changes import left_out_by_replays, without_autocast
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional.interventions import ZeroValue, contexts_after, values_after

if TYPE_CHECKING:
    from captum_vz._engine.structure import AttentionSite

# The first replay that holds for a layer gives its map. A new replay is one file and one entry here.
REPLAYS: tuple[Replay, ...] = (FoldedReplay(), PackedReplay(), PackedReplay(first_tensor_only=True), DefinitionReplay())
FEW_GROUPS = 8  # in layers of unknown code, the definition is the fastest replay of so few groups of sources


@dataclass(frozen=True)
class OutputDistance:
    """A distance `between` two outputs `(..., d)`, for which what one of them needs alone was done by `prepare`."""

    # Given the outputs, and the readings of its own checks. These raise ImpreciseError.
    prepare: Callable[[Tensor, Readings], Tensor]
    between: Callable[[Tensor, Tensor], Tensor]
    # The distance for outputs of which `prepare` is imprecise. None: it never is.
    careful: OutputDistance | None = None
    # Upper bound on the distance by which rounding alone moves outputs. None: it depends on them.
    rounding: Callable[[torch.dtype], float] | None = None


class ImpreciseError(Exception):
    """Vectors are too large or too small for a distance. Its careful form is used."""


@dataclass
class ReplayTrace:
    """How one map came about, for `verify`, tests and the table of supported models.

    `tap` is where the attention was read, `layout` how it sees the layer's tokens. `replay` gave the map. Those before
    it `failed` for the reasons given there.
    """

    layer: str
    tap: str
    layout: str = "tokens"
    replay: Replay | None = None
    failed: dict[str, str] = field(default_factory=dict)


# What this thread asked for. No context variable, because each map is computed in its own context.
_traces = threading.local()


@contextmanager
def traced_replays(only: str | None = None) -> Iterator[list[ReplayTrace]]:
    """Trace the replays of the maps that this thread computes inside a `with` block.

    `only` is the name of the one replay that may serve. None: all may.
    """
    traces: list[ReplayTrace] = []
    outer = getattr(_traces, "asked", None)
    _traces.asked = traces, only
    try:
        yield traces
    finally:
        _traces.asked = outer


def value_zeroing_scores(site: AttentionSite, distance: OutputDistance, asked: Request) -> Tensor:
    """The raw distances of one layer, `(batch, row, group)`. Padded rows and sources are 0.

    The layer's record is given a warning for rows whose change is no larger than rounding.

    Raises:
        UnsupportedLayerError: No replay holds for the layer.
        RefusedError: A layer of unknown code drew random numbers.
        ArgumentError: The intervention changes contexts although no source is zeroed.
    """
    site = site.in_float32()
    with without_autocast(site.layer.first_output.device):
        problem = ReplayProblem.of(site, asked)
        if not problem.library:
            check_unknown_code(site)
        if not len(problem.targets):
            return problem.empty_map()
        # The user's functions are called once before any replay, so that their errors are not taken for a replay's.
        rounding = None if distance.rounding is not None else _rounding(problem.clean, distance)
        _check_intervention(problem)
        trace = ReplayTrace(site.layer.name, site.attention.tap)
        traces, only = getattr(_traces, "asked", None) or (list[ReplayTrace](), None)
        traces.append(trace)
        for replay in _in_order(problem):
            if only not in (None, replay.name) or not replay.fits(problem):
                continue
            try:
                scores = _scores_by(replay, problem, distance, rounding)
            except CannotReplayError as reason:
                trace.failed[replay.name] = str(reason)
            else:
                trace.replay, trace.layout = replay, site.layer.layout
                return scores
    reasons = "; ".join(f"{name}: {reason}" for name, reason in trace.failed.items() if name != "folded pairs")
    left_out = left_out_by_replays(site.layer.layer).rstrip()
    advice = "Pass a single Transformer block in eval mode, whose output at each token depends on its input alone."
    if site.layer.state.keeps_tensors():
        advice = "The layer keeps tensors of its run, such as a key-value cache of its own: switch that off."
    raise UnsupportedLayerError(
        f"{trace.layer} cannot be replayed: no replay reproduces its clean output on its own clean input. "
        + (left_out or f"Tried {reasons}. {advice}")
    )


def _in_order(problem: ReplayProblem) -> list[Replay]:
    """The replays in the order in which they are tried. No generator: an error of the caller's would end in it."""
    known = REPLAYS
    if problem.site.layer.hooks:  # a hook may count positions
        known = REPLAYS[-1:]
    elif not problem.library and problem.targets.members.shape[1] <= FEW_GROUPS:
        known = (*REPLAYS[-1:], *REPLAYS[:-1])
    return [one for one in known if problem.is_long or not getattr(one, "only_long", False)]


def _scores_by(replay: Replay, problem: ReplayProblem, distance: OutputDistance, rounding: Tensor | None) -> Tensor:
    """The scores by one replay. Where memory is short, smaller chunks run; where it is imprecise, the careful distance.

    CannotReplayError: the replay does not hold for the layer.
    """
    readings, steps = problem.readings, problem.asked.steps
    while True:
        scores = problem.empty_map()
        clean: Tensor | None = None
        readings.forget()
        try:
            for chunk in replay(problem) if steps is None else _counted(replay(problem), problem, steps):
                if chunk.clean is not clean:
                    clean, prepared = chunk.clean, distance.prepare(chunk.clean, readings)
                output = distance.prepare(chunk.output, readings)
                moved = distance.between(output, prepared.index_select(0, chunk.clean_row)).to(scores)
                moved = moved if chunk.unchanged is None else moved.masked_fill(chunk.unchanged, 0)
                scores.view(-1)[problem.place(chunk)] = moved
            _check_scores(problem, distance, scores, rounding)
            readings.read()
            return scores
        except ImpreciseError:
            assert distance.careful is not None  # a distance that is imprecise has a careful form
            distance = distance.careful
            continue
        except (RuntimeError, MemoryError) as error:
            rows = min(problem.chunk_rows, problem.targets.count)
            if not is_out_of_memory(error) or rows <= 1:
                raise
        # Outside of the except block, whose error would keep the chunk's memory.
        problem.site.layer.warnings.append(SHORT_OF_MEMORY)
        problem = replace(problem, chunk_rows=rows // 2)


def _counted(
    chunks: Iterator[ReplayChunk], problem: ReplayProblem, steps: Callable[[int], Any]
) -> Iterator[ReplayChunk]:
    """The chunks, whose pairs a progress bar counts. It is full at the end, also where some pairs do not run."""
    left = problem.targets.count
    if left <= problem.chunk_rows:
        yield from chunks
        return
    with closing(steps(left)) as bar:
        for chunk in chunks:
            yield chunk
            count = min(len(chunk.target), left)
            left -= count
            bar.update(count)
        bar.update(left)


def _check_scores(problem: ReplayProblem, distance: OutputDistance, scores: Tensor, rounding: Tensor | None) -> None:
    """Add two checks to the readings: refuse NaN or infinite scores, and warn of rows that only rounding changes."""
    layer, dtype, targets = problem.site.layer, scores.dtype, problem.targets
    rows = scores.abs().amax(-1)
    rows = rows.view(-1) if targets.everything else rows[targets.batch, targets.row]
    bound = math.inf if distance.rounding is None else distance.rounding(dtype)

    def refuse(largest: float) -> None:
        if not math.isfinite(largest):
            raise RefusedError(
                "distance gave values that are not finite (NaN or infinity): expected finite numbers. Pass a distance "
                "that is defined for all outputs, zero vectors included."
            )

    def warn(smallest: float) -> None:
        if smallest >= bound:
            return
        limit = _rounding(problem.clean, distance) if rounding is None else rounding
        rounded = int(((rows > 0) & (rows < limit.to(rows))).sum())
        if rounded:
            name = str(dtype).removeprefix("torch.")
            advice = "" if name == "float64" else ": run the model in float64 (model.double())"
            layer.warnings.append(
                f"{rounded} rows of layer {layer.index} ({layer.name}) change by hardly more than {name} rounds{advice}"
            )

    smallest, largest = rows.aminmax()
    problem.readings.add(largest, refuse)
    problem.readings.add(smallest, warn)


def _check_intervention(problem: ReplayProblem) -> None:
    """Refuse an intervention that does something where no source is zeroed, or returns another shape."""
    attention, intervention, real = problem.site.attention, problem.intervention, problem.site.source_mask
    if isinstance(intervention, ZeroValue) or problem.site.windows is not None:
        return
    nothing = torch.zeros(real.shape, dtype=torch.bool, device=real.device)[:, None].expand(-1, len(problem.heads), -1)
    name = type(intervention).__name__
    if attention.inline is not None:
        rows = attention.values.clone()
        attention.inline.change(rows, ~nothing, lambda values: values_after(intervention, values, nothing, real))
        found, expected, method = rows, attention.values, "new_values"
    elif attention.weights is not None and attention.context is not None:
        values = for_query_heads(attention.values, problem.site.shape.heads)
        change = partial(contexts_after, intervention, values=values, zeroed=nothing, real=real)
        found = by_rows(attention.weights, lambda part: change(part.to(values.dtype))).transpose(1, 2)
        expected, method = attention.context, "new_context"
    else:
        return
    if found.shape != expected.shape:
        raise ArgumentError(
            f"{name}.{method} gave {tuple(found.shape)}: expected {tuple(expected.shape)}, one vector for each head of "
            "each token. See captum_vz.functional.Intervention."
        )
    there = problem.site.target_mask if method == "new_context" else real
    if there.any() and not same_numbers(expected[there], found[there], torch.finfo(expected.dtype).eps ** 0.6):
        raise ArgumentError(
            f"{name}.{method} changes what the model computes although no source is zeroed. Expected the same numbers. "
            "Change only what `zeroed` marks."
        )


def _rounding(clean: Tensor, distance: OutputDistance) -> Tensor:
    """Upper bound on the distance by which rounding alone moves outputs `(n, d)`, `(n,)`."""
    distance = distance.careful or distance
    prepared, rounded = distance.prepare(torch.cat([clean, with_rounding(clean)]), Readings()).chunk(2)
    return distance.between(with_rounding(rounded), prepared)  # prepared outputs are rounded as well
