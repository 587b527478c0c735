"""Options that the commands `study` and `paper` share."""

import argparse
import os
from pathlib import Path

from captum_vz.cli.errors import CommandError
from captum_vz.study.methods import METHODS


def add_methods(sub: argparse.ArgumentParser) -> None:
    """Add the options for methods, batches and the progress bar."""
    slow = ", ".join(name for name, method in METHODS.items() if method.slow)
    sub.add_argument(
        "--methods", nargs="+", metavar="METHOD", help=f"of {', '.join(METHODS)} (default: all except {slow})"
    )
    sub.add_argument("--batch-size", type=positive, default=32, help="the number of sentences in a batch")
    sub.add_argument("--quiet", action="store_true", help="no progress bar, and nothing on stdout")


def positive(word: str) -> int:
    """A number of the command line that is at least 1."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is computed."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise CommandError(f"cannot write {folder}: {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise CommandError(f"cannot write {folder}: {existing} is not writable.")


def is_main_process() -> bool:
    """Whether this process is the only one, or the main one under `accelerate launch`."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)
