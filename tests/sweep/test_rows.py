"""The tables of RESULTS.md are written one at a time, and name the types of the second sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep import rows
from tests.sweep.__main__ import Kept
from tests.sweep.rows import Row, folding_of_types, outcomes_of_types, packed_types, reasons, write_table

SHORT = [
    Row("bert", "", "agrees", "packed pairs", 2e-7, alone="agrees"),
    Row("bloom", "", "agrees", "definition", 3e-7),
    Row("albert", "", "agrees", "packed pairs", 1e-7),
    Row("mamba", "", "no layers", note="a | b"),
]
LONG = [
    Row("bart", "encoder", "agrees", "packed pairs", 1e-7, folds="no threshold"),
    Row("bart", "decoder", "agrees", "packed pairs", 1e-7, "two attentions", "never"),
    Row("beit", "", "agrees", "packed pairs", 1e-7, "off by 1.0e-03", "never"),
    Row("dbrx", "", "agrees", "packed pairs", 1e-7, "off by 2.0e-03", "never"),
]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "RESULTS.md"
    monkeypatch.setattr(rows, "RESULTS", path)
    return path


@pytest.mark.parametrize("first", ["short", "long"])
def test_table_leaves_other_table(results: Path, first: str) -> None:
    for long in (first == "long", first != "long"):
        write_table(LONG if long else SHORT, long, "torch 9")
    both = results.read_text()
    assert both.index("| bert |") < both.index("| bart |")
    assert "| mamba |  | no layers |  |  |  | a \\| b |" in both
    write_table(LONG[:2], True, "torch 10")
    changed = results.read_text()
    assert "| dbrx |" not in changed
    assert changed.count("torch 9") == changed.count("torch 10") == 1


def test_packed_types_from_first_table() -> None:
    write_table(SHORT, False, "torch 9")
    write_table(LONG, True, "torch 9")
    assert packed_types() == ["albert", "bert"]


def test_packed_types_without_table() -> None:
    with pytest.raises(SystemExit, match=r"run `python -m tests\.sweep` first"):
        packed_types()


def test_type_folds_as_best_stack() -> None:
    assert folding_of_types(LONG) == {"bart": "no threshold", "beit": "never", "dbrx": "never"}
    assert reasons(LONG) == {"off by some amount": ["beit", "dbrx"]}


def test_types_of_folding_add_up(results: Path) -> None:
    """A type that is not packed at these lengths is counted as well."""
    write_table([*LONG, Row("sam3", "", "agrees", "definition, windows", 1e-7)], True, "torch 9")
    table = results.read_text().partition("| model types | folds | meaning |")[2].partition("\n\n")[0]
    counts = [int(line.split("|")[1]) for line in table.splitlines()[2:]]
    assert counts == [0, 1, 2, 1, 4]


def test_bug_in_one_stack_counts() -> None:
    assert outcomes_of_types([*LONG, Row("bart", "", "disagrees")])["bart"] == "disagrees"
    assert outcomes_of_types([Row("bart", "", "not run"), *LONG])["bart"] == "agrees"


def test_resumed_rows_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    kept = Kept(path)
    kept.add("bart", LONG[:2])
    kept.add("bloom", SHORT[1:2])
    again = Kept(path)
    assert list(again.by_type) == ["bart", "bloom"]
    assert [str(row) for row in again.by_type["bart"]] == [str(row) for row in LONG[:2]]
