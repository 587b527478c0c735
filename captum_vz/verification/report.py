"""What a verification found: its checks, a table of them, and a verdict in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from captum_vz.tables import text_table

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
        table = text_table(heads, [self._line(name) for name in dict.fromkeys(check.name for check in self.checks)])
        return "\n".join([self.verdict, table, *(f"{name}: {note}" for name, note in self.notes())])

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
