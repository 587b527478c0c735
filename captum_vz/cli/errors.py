"""Errors that the user of the command can correct."""

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """Ends the command with its message, one line on stderr, and exit status 2."""


@contextmanager
def study_errors() -> Iterator[None]:
    """Turn the errors of a study, a full disk and Ctrl-C into a `CommandError`."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt as error:
        raise CommandError("stopped. The same command continues from here.") from error
