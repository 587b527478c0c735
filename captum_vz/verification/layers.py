"""Verify the map of one layer: by each replay, against the definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import HALF, REPLAYS, ReplayTrace, traced_replays
from captum_vz.errors import RefusedError
from captum_vz.verification.definition import NoDefinitionError
from captum_vz.verification.recorded import DefinedMap, LayerRun, defined_map
from captum_vz.verification.report import FAILED, PASSED, REFUSED, SKIPPED, TOLD, Check

# The largest change of a layer's output if its copy runs again, as a share of a token's largest entry. A layer in half
# precision runs again in float32.
RERUN = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Smaller differences always pass, because the eager attention of transformers computes its softmax in float32.
LEAST = 1e-5
# The definition in float32 may differ from the one in float64 by this share of a row's largest score.
MOST_ROUNDING = 0.1


@dataclass
class Rows:
    """A map, and by how much each of its rows may differ from another computation of the same row.

    Attributes:
        found: The scores, not normalized, `(batch, out, in)`.
        largest: The largest score of each row, `(batch, out)`.
        allowed: The difference that is allowed, as a share of the largest score, `(batch, out)`.
    """

    found: Tensor
    largest: Tensor
    allowed: Tensor

    def compare(self, name: str, layer: int, other: Tensor, place: Callable[[Tensor], Tensor]) -> Check:
        """Compare with another map. `place` selects the part of this map, and of its rows, that the other map holds.

        The other map may be padded with more examples and more tokens at its end.
        """
        known, largest, allowed = place(self.found), place(self.largest), place(self.allowed)
        batch, out, count = known.shape
        return judge(name, layer, other[:batch, :out, :count], known, largest, allowed, "the map on the inputs")


def judge(
    name: str, layer: int, found: Tensor, expected: Tensor, largest: Tensor, allowed: Tensor, expecting: str
) -> Check:
    """Compare scores `(batch, out, in)` row by row."""
    # NaN counts as infinitely wrong, so that it fails.
    errors = (found.double() - expected.double()).abs().nan_to_num(torch.inf)
    errors = errors.masked_fill(errors < torch.finfo(found.dtype).eps ** 2, 0)  # a squared distance that is rounding
    shares = (errors.amax(-1) / largest.clamp_min(1e-300)).nan_to_num(torch.inf)
    excess = (shares / allowed).nan_to_num(torch.inf)
    worst = int(excess.argmax())
    is_wrong = float(excess.flatten()[worst]) > 1
    example, token = divmod(worst, found.shape[1])
    difference, limit = float(shares.flatten()[worst]), float(allowed.flatten()[worst])
    column = int(errors[example, token].argmax())
    note = ""
    if is_wrong:
        note = (
            f"in example {example}, the row of token {token} has a score {float(found[example, token, column]):.3g} "
            f"where {expecting} gives {float(expected[example, token, column]):.3g}, a difference of {difference:.2g} "
            "of the row's largest score"
        )
    return Check(name, FAILED if is_wrong else PASSED, layer, difference, limit, note)


class LayerVerification:
    """The checks of one layer.

    Args:
        index: The index of the layer.
        compute: Computes the map of the layer, not normalized, `(batch, out, in)`.
        mask: The mask of padding in the inputs, `(batch, tokens)`. None: there is none.
        attention: "self" or "cross".
        most: The largest number of sources that are compared.

    Attributes:
        rows: The map and the rounding of its rows. None: the map cannot be compared.
    """

    def __init__(
        self, index: int, compute: Callable[[], Tensor], mask: Tensor | None, attention: str, most: int
    ) -> None:
        self.index, self.compute, self.mask, self.attention, self.most = index, compute, mask, attention, most
        self.rows: Rows | None = None

    def checks(self, run: LayerRun | None) -> Iterator[Check]:
        """All checks of the layer."""
        try:
            with traced_replays() as traces:
                found = self.compute()
        except RefusedError as error:
            yield Check("map", REFUSED, self.index, note=str(error))
            return
        try:
            if run is None:
                raise NoDefinitionError("the plain run of the model did not run the layer")
            dtype = run.hidden.dtype
            own = self._defined(run, found, torch.float32 if dtype in HALF else None)
        except Exception as error:  # the layer's own code may raise anything in a copy
            kind = "" if isinstance(error, NoDefinitionError) else f"{type(error).__name__}: "
            yield Check("definition", FAILED, self.index, note=f"the definition cannot be applied: {kind}{error}")
            return
        limit = RERUN.get(dtype, 0.1)
        if not own.reproduced <= limit:
            note = "a copy of the layer, run again on its recorded input, returns another output"
            yield Check("rerun", FAILED, self.index, own.reproduced, limit, note)
            return
        yield Check("rerun", PASSED, self.index, own.reproduced, limit)
        exact = own if dtype == torch.float64 else self._attempted(run, found, torch.float64)
        definition = own if exact is None else exact
        padding = definition.padding & (found == 0).all(-1)
        expected = definition.scores.masked_fill(padding[..., None], 0)
        largest = torch.maximum(found.double().amax(-1), expected.amax(-1))
        floor = self._error(own, definition, expected)
        half = self._attempted(run, found, None, False) if dtype in HALF else None
        allowed = max(torch.finfo(found.dtype).eps ** 0.4, LEAST) + 10 * floor
        if dtype in HALF:
            # The layers before this one round. The pass of a map and the plain run do not round in the same way.
            floor_in_half = floor if half is None else self._error(half, definition, expected)
            allowed = torch.finfo(dtype).eps ** 0.6 + 10 * floor_in_half
        self.rows = Rows(found, largest, allowed)
        at = "where they are projected" if definition.at_projection else "in the attention"

        def against(name: str, scores: Tensor) -> Check:
            of_sources = scores[:, :, definition.sources]
            return judge(name, self.index, of_sources, expected, largest, allowed, "the definition")

        served = against("map", found)
        note, way = served.note or f"the definition zeroes values {at}", _way(traces[-1]) if traces else ""
        yield Check("map", served.outcome, self.index, served.difference, served.allowed, note, way)
        for name in (replay.name for replay in REPLAYS):
            yield self._by_replay(name, against)
        yield self._zeros(found[:, :, definition.sources], expected, largest)
        yield self._rounding(found, exact, floor)
        if half is not None:
            note = "by how much the definition in half precision is wrong; maps are computed in float32"
            name = f"naive in {str(dtype).removeprefix('torch.')}"
            yield Check(name, TOLD, self.index, float(floor_in_half.max()), None, note)

    def _defined(self, run: LayerRun, found: Tensor, dtype: torch.dtype | None, projected: bool = True) -> DefinedMap:
        return defined_map(run, self.attention, found.shape, dtype, self.mask, self.most, projected)

    def _attempted(self, *asked: Any) -> DefinedMap | None:
        """The definition in another dtype. None: the layer's code, or an operator of the device, does not run so."""
        try:
            return self._defined(*asked)
        except Exception:
            return None

    def _by_replay(self, name: str, against: Callable[[str, Tensor], Check]) -> Check:
        title = f"replay: {name}"
        try:
            with traced_replays(name) as traces:
                return against(title, self.compute())
        except RefusedError:
            reason = traces[-1].failed.get(name, "") if traces else ""
            return Check(title, SKIPPED, self.index, note=reason or "not meant for this layer, or for this size")

    def _zeros(self, found: Tensor, expected: Tensor, largest: Tensor) -> Check:
        zero = expected == 0
        if not zero.any():
            return Check("zeros", SKIPPED, self.index, note="the definition has no score that is exactly 0")
        limit = 8 * torch.finfo(found.dtype).eps
        shares = (found.double().abs() / largest.clamp_min(1e-300)[..., None])[zero]
        difference, wrong = float(shares.nan_to_num(torch.inf).max()), int((~(shares <= limit)).sum())
        note = f"{wrong} of {len(shares)} scores that are 0 by the definition are not 0" if wrong else ""
        return Check("zeros", FAILED if wrong else PASSED, self.index, difference, limit, note)

    def _rounding(self, found: Tensor, exact: DefinedMap | None, floor: Tensor) -> Check:
        if exact is None:
            return Check("rounding", SKIPPED, self.index, note="the layer does not run in float64")
        rows = int((floor > MOST_ROUNDING).sum())
        name = str(found.dtype).removeprefix("torch.")
        note = f"the definition in {name} is far from that in float64 in {rows} rows" if rows else f"in {name}"
        return Check("rounding", FAILED if rows else PASSED, self.index, float(floor.max()), MOST_ROUNDING, note)

    @staticmethod
    def _error(one: DefinedMap, exact: DefinedMap, expected: Tensor) -> Tensor:
        """The difference of two definitions, as a share of each row's largest score; 0 in rows of zeros."""
        largest = expected.amax(-1)
        shares = (one.scores - exact.scores).abs().amax(-1) / largest.clamp_min(1e-300)
        return shares.nan_to_num(torch.inf).masked_fill(largest == 0, 0)


def _way(trace: ReplayTrace) -> str:
    """How a map came about: where the attention was read, how it sees the tokens, the replay, and why not another."""
    serving = "no replay" if trace.replay is None else trace.replay.name
    passed_over = "; ".join(f"not {name}: {reason}" for name, reason in trace.failed.items())
    way = f"read at {trace.tap}, seen as {trace.layout}, by {serving}"
    return f"{way} ({passed_over})" if passed_over else way
