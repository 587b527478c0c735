"""Errors that the user of the command can correct, and remarks: one line each on stderr."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from captum_vz._start import INTERRUPTED


class CommandError(Exception):
    """Ends the command with its message, one line on stderr, and an exit status."""

    status = 2


class StoppedError(CommandError):
    """Ctrl-C has ended a study, which can continue."""

    status = INTERRUPTED


def tell(message: str) -> None:
    """Print one line on stderr."""
    if sys.stderr is not None:  # a shell may have closed it
        with suppress(OSError):
            print(f"captum-vz: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def remarks_as_lines() -> Iterator[None]:
    """Print each warning for users once, as one line on stderr, and no warning for developers."""
    told = set()

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning and str(message) not in told:
            told.add(str(message))
            tell(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


@contextmanager
def study_errors() -> Iterator[None]:
    """Turn the errors of a study, a full disk and Ctrl-C into a `CommandError`."""
    try:
        yield
    except OSError as error:
        where = f"cannot use {error.filename}: " if error.filename else ""
        raise CommandError(f"{where}{error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt as error:
        raise StoppedError("stopped. The same command continues from here.") from error
