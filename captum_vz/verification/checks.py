"""The checks of one layer, by each replay and against the definition; and the report of all checks, with a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import HALF, REPLAYS, ReplayTrace, traced_replays
from captum_vz.errors import RefusedError
from captum_vz.verification.definition import NoDefinitionError
from captum_vz.verification.recorded import DefinedMap, LayerRun, defined_map

# The largest change of a layer's output if its copy runs again, as a share of a token's largest entry. A layer in half
# precision runs again in float32.
RERUN = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Smaller differences always pass, because the eager attention of transformers computes its softmax in float32.
LEAST = 1e-5
# The definition in float32 may differ from the one in float64 by this share of a row's largest score.
MOST_ROUNDING = 0.1

PASSED, FAILED, REFUSED, SKIPPED, TOLD = "passed", "failed", "refused", "skipped", "told"

# The checks that not all models and inputs allow. The verdict names them if they were skipped.
OPTIONAL = ("rounding", "batch", "padding")
_WRONG = "Do not use maps of this layer, and report the layer to the developers of captum_vz with this table."
# What to do if a check fails, in the order in which the verdict names failures.
ADVICE = {
    "rerun": "Call model.eval(). A layer that draws random numbers or keeps state has no map: do not use one.",
    "map": f"{_WRONG} Often a value is used outside the attention, or some heads are computed in another way.",
    "definition": "The map of this layer may be right, but nothing shows it. Do not rely on it.",
    **dict.fromkeys(("replay", "rows", "zeros"), _WRONG),
    "chunk sizes": "Pass perturbations_per_eval=1, and report the layer with this table.",
    "batch": "The model itself mixes the examples of a batch. Pass one example at a time.",
    "positions": "The maps are right for the inputs as given, but the model itself moves the tokens.",
    "padding": "The model does not ignore padded tokens, for example because it does not use attention_mask. Pass "
    "examples one at a time without padding, or correct the model.",
    "rounding": "The changes of some rows are as small as rounding errors. Run the model in float64: model.double().",
}


@dataclass(frozen=True)
class Check:
    """One check of one layer.

    Attributes:
        name: What was checked.
        outcome: "passed", "failed", "refused" (the package gives no map of the layer), "skipped" (the check does not
            apply), or "told" (a number that decides nothing).
        layer: The index of the layer. None: the check is of the whole model.
        difference: The largest difference, as a share of the largest score of its row.
        allowed: The largest difference that passes, for the row that is closest to its limit.
        note: What was found, in words.
        way: How the map came about: where the attention was read, how it sees the layer's tokens, which replay gave the
            map, and why replays before it did not. Only of the check "map".
    """

    name: str
    outcome: str
    layer: int | None = None
    difference: float | None = None
    allowed: float | None = None
    note: str = ""
    way: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether a verification with this check has not passed."""
        return self.outcome in (FAILED, REFUSED)

    @property
    def excess(self) -> float:
        """The difference as a multiple of the allowed difference."""
        return (self.difference or 0.0) / self.allowed if self.allowed else self.difference or 0.0


