"""What the sweep found, a row for each stack of each model type, and the table that it is written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

RESULTS = Path(__file__).with_name("RESULTS.md")

OUTCOMES = {
    "agrees": "the map equals the twin's to 1e-4 of its largest score, and so do those of words and of a head",
    "disagrees": "it does not: a bug",
    "fails": "captum_vz raises an error that does not say why: a bug",
    "refused": "captum_vz raises the error that is given, and returns no number",
    "other form": "neither captum_vz, which raises an error, nor the twin finds softmaxed weights times values: its "
    "layers attend in buckets or approximations (Reformer, MRA), linearly, or not at all",
    "no twin": "captum_vz answers, but the twin cannot rerun the layer or cannot see one attention in it",
    "no layers": "find_layers finds no stack of layers with attention, and says so",
    "not run": "the sweep has no inputs that reach the stack",
    "not built": "the sweep has no config for which the model can be built small here",
}


@dataclass(eq=False)
class Row:
    """One line of the table: a stack of a model type."""

    model_type: str
    stack: str
    outcome: str
    way: str = ""
    difference: float | None = None
    note: str = ""

    def judge(self, pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
        """Whether scores are the twin's: `pairs` of some that were found and what was expected."""
        largest = max(expected.abs().max().item() for _, expected in pairs)
        self.difference = max((found - expected).abs().max().item() for found, expected in pairs) / largest
        self.outcome = "agrees" if self.difference <= tolerance else "disagrees"

    def __str__(self) -> str:
        difference = "" if self.difference is None else f"{self.difference:.1e}"
        return f"{self.model_type:28} {self.stack:28} {self.outcome:12} {self.way:25} {difference:8} {self.note}"


def outcomes_of_types(rows: Iterable[Row]) -> dict[str, str]:
    """One outcome for each model type: a bug, if any stack shows one, else its best."""
    bugs = ["disagrees", "fails"]
    ranks = [*bugs, *(outcome for outcome in OUTCOMES if outcome not in bugs)]
    by_type: dict[str, str] = {}
    for row in rows:
        before = by_type.get(row.model_type, row.outcome)
        by_type[row.model_type] = min(before, row.outcome, key=ranks.index)
    return by_type


def write_table(rows: list[Row], versions: str) -> None:
    """Write all rows to RESULTS.md, those that agree first."""
    counts = Counter(outcomes_of_types(rows).values())
    lines = [
        "# Value Zeroing on every model type of transformers",
        "",
        f"Written by `python -m tests.sweep` with {versions}: a small random float32 model of each type in "
        "`MODEL_MAPPING`, batches with padding where the model takes a mask. Each layer's map is compared with a twin "
        "that reruns the layer with one value row zeroed; then with those of a word of two tokens, and, but for "
        "windows, with those of a word in the last head alone. The difference is the largest one over the largest "
        "score.",
        "",
        "| model types | outcome | meaning |",
        "|---|---|---|",
        *(f"| {counts[outcome]} | {outcome} | {meaning} |" for outcome, meaning in OUTCOMES.items()),
        f"| {sum(counts.values())} | | all |",
        "",
        "A type with several stacks counts once: as disagreeing or failing if any stack does, else by the best. The "
        "replay is of packed pairs of tokens, of whole sequences, or, where a layer sees its tokens in windows or in "
        "another order, of the whole batch, tokens told by their positions (windows). A stack whose layers are "
        "replayed in several ways "
        "has a row for each.",
        "",
        "| model type | stack | outcome | replay | difference | why |",
        "|---|---|---|---|---|---|",
    ]
    order = list(OUTCOMES)
    for row in sorted(rows, key=lambda row: (order.index(row.outcome), row.model_type, row.stack)):
        difference = "" if row.difference is None else f"{row.difference:.0e}"
        note = row.note.replace("|", "\\|")
        lines.append(f"| {row.model_type} | {row.stack} | {row.outcome} | {row.way} | {difference} | {note} |")
    RESULTS.write_text("\n".join(lines) + "\n")
