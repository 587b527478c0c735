"""What every test shares: no network, no window, one thread, one seed, Ctrl-C as it is in a terminal."""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

# Before transformers, matplotlib and torch are imported: they read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # also in threads that load weights: a fork after more cannot use its pool
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

# A shell that runs a job in the background lets it ignore Ctrl-C, and the programs that tests start inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Kernels and commands that tests start find the lessons' package, as pytest does by setup.cfg.
TUTORIALS = str(Path(__file__).parents[1] / "tutorials")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TUTORIALS, os.environ.get("PYTHONPATH")]))
torch.set_num_threads(1)  # the models are so small that handing out work costs more than doing it


# Rooms whose tests are run for each of many models and methods.
GRIDS = ["attr", "attr_norms", "captum", "engine", "engine_folded", "generation", "properties", "reference"]
GRIDS += ["rehearsal", "sweep"]
# Files that take half a minute or more. They begin first, so that no process waits for another at the end.
LONG = ["test_site.py", "test_browser.py", "test_docs.py", "test_surfaces.py", "test_report.py", "test_real_models.py"]
LONG += ["test_engines.py", "test_growing.py", "test_verify.py", "test_odd_layers.py"]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as exhaustive all cases of a test over a grid but one, which a checksum of their names draws.

    A test of two cases is no grid: each is another thing.
    """
    cases = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if item.path.parent.name in GRIDS and marks.isdisjoint({"all_cases", "exhaustive"}):
            cases[item.nodeid.partition("[")[0], "slow" in marks].append(item)
    for each in cases.values():
        for item in sorted(each, key=lambda item: crc32(item.nodeid.encode()))[1 if len(each) > 2 else 2 :]:
            item.add_marker("exhaustive")
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collections, each of which would walk through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a command runs, without a user's wishes about colors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return tmp_path


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Save a model, and its tokenizer if there is one, in a folder, whose name is returned."""

    def save(*parts: Any) -> str:
        for part in parts:
            part.save_pretrained(tmp_path / "model")
        capsys.readouterr()
        return str(tmp_path / "model")

    return save


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One browser for all tests of a process."""
    from tests.view.pages import chromium  # most processes need none

    with chromium() as found:
        yield found


def pytest_report_header() -> str:
    return "fast tests: four to fifteen minutes on two cores; the others run with: pytest -m slow, pytest -m exhaustive"
