"""Parquet files that say what made them, and notice a changed bit."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from captum_vz.metrics.extra import study_extra

with study_extra("captum_vz.study"):
    import pyarrow as pa
    from pyarrow import parquet

if TYPE_CHECKING:
    from pandas import DataFrame

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
