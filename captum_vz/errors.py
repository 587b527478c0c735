"""What the package raises where it gives no number, or where a library is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ArgumentError", "RefusedError", "UnsupportedLayerError"]


class RefusedError(AssertionError):
    """A number was refused, because it could not be trusted or because the call was wrong.

    An `AssertionError`, as Captum raises for misuse, but raised under ``python -O`` too. Catch this class to go on
    with the next method, layer or model. An `AssertionError` of another class comes from the model's own code.
    """


class ArgumentError(RefusedError, ValueError):
    """An argument has a wrong type, shape or value. The message says what was passed and what to pass.

    Also a `ValueError`, as Python's own functions raise for a wrong value.
    """


class UnsupportedLayerError(RefusedError):
    """A layer cannot be explained. The message names its class, what was found, and what to pass instead."""


@contextmanager
def needs_extra(user: str, extra: str) -> Iterator[None]:
    """Name the extra in the error of an import that fails inside of the `with` block.

    Args:
        user: What needs the import, such as "captum_vz.metrics".
        extra: The extra of the package that installs the library, such as "study".

    Raises:
        ModuleNotFoundError: The library is not installed. The message names it and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{user} needs {error.name}, which comes with the extra '{extra}': pip install \"captum-vz[{extra}]\"",
            name=error.name,
        ) from error
