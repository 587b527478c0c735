"""How long the way through the code is, from the user's call to the subtraction of a zeroed value."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import BertConfig, BertModel

import captum_vz
from captum_vz import ValueZeroing, find_layers
from captum_vz._engine.replay.packed import context_change

ROOT = str(Path(captum_vz.__file__).parent)
MOST_FILES, MOST_FRAMES, MOST_FUNCTIONS, MOST_STATEMENTS = 22, 11, 285, 1050
# Python 3.12 runs these within the function around them.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")


def our_file(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path if path.startswith(ROOT) else None


def lines_of_statements(path: str) -> set[int]:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}


def frames_above(frame: FrameType) -> list[str]:
    stack, outer = [], frame.f_back
    while outer is not None:
        if name := our_file(outer):
            stack.append(f"{name.removeprefix(ROOT)}:{outer.f_code.co_name}")
        outer = outer.f_back
    return stack[::-1]


def test_one_call_is_short() -> None:
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=30, **size)).eval()
    ids = torch.randint(3, 30, (1, 8))
    method = ValueZeroing(model, find_layers(model)[-1])
    method.attribute(ids)  # imports and caches
    functions: set[CodeType] = set()
    lines: dict[str, set[int]] = {}
    above: list[list[str]] = []

    def note(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        path = our_file(frame)
        if path is None:
            return None
        if event == "call":
            functions.add(frame.f_code)
            if frame.f_code is context_change.__code__:
                above.append(frames_above(frame))
        if event == "line":
            lines.setdefault(path, set()).add(frame.f_lineno)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        method.attribute(ids)
    finally:
        sys.settrace(before)
    assert above
    assert all(len(stack) <= MOST_FRAMES for stack in above), "\n".join(max(above, key=len))
    assert len(lines) <= MOST_FILES, "\n".join(sorted(lines))
    named = Counter(code.co_filename for code in functions if code.co_name not in COMPREHENSIONS)
    assert named.total() <= MOST_FUNCTIONS, named
    statements = {path: len(ran & lines_of_statements(path)) for path, ran in lines.items()}
    assert sum(statements.values()) <= MOST_STATEMENTS, statements
