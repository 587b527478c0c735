"""The folder of a study: files that are whole or missing, what made them, and the shards of its rows."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from captum_vz.metrics.extra import study_extra

with study_extra("captum_vz.study"):
    import pyarrow as pa
    from pyarrow import parquet

if TYPE_CHECKING:
    from pandas import DataFrame

#: How the names of this package's temporary files end. Other programs have their own.
TEMPORARY: Final = ".captum-vz.tmp"

_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PERMISSION: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR}


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name, and renames it after all of it has reached the disk.

    At any moment and after any interruption, the file is whole or missing. Two processes may write the same file.

    Raises:
        OSError: The file could not be written: no space, no permission, no folder. The message says what to do.
    """
    with _written(path, data) as temporary:
        os.replace(temporary, path)


def write_new(path: Path, data: bytes) -> bool:
    """Writes a file as :func:`write_whole` does, unless there is one. Of several processes, one writes it.

    Returns:
        Whether this call has written it.
    """
    with _written(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            with suppress(FileExistsError), open(path, "xb") as file:
                file.write(data)
                return True
            return False
    return True


@contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """A temporary file that holds the data, in the folder of `path`. It is gone after the `with` block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_beside(path) as temporary:
            write_through(temporary, data)
            yield temporary
    except OSError as error:
        remedy = "free space, and " if error.errno in _SPACE else ""
        remedy = "make the folder writable, and " if error.errno in _PERMISSION else remedy
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}. Finished files stay: {remedy}start again with the same settings "
            "to continue",
        ) from error


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A name for a temporary file in the folder of `path`. A file of that name is gone after the `with` block."""
    temporary = path.with_name(f".{path.name[:40]}.{socket.gethostname()}.{os.getpid()}{TEMPORARY}")
    try:
        yield temporary
    finally:
        with suppress(OSError):  # only the first error is reported
            temporary.unlink(missing_ok=True)


def write_through(path: Path, data: bytes) -> None:
    """Writes a file, and returns when all of it is on the disk. Some disks notice only then that they are full."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def remove_temporary(folder: Path) -> None:
    """Removes what killed processes of this package on this machine have left. Other processes are still writing."""
    ours = re.compile(rf"\..+\.{re.escape(socket.gethostname())}\.(\d+){re.escape(TEMPORARY)}")
    for path in folder.rglob(f".*{TEMPORARY}"):
        name = ours.fullmatch(path.name)
        if name is not None and not _is_running(int(name[1])):
            with suppress(OSError):
                path.unlink(missing_ok=True)


def safe_name(name: str) -> str:
    """A name for a file or a folder: the given one if it is safe, otherwise a similar one with a digest.

    >>> safe_name("bert-base-uncased"), safe_name("a/b"), safe_name("..")
    ('bert-base-uncased', 'a-b-c14cddc0', 'model-5ec1f7e7')
    """
    safe = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[-60:].strip(".")
    if safe and safe == name and not safe.endswith((".csv", ".md", ".png")):  # these are names of results
        return name
    return f"{safe or 'model'}-{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}"


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere a signal may end the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


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
