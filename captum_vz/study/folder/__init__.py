"""The folder of a study: what made its files, and the parts that hold its rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from filelock import FileLock

from captum_vz._files import TEMPORARY, safe_name, write_whole
from captum_vz.errors import needs_extra
from captum_vz.study.examples import Example
from captum_vz.visualization.pictures.files import weights_fingerprint

with needs_extra("captum_vz.study", "study"):
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


def fingerprint(model: Any, tokenizer: Any, weights: str | None = None) -> str:
    """A digest of a model's class, of all its weights (given if their digest is known), and of the vocabulary."""
    vocabulary = digest(sorted(tokenizer.get_vocab().items()))
    return digest(type(model).__name__, weights or weights_fingerprint(model), len(tokenizer), vocabulary)


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
        methods: The methods in a part of a study, and the identity of their code.
        metrics: The metrics in it, and the identity of their code.
        has_scores: Whether it holds the scores, or only metrics of scores that another part holds.
        made_by: The model, the device and the versions that made it, for a reader.
    """

    weights: str
    made_of: str
    again: bool = False
    methods: Mapping[str, str] = {}
    metrics: Mapping[str, str] = {}
    has_scores: bool = True
    made_by: Mapping[str, str] = {}


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


def read_part(part: Part, columns: Sequence[str] | None = None, coded: bool = False) -> Any:
    """The rows of a part, a table of pyarrow. Its checksum and its stamp were checked when it was found.

    Args:
        part: The part.
        columns: The wanted columns. The others are not read. None: all.
        coded: Whether strings come as codes.
    """
    strings = ["example", "group", "label", "method", "metric"] if coded else None
    with _reading(part.path):
        table = parquet.ParquetFile(part.path, read_dictionary=strings).read(columns and list(columns))
    return table.replace_schema_metadata()


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


#: The group of all examples together, in a summary.
ALL: Final = "all"
MANIFEST: Final = "study.json"
SHARDS: Final = "shards"
EXAMPLES: Final = "examples"
LOCK: Final = ".study.json.lock"
#: The settings that all parts of a study share.
FIXED: Final = ("captum_vz", "content_only")


class Block(NamedTuple):
    """Some examples of a study, which are computed together.

    Attributes:
        number: Its place in the study.
        sha256: The digest of its file.
        size: How many examples it holds.
    """

    number: int
    sha256: str
    size: int


class Part(NamedTuple):
    """A file with rows of one model for one block.

    Attributes:
        path: The file.
        stamp: Which methods and metrics it holds.
    """

    path: Path
    stamp: Stamp


def blocks_of(settings: Mapping[str, Any]) -> list[Block]:
    """The blocks of a study."""
    return [Block(number, *block) for number, block in enumerate(settings["examples"]["blocks"])]


def made_of(settings: Mapping[str, Any], model: str, block: Block) -> str:
    """The digest of the settings, the model's name and the block, which each part of them holds."""
    return digest([settings[name] for name in FIXED], model, block.number, block.sha256)


def part_path(folder: Path, settings: Mapping[str, Any], model: str, block: Block, suffix: str = "") -> Path:
    """The path of a part of a study."""
    number = list(settings["models"]).index(model)
    return folder / SHARDS / f"{number:02d}-{safe_name(model)}-{block.number:06d}{suffix}.parquet"


def parts_of(folder: Path, settings: Mapping[str, Any], model: str, block: Block) -> list[Part]:
    """The finished parts of a model and a block. Other files in the folder, such as copies, are no parts.

    Raises:
        ValueError: A part is broken, or does not belong here.
    """
    first = part_path(folder, settings, model, block)
    named = re.compile(rf"{re.escape(first.stem)}(-[0-9a-f]{{8}})?\.parquet")
    found = []
    for path in sorted(first.parent.glob(f"{first.stem}*.parquet")) if first.parent.is_dir() else ():
        if named.fullmatch(path.name):
            stamp = read_stamp(path)
            check_made_of(path, stamp, made_of(settings, model, block))
            found.append(Part(path, stamp))
    return found


def read_examples(folder: Path, block: Block) -> list[Example]:
    """The examples of a block.

    Raises:
        ValueError: The file is broken, or has changed.
    """
    path = _examples_path(folder, block.number)
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != block.sha256:
        raise ValueError(f"{path} is missing or has changed: pass the study's examples and a new folder.")
    return [Example.from_dict(json.loads(line)) for line in data.decode().splitlines()]


