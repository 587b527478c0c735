"""The files in a study's folder: its settings, and the shards that hold its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

MANIFEST: Final = "study.json"
SHARDS: Final = "shards"


class Shard(NamedTuple):
    """The rows of one model for some of the examples: the index of the first one, and the file."""

    model: str
    start: int
    path: Path


def shards_of(folder: Path, settings: Mapping[str, Any]) -> list[Shard]:
    """All shards of a study, finished or not. Other files in the folder, such as copies, are not shards."""
    size = settings["shard_size"]
    return [
        Shard(name, start, folder / SHARDS / f"{number:02d}-{_file_name(name)}-{start // size:06d}.parquet")
        for number, name in enumerate(settings["models"])
        for start in range(0, settings["examples"]["count"], size)
    ]


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the study in a folder.

    Raises:
        ValueError: The file is broken.
    """
    path = folder / MANIFEST
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} does not hold the settings of a study ({error}): delete the folder, or pass another one."
        ) from error
    return settings


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the broken Parquet file in an error inside of the `with` block, and say how to replace it."""
    try:
        yield
    except (ValueError, OSError) as error:  # the errors of pyarrow for bytes that are not Parquet
        raise ValueError(
            f"{path} cannot be read ({error}). If it is broken, delete it, and start the study again with the same "
            "settings. Its rows are then computed again."
        ) from error


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "-", model)[-60:]
