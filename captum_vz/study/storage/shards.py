"""The files in a study's folder: its settings, and the shards that hold its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from captum_vz.study.storage.files import TEMPORARY, safe_name, write_new
from captum_vz.study.storage.stamped import digest

MANIFEST: Final = "study.json"
SHARDS: Final = "shards"


class Shard(NamedTuple):
    """The rows of one model for some of the examples.

    Attributes:
        model: The name of the model.
        start: The index of the first example.
        path: The file.
        made_of: A digest of the settings, the model's name and the index.
    """

    model: str
    start: int
    path: Path
    made_of: str


def shards_of(folder: Path, settings: Mapping[str, Any]) -> list[Shard]:
    """All shards of a study, finished or not. Other files in the folder, such as copies, are not shards."""
    size, of_study = settings["shard_size"], digest(settings)
    return [
        Shard(
            name,
            start,
            folder / SHARDS / f"{number:02d}-{safe_name(name)}-{start // size:06d}.parquet",
            digest(of_study, name, start),
        )
        for number, name in enumerate(settings["models"])
        for start in range(0, settings["examples"]["count"], size)
    ]


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings to a folder, or check them there. Of several processes, one writes them.

    Raises:
        ValueError: The folder holds something else, or a study with other settings.
        OSError: The folder cannot be written.
    """
    manifest = folder / MANIFEST
    entries = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if any(not name.endswith(TEMPORARY) for name in entries) and not manifest.is_file():
        raise ValueError(f"{folder} is not empty, and holds no {MANIFEST}: pass a new folder or that of a study.")
    data = json.dumps(settings, indent=2, ensure_ascii=False).encode()
    if not manifest.is_file() and write_new(manifest, data):
        return
    before = read_settings(folder)
    changed = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if changed:
        changes = "; ".join(f"{name} was {before.get(name)!r} and is {settings.get(name)!r}" for name in changed)
        raise ValueError(f"{folder} holds a study with other settings: {changes}. Pass those, or another folder.")


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the study in a folder.

    Raises:
        ValueError: The file is broken.
    """
    path = folder / MANIFEST
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        count, size = settings["examples"]["count"], settings["shard_size"]
        names = [*settings["models"], *settings["methods"], *settings["metrics"]]
        if not isinstance(count, int) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{count!r} examples in shards of {size!r}")
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"the names of models, methods and metrics are {names!r}"[:200])
    # Python's JSON raises these for text that is no UTF-8 or no JSON, other JSON, and JSON that is nested too deep.
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold the settings of a study ({error}): delete the folder, or pass another one."
        ) from error
    return settings
