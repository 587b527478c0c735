"""The folder of a study: what made its files, and the shards of its rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from captum_vz._files import TEMPORARY, safe_name, write_new
from captum_vz.metrics.extra import study_extra

with study_extra("captum_vz.study"):
    import pyarrow as pa
    from pyarrow import parquet

if TYPE_CHECKING:
    from pandas import DataFrame


# A model and its tokenizer, or a function that loads them. It is called only if there is work left for this model.
Loaded = tuple[Any, Any]
Source = Loaded | Callable[[], Loaded]


@contextmanager
def on_device(source: Source, device: torch.device) -> Iterator[Loaded]:
    """A model on the device of this process inside of the `with` block, and on its own device after it."""
    model, tokenizer = source() if callable(source) else source
    before = model.device
    model.to(device)
    try:
        yield model, tokenizer
    finally:
        model.to(before)


def fingerprint(model: Any, tokenizer: Any) -> str:
    """A digest of 64 numbers from each of a model's parameters, and of the vocabulary's size."""
    digest = hashlib.sha256(f"{type(model).__name__} {len(tokenizer)}".encode())
    for name, values in model.state_dict().items():
        flat = values.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)].double().cpu()
        digest.update(f"{name} {tuple(values.shape)} {values.dtype} {some.tolist()}".encode())
    return digest.hexdigest()


_STAMP: Final = b"captum_vz.stamp"
_CHECKSUM: Final = b"captum_vz.sha256"
# The checksum of a file is computed of its bytes, with this text in the place of the checksum.
_BLANK: Final = b"the sha256 of this file, with this text in its place".ljust(64, b".")
_WRITTEN_CHECKSUM: Final = re.compile(re.escape(_CHECKSUM) + rb"[^0-9a-f]{1,4}([0-9a-f]{64})", re.DOTALL)


class Stamp(NamedTuple):
    """What a file was made of.

    Attributes:
        weights: The fingerprint of the model.
        made_of: A digest of everything else, see :func:`digest`.
        again: Whether examples in it ran out of memory, and are computed again at the next start.
    """

    weights: str
    made_of: str
    again: bool = False


def digest(*parts: Any) -> str:
    """A digest of values that JSON can hold: the settings of a study, and the place of a file in it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def to_parquet(table: Any, stamp: Stamp) -> bytes:
    """A table of pyarrow as a Parquet file with its stamp and its checksum."""
    about = {_STAMP: json.dumps(stamp).encode(), _CHECKSUM: _BLANK}
    buffer = pa.BufferOutputStream()
    parquet.write_table(table.replace_schema_metadata(about), buffer, compression="zstd")
    data: bytes = buffer.getvalue().to_pybytes()
    return data.replace(_BLANK, hashlib.sha256(data).hexdigest().encode())


def read_stamp(path: Path) -> Stamp:
    """The stamp of a file.

    Raises:
        ValueError: The file is broken.
    """
    with _reading(path):
        return _stamp_of(_whole_bytes(path))


def read_table(path: Path, made_of: str, columns: Sequence[str] | None = None) -> tuple[DataFrame, Stamp]:
    """The rows of a file, and its stamp.

    Args:
        path: The file.
        made_of: The digest that its stamp must hold.
        columns: The wanted columns. None: all.

    Raises:
        ValueError: The file is broken, or was made of something else.
    """
    with _reading(path):
        data = _whole_bytes(path)
        stamp = _stamp_of(data)
        table = parquet.read_table(pa.BufferReader(data), columns=None if columns is None else list(columns))
    check_made_of(path, stamp, made_of)
    return table.to_pandas(), stamp


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the broken Parquet file in an error inside of the `with` block, and say how to replace it."""
    try:
        yield
    except (ValueError, OSError) as error:  # the errors of pyarrow for bytes that are not Parquet
        raise ValueError(
            f"{path} cannot be read ({error}). If it is broken, delete it, and start the study again with the same "
            "settings. Its rows are then computed again."
        ) from error


def check_made_of(path: Path, stamp: Stamp, made_of: str) -> None:
    """Refuse the file of another study, of other settings, or of another place in this study."""
    if stamp.made_of != made_of:
        raise ValueError(
            f"{path} does not belong here: other settings or examples made it. Delete it, and start the study again "
            "with the same settings. Its rows are then computed again."
        )


def check_weights(path: Path, name: str, stamp: Stamp, weights: str) -> None:
    """Refuse a file that a model with other weights has made."""
    if stamp.weights != weights:
        raise ValueError(
            f"{path} was made with other weights than those of the model {name!r} now, or in the first file: pass that "
            "model, or another folder."
        )


def _whole_bytes(path: Path) -> bytes:
    """The bytes of a file, checked before Arrow reads them."""
    data = path.read_bytes()
    checksum = _WRITTEN_CHECKSUM.search(data)
    if checksum is None:
        raise ValueError("it does not hold its checksum")
    if hashlib.sha256(data.replace(checksum[1], _BLANK)).hexdigest().encode() != checksum[1]:
        raise ValueError("its bytes have changed since it was written")
    return data


def _stamp_of(data: bytes) -> Stamp:
    return Stamp(*json.loads(parquet.read_metadata(pa.BufferReader(data)).metadata[_STAMP]))


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
