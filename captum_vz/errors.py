"""What the package raises where it gives no number, or where a library is not installed."""

import re
from collections.abc import Iterator, Mapping
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

    Args:
        message: The message. It begins with the name of the argument, if there is one. Other arguments of the same call
            are written as `name=`.
        argument: The argument that is wrong. None: no single argument is.
    """

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


class UnsupportedLayerError(RefusedError):
    """A layer cannot be explained. The message names its class, what was found, and what to pass instead."""


def renamed(message: str | BaseException, names: Mapping[str, str]) -> str:
    """A message with the `names` of arguments that a user of a surface knows, such as the options of the command.

    The message is an error, or a text in which arguments are written as `name=`.

    >>> names = {"token": "--token", "foil": "--foil"}
    >>> renamed(ArgumentError("token is 99: leave foil= or tokenizer= out", "token"), names)
    '--token is 99: leave --foil or tokenizer= out'
    >>> renamed("token=3 is explained.", names)
    '--token 3 is explained.'
    """
    text, argument = str(message), getattr(message, "argument", None)
    if argument is not None and argument in names and text.startswith(argument):
        text = names[argument] + text[len(argument) :]

    def written(found: re.Match[str]) -> str:
        name = names.get(found[1])
        return found[0] if name is None else f"{name} {found[2]}".rstrip()

    return re.sub(r"(?<![\w.-])([a-z_]+)=([\w'\"(\[-]?)", written, text)


@contextmanager
def needs_extra(user: str, extra: str) -> Iterator[None]:
    """Name the extra that installs the library in the error of an import that fails inside of the `with` block.

    `user` is what needs the import, such as "captum_vz.metrics".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{user} needs {error.name}, which comes with the extra '{extra}': pip install \"captum-vz[{extra}]\"",
            name=error.name,
        ) from error
