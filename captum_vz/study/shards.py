"""What a study's folder is made of: its settings, and the files that its rows are in."""

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
    """The rows of one model for some of the examples: from which one on, and where they are written."""

    model: str
    start: int
    path: Path


def shards_of(folder: Path, settings: Mapping[str, Any]) -> list[Shard]:
    """All shards that a study has, finished or not; any other file beside them, such as a copy, is none of its."""
    size = settings["shard_size"]
    return [
        Shard(name, start, folder / SHARDS / f"{number:02d}-{_file_name(name)}-{start // size:06d}.parquet")
        for number, name in enumerate(settings["models"])
        for start in range(0, settings["examples"]["count"], size)
    ]


def read_settings(folder: Path) -> dict[str, Any]:
    """How the study in a folder was run.

    Raises:
        ValueError: The file that says it is broken.
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
    """Says which Parquet file of a study is broken, and that it can be made again."""
    try:
        yield
    except (ValueError, OSError) as error:  # all that pyarrow raises for bytes that are no Parquet
        raise ValueError(
            f"{path} cannot be read ({error}). If it is broken, delete it, and start the study again with the same "
            "settings: what it held is computed anew."
        ) from error


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "-", model)[-60:]
