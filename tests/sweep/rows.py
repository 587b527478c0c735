"""The rows of the sweep, one for each stack of each model type, and the two tables that they are written to."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

RESULTS = Path(__file__).with_name("RESULTS.md")

TITLE = "# Value Zeroing on every model type of transformers"
SHORT_HEADING = "## Sentences of seven tokens"
LONG_HEADING = "## Sentences of 36, 29 and 20 tokens"

OUTCOMES = {
    "agrees": "the map equals the twin's to 1e-4 of its largest score, and so do the maps of words and of one head",
    "disagrees": "the map differs from the twin's: a bug",
    "fails": "captum_vz raises an error that does not say why: a bug",
    "refused": "captum_vz raises the error shown, and returns no number",
    "other form": "captum_vz raises an error, and the twin finds no softmaxed weights times values either: the layers "
    "attend in buckets, by approximation (Reformer, MRA), linearly, or not at all",
    "no twin": "captum_vz returns a map, but the twin cannot rerun the layer or finds no single attention in it",
    "no layers": "find_layers finds no stack of layers with attention, and says so",
    "not run": "the sweep has no inputs that reach the stack",
    "not built": "the sweep has no config for a small model of this type",
}
BUGS = ("disagrees", "fails")


@dataclass(eq=False)
class Row:
    """One line of a table: a stack of a model type."""

    model_type: str
    stack: str
    outcome: str
    way: str = ""
    difference: float | None = None
    note: str = ""
    alone: str = ""  # the outcome of a batch of one example, or "" in the sweep of long sentences

    def judge(self, pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
        """Set the outcome from pairs of scores: those of captum_vz, and those of the twin."""
        largest = max(expected.abs().max().item() for _, expected in pairs)
        self.difference = max((found - expected).abs().max().item() for found, expected in pairs) / largest
        self.outcome = "agrees" if self.difference <= tolerance else "disagrees"

    def __str__(self) -> str:
        difference = "" if self.difference is None else f"{self.difference:.1e}"
        cells = f"{self.model_type:28} {self.stack:28} {self.outcome:12} {self.way:25} {difference:8}"
        return f"{cells} {self.alone:12} {self.note}"

    def line(self, long: bool) -> str:
        """The row in Markdown."""
        difference = "" if self.difference is None else f"{self.difference:.0e}"
        cells = [self.model_type, self.stack, self.outcome, self.way, difference, *([] if long else [self.alone])]
        cells.append(self.note.replace("|", "\\|"))
        return "| " + " | ".join(cells) + " |"


def outcomes_of_types(rows: Iterable[Row]) -> dict[str, str]:
    """One outcome for each model type: a bug, if any of its stacks has one, else the best outcome of its stacks."""
    ranks = [*BUGS, *(outcome for outcome in OUTCOMES if outcome not in BUGS)]
    by_type: dict[str, str] = {}
    for row in rows:
        before = by_type.get(row.model_type, row.outcome)
        by_type[row.model_type] = min(before, row.outcome, key=ranks.index)
    return by_type


def packed_types() -> list[str]:
    """The model types with a stack that is replayed as packed pairs, from the first table of RESULTS.md."""
    rows = (line.strip("| ").split(" | ") for line in _section(SHORT_HEADING).splitlines())
    packed = [cells[0] for cells in rows if len(cells) > 3 and cells[3].startswith("packed")]
    if not packed:
        raise SystemExit(f"{RESULTS.name} names no type that is packed: run `python -m tests.sweep` first.")
    return list(dict.fromkeys(packed))


def write_table(rows: list[Row], long: bool, versions: str) -> None:
    """Write one table to RESULTS.md. The other table stays as it is."""
    sections = {heading: _section(heading) for heading in (SHORT_HEADING, LONG_HEADING)}
    sections[LONG_HEADING if long else SHORT_HEADING] = _written(rows, long, versions)
    RESULTS.write_text("\n\n".join(filter(None, (TITLE, INTRODUCTION, *sections.values()))) + "\n")


INTRODUCTION = """\
The sweep builds a small random float32 model of each type in `MODEL_MAPPING`. It runs it on a batch, with padding if \
the model takes a mask. It compares each layer's map with a twin that reruns the layer with one value row zeroed. It \
then compares the scores of words of two tokens, and the scores of words in the last head alone (except for windows). \
The difference is the largest one, divided by the largest score.

A type with several stacks counts once. It counts as disagreeing or failing if any of its stacks does, else by its \
best outcome. A stack whose layers are replayed in several ways has a row for each way. The first table has one more \
column: the outcome of a batch of one example, the first of the batch.

There are two ways of replay: packed pairs of tokens; and the definition, which runs the batch once for each source. \
Some layers see their tokens in windows or in another order. Windows means that their positions are found first."""

FOLDING = """\
Long sentences take the folded replay, a faster form of packed pairs. So this table has the types with a stack of \
packed pairs in the table above. The threshold below which folding does not pay is off, because tiny models never \
reach it. Texts have these lengths; images and sounds are as above. *Why* says why a layer does not fold."""


def _section(heading: str) -> str:
    """The text of one table in RESULTS.md with its heading, or "" if there is none."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return next((part.strip() for part in re.split(r"(?m)^(?=## )", text) if part.startswith(f"{heading}\n")), "")


def _written(rows: list[Row], long: bool, versions: str) -> str:
    counts = Counter(outcomes_of_types(rows).values())
    alone = Counter(outcomes_of_types(replace(row, outcome=row.alone) for row in rows if row.alone).values())
    command = "python -m tests.sweep" + " --long" * long
    order = list(OUTCOMES)
    rows = sorted(rows, key=lambda row: (order.index(row.outcome), row.model_type, row.stack, row.way))
    shown = {one: text for one, text in OUTCOMES.items() if counts[one] or one in BUGS}
    return "\n".join(
        [
            LONG_HEADING if long else SHORT_HEADING,
            "",
            f"Written by `{command}` with {versions}.",
            "",
            f"| model types | {'' if long else 'one example | '}outcome | meaning |",
            f"|---|---|---|{'' if long else '---|'}",
            *(f"| {counts[one]} | {'' if long else f'{alone[one]} | '}{one} | {text} |" for one, text in shown.items()),
            f"| {sum(counts.values())} | {'' if long else f'{sum(alone.values())} | '}| all |",
            "",
            *([FOLDING, ""] if long else ()),
            f"| model type | stack | outcome | replay | difference | {'' if long else 'one example | '}why |",
            f"|---|---|---|---|---|---|{'' if long else '---|'}",
            *(row.line(long) for row in rows),
        ]
    )
