"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, and renames it after all of it has reached the disk.

    At any moment and after any interruption, the file is whole or missing. Two processes may write the same file.

    Raises:
        OSError: The file could not be written: no space, no permission, no folder. The message says what to do.
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
            f"cannot write {path}: {error.strerror}. Finished files stay: free space or make the folder writable, "
            "and start again with the same settings to continue",
        ) from error


def remove_temporary(folder: Path) -> None:
    """Removes temporary files of killed processes."""
    for path in folder.rglob(f".*{TEMPORARY}"):
        _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):  # the first error is the one to report
        path.unlink(missing_ok=True)
