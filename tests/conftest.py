"""What every test shares: no network, no window, one thread, one seed."""

import os

# Before transformers and matplotlib are imported: they read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

from captum_vz._engine import chunks

torch.set_num_threads(1)  # the models are so small that handing out work costs more than doing it


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fold_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the fast lane taken by models so small that its calls take longer than what it saves."""
    monkeypatch.setattr(chunks, "CALLS", {})
    monkeypatch.setattr(chunks, "CALLS_ELSEWHERE", 0)
