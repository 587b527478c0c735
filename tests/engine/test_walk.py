"""How long the way through the code is, from the user's call to the subtraction of a zeroed value."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch
from transformers import BertConfig, BertModel

import captum_vz
from captum_vz import ValueZeroing, find_layers
from captum_vz._engine.replay.packed import context_change

ROOT = str(Path(captum_vz.__file__).parent)
MOST_FILES, MOST_FRAMES = 27, 11


def our_file(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path if path.startswith(ROOT) else None


def test_one_call_is_short() -> None:
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=30, **size)).eval()
    ids = torch.randint(3, 30, (1, 8))
    method = ValueZeroing(model, find_layers(model)[-1])
    method.attribute(ids)  # imports and caches
    files: set[str] = set()
    above: list[list[str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = our_file(frame)
        if event != "call" or path is None:
            return
        files.add(path)
        if frame.f_code is context_change.__code__:
            stack, outer = [], frame.f_back
            while outer is not None:
                if name := our_file(outer):
                    stack.append(f"{name.removeprefix(ROOT)}:{outer.f_code.co_name}")
                outer = outer.f_back
            above.append(stack[::-1])

    sys.setprofile(note)
    try:
        method.attribute(ids)
    finally:
        sys.setprofile(None)
    assert above
    assert all(len(stack) <= MOST_FRAMES for stack in above), "\n".join(max(above, key=len))
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
