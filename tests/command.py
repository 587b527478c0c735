"""How tests start the command line."""

import csv
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from captum_vz.cli import main

Output = pytest.CaptureFixture[str]  # what a command has printed


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can be longer than 1,000 bytes. The files of these tests are longer."""
    import resource  # on POSIX only

    importlib.import_module("torch.distributed.nn")  # that of torch 2.6 writes a file when it is imported
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(capsys: Output, *arguments: str, run: Callable[[list[str]], int] = main, name: str = "captum-vz") -> str:
    """The error of a command: one line on stderr, and nothing on stdout."""
    try:
        status: Any = run(list(arguments))
    except SystemExit as end:  # argparse exits like this
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"{name}: [^\n]+\n", err), err
    return err


def ran(capsys: Output, *arguments: str) -> Any:
    """What a command that ends well has printed: `out` and `err`."""
    assert main([*arguments]) == 0
    return capsys.readouterr()


def forget(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Import these packages again, for one test."""
    for package in packages:
        # The import also sets the package's name in its parent, so it is restored with the modules.
        parent, _, name = package.rpartition(".")
        module = importlib.import_module(package)
        monkeypatch.setattr(importlib.import_module(parent), name, module)
    for name in [name for name in sys.modules if name.startswith(packages)]:
        monkeypatch.delitem(sys.modules, name)


def assert_records_equal_file(records: list[dict[str, Any]], file: Path) -> None:
    """What a command prints as JSON is what it has written as CSV."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(records) == len(rows)
    for record, row in zip(records, rows, strict=True):
        assert list(record) == list(row)
        for name, value in record.items():
            if isinstance(value, (int, float)):
                assert value == pytest.approx(float(row[name]), rel=1e-12, abs=1e-14)
            else:
                assert (value or "") == row[name]