@dataclass(frozen=True)
class VerificationReport:
    """What :func:`captum_vz.verify` found. `str(report)` is the verdict, with a table under it.

    Attributes:
        layers: The class names of the layers.
        dtype: The dtype of the model.
        checks: All checks of all layers.
    """

    layers: tuple[str, ...]
    dtype: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all layers have maps, and no check failed."""
        return not any(check.is_bad for check in self.checks)

    @property
    def verdict(self) -> str:
        """What was found, and what to do."""
        if self.passed:
            worst = max((check.difference or 0.0 for check in self.checks if check.name == "map"), default=0.0)
            text = (
                f"passed: the maps of {len(self.layers)} layers are those of the definition, up to {worst:.0e} of the "
                "largest score of a row."
            )
            skipped = sorted({one.name for one in self.checks if one.outcome == SKIPPED and one.name in OPTIONAL})
            return f"{text} Not checked: {', '.join(skipped)}." if skipped else text
        bad = [check for check in self.checks if check.is_bad]
        kind, advice = next((name, text) for name, text in ADVICE.items() if any(_is_of(one, name) for one in bad))
        same = [check for check in bad if _is_of(check, kind)]
        worst_of = max(same, key=lambda check: check.excess)
        where = f" of layer {worst_of.layer} ({self.layers[worst_of.layer]})" if worst_of.layer is not None else ""
        if (count := len({check.layer for check in same})) > 1:
            where = f" of {count} layers, worst in layer {worst_of.layer}"
        if worst_of.outcome == REFUSED:
            return f"refused: captum_vz gives no map{where}. {worst_of.note}"
        others = sorted({one.name for one in bad if not _is_of(one, kind)})
        more = f" Also failed: {', '.join(others)}." if others else ""
        return f"failed: {worst_of.name}{where}: {worst_of.note}. {advice}{more}"

    def to_json(self) -> str:
        """The report as a JSON object."""
        checks = [asdict(check) for check in self.checks]
        for check in checks:  # JSON has no infinity
            check |= {key: None for key in ("difference", "allowed") if not math.isfinite(check[key] or 0)}
        found = {"passed": self.passed, "verdict": self.verdict, "layers": self.layers, "dtype": self.dtype}
        return json.dumps({**found, "checks": checks})

    def __str__(self) -> str:
        """The verdict, and a table with one line for each kind of check, of the layer that is worst."""
        heads = ("check", "layers", "worst", "difference", "allowed", "outcome")
        lines = [heads, *map(self._line, dict.fromkeys(check.name for check in self.checks))]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join([self.verdict, *table, *(f"{name}: {note}" for name, note in self.notes())])

    def _line(self, name: str) -> tuple[str, ...]:
        same = [check for check in self.checks if check.name == name]
        order = (FAILED, REFUSED, PASSED, TOLD, SKIPPED)
        outcome = min((check.outcome for check in same), key=order.index)
        shown = [check for check in same if check.outcome == outcome]
        worst = max(shown, key=lambda check: check.excess)
        count = len({check.layer for check in shown})
        layers = "model" if worst.layer is None else f"{count} of {len(self.layers)}"
        numbers = ["" if one is None else f"{one:.0e}" for one in (worst.difference, worst.allowed)]
        no_worst = worst.layer is None or outcome == SKIPPED
        return name, layers, "" if no_worst else str(worst.layer), *numbers, outcome

    def notes(self) -> Iterator[tuple[str, str]]:
        """How the maps of layers came about, and why checks were skipped for the whole model."""
        ways: dict[tuple[str, str], list[int]] = {}
        for check in self.checks:
            if check.way and check.layer is not None:
                ways.setdefault((self.layers[check.layer], check.way), []).append(check.layer)
        for (kind, way), layers in ways.items():
            yield f"{kind} {_ranges(layers)}", way
        for check in self.checks:
            if check.layer is None and check.outcome == SKIPPED:
                yield check.name, check.note


def _ranges(numbers: list[int]) -> str:
    """Increasing numbers in words: `0-3, 5`."""
    starts = [one for one in numbers if one - 1 not in numbers]
    ends = [one for one in numbers if one + 1 not in numbers]
    return ", ".join(f"{one}" if one == end else f"{one}-{end}" for one, end in zip(starts, ends, strict=True))


def _is_of(check: Check, kind: str) -> bool:
    return check.name.partition(":")[0] == kind


@dataclass
class Rows:
    """A map, and by how much each of its rows may differ from another computation of the same row."""

    found: Tensor  # the scores, not normalized, `(batch, out, in)`
    largest: Tensor  # the largest score of each row, `(batch, out)`
    allowed: Tensor  # the difference that is allowed, as a share of the largest score, `(batch, out)`

    def compare(self, name: str, layer: int, other: Tensor, place: Callable[[Tensor], Tensor]) -> Check:
        """Compare with another map. `place` selects the part of this map, and of its rows, that the other map holds.

        The other map may be padded with more examples and more tokens at its end.
        """
        known = Rows(place(self.found), place(self.largest), place(self.allowed))
        batch, out, count = known.found.shape
        return known.judge(name, layer, other[:batch, :out, :count], "the map on the inputs")

    def judge(self, name: str, layer: int, other: Tensor, expecting: str) -> Check:
        """Compare other scores `(batch, out, in)` row by row with these, which are expected."""
        # NaN counts as infinitely wrong, so that it fails.
        errors = (other.double() - self.found.double()).abs().nan_to_num(torch.inf)
        errors = errors.masked_fill(errors < torch.finfo(other.dtype).eps ** 2, 0)  # a squared distance: rounding
        shares = (errors.amax(-1) / self.largest.clamp_min(1e-300)).nan_to_num(torch.inf)
        excess = (shares / self.allowed).nan_to_num(torch.inf)
        worst = int(excess.argmax())
        is_wrong = float(excess.flatten()[worst]) > 1
        row = divmod(worst, other.shape[1])
        difference, limit = float(shares[row]), float(self.allowed[row])
        note = ""
        if is_wrong:
            score = (*row, int(errors[row].argmax()))
            note = (
                f"in example {row[0]}, the row of token {row[1]} has a score {float(other[score]):.3g} where "
                f"{expecting} gives {float(self.found[score]):.3g}, a difference of {difference:.2g} of the row's "
                "largest score"
            )
        return Check(name, FAILED if is_wrong else PASSED, layer, difference, limit, note)


@dataclass
class LayerVerification:
    """The checks of one layer."""

    index: int
    compute: Callable[[], Tensor]  # the map of the layer, not normalized, `(batch, out, in)`
    mask: Tensor | None  # of padding in the inputs, `(batch, tokens)`; None: there is none
    attention: str
    most: int  # the largest number of sources that are compared
    rows: Rows | None = None  # the map and the rounding of its rows; None: the map cannot be compared

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
        self.rows, defined = Rows(found, largest, allowed), Rows(expected, largest, allowed)
        at = "where they are projected" if definition.at_projection else "in the attention"

        def against(name: str, scores: Tensor) -> Check:
            return defined.judge(name, self.index, scores[:, :, definition.sources], "the definition")

        served = against("map", found)
        note, way = served.note or f"the definition zeroes values {at}", _way(traces[-1]) if traces else ""
        yield Check("map", served.outcome, self.index, served.difference, served.allowed, note, way)
        yield from (self._by_replay(replay.name, against) for replay in REPLAYS)
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
