"""The room `folded` can be deleted whole. That maps stay the same without it is tested in test_folded.py."""

from __future__ import annotations

import re
from pathlib import Path

import captum_vz
from captum_vz._engine import value_zeroing
from captum_vz._engine.replay.folded import FoldedReplay

ENGINE = Path(captum_vz.__file__).parent / "_engine"
ROOM = ENGINE / "replay" / "folded"


def test_only_driver_imports_folded() -> None:
    """The driver's one import and one entry of `REPLAYS` are all that names the room."""
    importing = re.compile(r"^\s*(from|import)\s+\S*\bfolded\b", re.MULTILINE)
    outside = [path for path in ENGINE.parent.rglob("*.py") if ROOM not in path.parents]
    found = {path: importing.findall(path.read_text(encoding="utf-8")) for path in outside}
    assert {path.relative_to(ENGINE).as_posix(): len(lines) for path, lines in found.items() if lines} == {
        "value_zeroing.py": 1
    }
    assert [isinstance(replay, FoldedReplay) for replay in value_zeroing.REPLAYS].count(True) == 1
