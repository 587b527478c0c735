"""Files that are written whole or not at all, names for them, and tables as text."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Final

#: How the names of this package's temporary files end. Other programs have their own.
TEMPORARY: Final = ".captum-vz.tmp"

_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PERMISSION: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, and renames it after all of it has reached the disk.

    At any moment and after any interruption, the file is whole or missing. Two processes may write the same file. An
    OSError says what to do: no space, no permission, no folder.
    """
    temporary = path.with_name(f".{path.name[:40]}.{socket.gethostname()}.{os.getpid()}{TEMPORARY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some disks notice only then that they are full
        os.replace(temporary, path)
    except OSError as error:
        remedy = "free space, and " if error.errno in _SPACE else ""
        remedy = "make the folder writable, and " if error.errno in _PERMISSION else remedy
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}. Finished files stay: {remedy}start again with the same settings "
            "to continue",
        ) from error
    finally:
        with suppress(OSError):  # only the first error is reported
            temporary.unlink(missing_ok=True)


def write_file(path: str | PathLike[str], content: str | bytes) -> None:
    """Writes a file that a user named. After an error or Ctrl-C, an older file is as it was, and a new one is gone.

    It is written in place: links, rights, owners, devices and pipes are those that the user has made.
    """
    named, older = Path(path), None
    existed, is_file = named.exists(), named.is_file()
    if is_file:
        with suppress(OSError):  # a file that may be written and not read
            older = named.read_bytes()
    try:
        with open(named, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if not existed or is_file:
                os.fsync(file.fileno())  # some disks notice only then that they are full
    except BaseException as error:
        with suppress(OSError):  # only the first error is reported
            if older is not None:
                named.write_bytes(older)
            elif not existed:
                os.unlink(os.path.realpath(named))
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def remove_temporary(folder: Path) -> None:
    """Removes what killed processes of this package on this machine have left. Other processes are still writing."""
    ours = re.compile(rf"\..+\.{re.escape(socket.gethostname())}\.(\d+){re.escape(TEMPORARY)}")
    for path in folder.rglob(f".*{TEMPORARY}"):
        name = ours.fullmatch(path.name)
        if name is not None and not _is_running(int(name[1])):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere a signal may end the process
        return True
    try:
        os.kill(process, 0)
    except OSError as error:  # another error: it belongs to somebody else
        return not isinstance(error, ProcessLookupError)
    return True


def safe_name(name: str) -> str:
    """A name for a file or a folder: the given one if it is safe, otherwise a similar one with a digest.

    >>> safe_name("bert-base-uncased"), safe_name("a/b"), safe_name("..")
    ('bert-base-uncased', 'a-b-c14cddc0', 'model-5ec1f7e7')
    """
    safe = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[-60:].strip(".")
    if safe and safe == name and not safe.endswith((".csv", ".md", ".png")):  # these are names of results
        return name
    return f"{safe or 'model'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


def comma_separated(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as comma-separated values. NUL becomes an escape, because csv of Python 3.10 refuses it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([one.replace("\0", "\\x00") if isinstance(one, str) else one for one in row])
    return text.getvalue()


def written(text: str, path: str | Path | None) -> str:
    """The text, also written to `path` if it is given. Halves of surrogate pairs become escapes in the file."""
    if path is not None:
        write_file(path, text.encode(errors="backslashreplace"))
    return text