def claim(
    folder: Path,
    fixed: Mapping[str, Any],
    models: Sequence[str],
    methods: Mapping[str, str],
    metrics: Mapping[str, str],
    examples: Sequence[Example],
    block_size: int,
) -> tuple[dict[str, Any], list[Block]]:
    """Add models, methods, metrics and examples to the study in a folder, which may be new.

    Returns:
        The settings of the study, and the blocks that hold the passed examples.

    Raises:
        ValueError: The folder holds something else, a study with other fixed settings, or other examples of an id.
        OSError: The folder cannot be written.
    """
    manifest = folder / MANIFEST
    entries = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    ours = (EXAMPLES, LOCK)
    if any(name not in ours and not name.endswith(TEMPORARY) for name in entries) and not manifest.is_file():
        raise ValueError(f"{folder} is not empty, and holds no {MANIFEST}: pass a new folder or that of a study.")
    if manifest.is_file():
        _check_fixed(folder, fixed, read_settings(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {manifest}: {error.strerror}") from error
    with FileLock(folder / LOCK):
        before = read_settings(folder) if manifest.is_file() else {}
        if before:
            _check_fixed(folder, fixed, before)
        old = blocks_of(before) if before else []
        known = {example.id: (example, block) for block in old for example in read_examples(folder, block)}
        for example in examples:
            if example.id in known and known[example.id][0] != example:
                raise ValueError(
                    f"example {example.id!r} is in {folder} with other contents: pass another id, or another folder."
                )
        check_groups([*examples, *(example for example, _ in known.values())])
        new = [example for example in examples if example.id not in known]
        added = [
            _write_examples(folder, len(old) + number, new[start : start + block_size])
            for number, start in enumerate(range(0, len(new), block_size))
        ]
        blocks = [*old, *added]
        settings = {
            **fixed,
            "models": list(dict.fromkeys([*before.get("models", ()), *models])),
            "methods": before.get("methods", {}) | dict(methods),
            "metrics": before.get("metrics", {}) | dict(metrics),
            "examples": {
                "count": sum(block.size for block in blocks),
                "blocks": [[block.sha256, block.size] for block in blocks],
            },
        }
        if "provenance" in before:
            settings["provenance"] = before["provenance"]
        if settings != before:
            write_whole(manifest, json.dumps(settings, indent=2, ensure_ascii=False).encode())
    wanted = {known[example.id][1].number for example in examples if example.id in known}
    return settings, [block for block in blocks if block.number in wanted or block in added]


def check_groups(examples: Sequence[Example]) -> None:
    """Refuse a group whose name a summary has for all examples, unless it is the only one."""
    groups = {example.group for example in examples}
    if ALL in groups and len(groups) > 1:
        raise ValueError(
            f"a group is called {ALL!r}, which names all examples in a summary: give the group another name."
        )


def _check_fixed(folder: Path, fixed: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    changed = [name for name in fixed if before.get(name) != fixed[name]]
    if changed:
        changes = "; ".join(f"{name} was {before.get(name)!r} and is {fixed[name]!r}" for name in changed)
        raise ValueError(f"{folder} holds a study with other settings: {changes}. Pass those, or another folder.")


def _examples_path(folder: Path, number: int) -> Path:
    return folder / EXAMPLES / f"{number:06d}.jsonl"


def _write_examples(folder: Path, number: int, examples: Sequence[Example]) -> Block:
    data = "".join(f"{json.dumps(example.to_dict(), sort_keys=True)}\n" for example in examples).encode()
    write_whole(_examples_path(folder, number), data)
    return Block(number, hashlib.sha256(data).hexdigest(), len(examples))


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the study in a folder.

    Raises:
        ValueError: The file is broken.
    """
    path = folder / MANIFEST
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        count, blocks = settings["examples"]["count"], settings["examples"]["blocks"]
        codes = [*settings["methods"].items(), *settings["metrics"].items()]
        names = [*settings["models"], *(word for pair in codes for word in pair)]
        sizes = [size for _, size in blocks]
        if not all(isinstance(size, int) and size > 0 for size in sizes) or sum(sizes) != count:
            raise ValueError(f"{count!r} examples in blocks of {sizes!r}"[:200])
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"the names of models, methods and metrics are {names!r}"[:200])
        if any(name not in settings for name in FIXED):
            raise ValueError(f"expected {', '.join(FIXED)}")
    # Python's JSON raises these for text that is no UTF-8 or no JSON, other JSON, and JSON that is nested too deep.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold the settings of a study ({error}): delete the folder, or pass another one."
        ) from error
    return settings
