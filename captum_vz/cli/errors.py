"""What the person who typed the command can put right."""

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """Ends the command with its message, one line on stderr, and exit status 2."""


@contextmanager
def study_errors() -> Iterator[None]:
    """What studies raise for what was typed or for a full disk, and Ctrl-C, as ends of the command."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.strerror or error}") from error
    except ValueError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt as error:
        raise CommandError("stopped. The same command goes on from here.") from error
