"""What every test shares: no network, no window, one thread, one seed, Ctrl-C as it is in a terminal."""

import os
import signal

# Before transformers and matplotlib are imported: they read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

# A shell that runs a job in the background lets it ignore Ctrl-C, and the programs that tests start inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the models are so small that handing out work costs more than doing it


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pytest_report_header() -> str:
    return "fast tests: a quarter of an hour on two cores; the others run with: pytest -m slow, pytest -m exhaustive"
