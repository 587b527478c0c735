"""Options that the commands `study` and `paper` share."""

import argparse

from captum_vz.study.methods import METHODS


def add_methods(sub: argparse.ArgumentParser) -> None:
    """Add the options for methods, batches and the progress bar."""
    slow = ", ".join(name for name, method in METHODS.items() if method.slow)
    sub.add_argument(
        "--methods", nargs="+", metavar="METHOD", help=f"of {', '.join(METHODS)} (default: all except {slow})"
    )
    sub.add_argument("--batch-size", type=int, default=32, help="the number of sentences in a batch")
    sub.add_argument("--quiet", action="store_true", help="no progress bar, and nothing on stdout")


def is_main_process() -> bool:
    """Whether this process is the only one, or the main one under `accelerate launch`."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)
