"""Ctrl-C while the command starts: one line and the status 130. The import of torch takes seconds.

Python would print a traceback there, and torch's own code ends the process if it is interrupted in the middle.
"""

import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import PurePath
from typing import Any

INTERRUPTED = 130  # the status of a program that Ctrl-C has ended, in every shell


def started() -> None:
    """Give Ctrl-C back to Python: from here on the command catches it."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that shows colours, and the user has not refused them, see https://no-color.org."""
    shown = stream is not None and stream.isatty()
    return bool(shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


def room() -> int | None:
    """The columns of the terminal that stdout is; None if stdout is no terminal."""
    is_shown = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_shown else None


def tell(message: str) -> None:
    """Print one line on stderr, as the command does for errors and remarks."""
    if sys.stderr is not None:  # a shell may have closed it
        rest = "\x1b[K" if is_terminal(sys.stderr) else ""  # of a longer line that told the current work
        with suppress(OSError):
            print(f"captum-vz: {' '.join(message.split())}{rest}", file=sys.stderr)


def _stop(*_: Any) -> None:
    with suppress(OSError):  # a shell may have closed it
        os.write(2, b"captum-vz: stopped.\n")
    os._exit(INTERRUPTED)


def _is_command() -> bool:
    """Whether this process is `captum-vz` or `python -m captum_vz`, and not a program that imports the package."""
    program, words = (getattr(sys, "argv", None) or [""])[0], sys.orig_argv
    if program == "-m":  # until Python has found the module
        return words[words.index("-m") + 1 :][:1] == ["captum_vz"]
    return PurePath(program).stem == "captum-vz"


if (
    _is_command()
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _stop)
