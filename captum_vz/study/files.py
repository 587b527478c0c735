"""Files that are whole or not there at all."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, and renames it when all of it has reached the disk.

    Whoever reads the folder, at any moment and after any accident, finds the file whole or does not find it. Two
    processes that write the same file do not disturb each other.

    Raises:
        OSError: It could not be written: no space, no right, no folder. The message says what to do.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}. What is finished stays: free space or make the folder writable, "
            "and start again with the same settings to go on from there",
        ) from error


def remove_temporary(folder: Path) -> None:
    """Removes what killed processes have left behind."""
    for path in folder.rglob(f".*{TEMPORARY}"):
        _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):  # it would say nothing that the first error has not said
        path.unlink(missing_ok=True)
