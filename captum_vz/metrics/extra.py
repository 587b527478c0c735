"""Import the libraries of the extra `study`, or say how to install them."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["study_extra"]


@contextmanager
def study_extra(user: str) -> Iterator[None]:
    """Name the extra in the error of an import that fails inside of the `with` block.

    Args:
        user: What needs the import, such as "captum_vz.metrics".

    Raises:
        ModuleNotFoundError: The library is not installed. The message names it and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{user} needs {error.name}, which comes with the extra 'study': pip install \"captum-vz[study]\"",
            name=error.name,
        ) from error
