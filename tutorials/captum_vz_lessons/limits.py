"""Limits of a process that runs a student's notebook: no network, no programs, no writes elsewhere, little memory.

The limits stop accidents, not malicious code: run that in a container.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# Events of Python's audit hooks (PEP 578), and which of their arguments are paths.
_CHANGES: Final = "os.chmod os.chown os.mkdir os.remove os.rmdir os.truncate os.utime shutil.rmtree"
_LINKS: Final = {"os.link": (1,), "os.symlink": (1,), "os.rename": (0, 1)}
_WRITES: Final = dict.fromkeys(_CHANGES.split(), (0,)) | _LINKS
_NETWORK: Final = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname")
_PROGRAMS: Final = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "pty.spawn")
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit_process(folder: str | Path, memory: float) -> None:
    """Limit this process until it ends: files are written only into `folder`, and the folders in it.

    `memory` is what it may take beyond what it has, in GiB. Windows and macOS do not hold to it.
    """
    home = os.path.realpath(folder)

    def check_place(path: Any) -> None:
        if path is None or isinstance(path, int):  # a file that is open
            return
        place = os.path.realpath(os.fsdecode(path))
        if os.path.commonpath([home, place]) != home and not place.startswith("/dev/"):
            raise PermissionError(f"{place} is outside of {home}: a graded notebook writes only there.")

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if (mode and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITING):
                check_place(path)
        elif event in _WRITES:
            for index in _WRITES[event]:
                check_place(arguments[index])
        elif event in _NETWORK and not (event == "socket.connect" and isinstance(arguments[1], str)):  # a local pipe
            raise PermissionError("a graded notebook has no network.")
        elif event in _PROGRAMS:
            raise PermissionError("a graded notebook starts no programs.")

    _limit_memory(memory)
    sys.addaudithook(check)


def _limit_memory(memory: float) -> None:
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limits, and a system may forbid them
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        size = pages * resource.getpagesize() + int(memory * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
