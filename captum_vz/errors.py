"""What the package raises where it gives no number."""

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
