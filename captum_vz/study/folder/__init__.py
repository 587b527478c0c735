"""The folder of a study: its manifest, its examples, and the locks by which processes share its work.

``study.json`` lists the models, methods and metrics, and each file of rows with its size and digest. A file counts from
the moment at which it is listed there. So a process may end at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch

from captum_vz import __version__
from captum_vz._files import TEMPORARY, safe_name, write_whole
from captum_vz.errors import needs_extra
from captum_vz.study.examples import Example
from captum_vz.visualization.pictures.files import weights_fingerprint

with needs_extra("captum_vz.study", "study"):
    from filelock import FileLock

T = TypeVar("T")

# A model and its tokenizer, or a function that loads them. It is called only if there is work left for this model.
Loaded = tuple[Any, Any]
Source = Loaded | Callable[[], Loaded]

#: The group of all examples together, in a summary.
ALL: Final = "all"
MANIFEST: Final = "study.json"
EXAMPLES: Final = "examples"
LOCKS: Final = ".locks"
#: What the settings hold.
_NAMES: Final = ("captum_vz", "models", "methods", "metrics", "examples", "parts", "holds")


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


def own_device() -> torch.device:
    """The device of this process, of those that a launcher started on this machine."""
    # Rollouts are products in float64, which Apple's GPUs do not support.
    kind = next((one for one in ("cuda", "xpu") if getattr(torch, one).is_available()), "cpu")
    if kind == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % getattr(torch, kind).device_count())


def digest(*parts: Any) -> str:
    """A digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fingerprint(model: Any, tokenizer: Any, weights: str | None = None) -> str:
    """A digest of a model's class, of all its weights (given if their digest is known), and of the vocabulary."""
    vocabulary = digest(sorted(tokenizer.get_vocab().items()))
    return digest(type(model).__name__, weights or weights_fingerprint(model), len(tokenizer), vocabulary)


def check_weights(folder: Path, settings: Mapping[str, Any], name: str, weights: str) -> None:
    """Refuse a model with other weights than those that made its finished parts."""
    if {settings["holds"][part["holds"]]["weights"] for part in settings["parts"].get(name, {}).values()} - {weights}:
        raise ValueError(
            f"{folder} was made with other weights than those of the model {name!r} now: pass that model, or another "
            "folder."
        )


class Block(NamedTuple):
    """Some examples of a study, which are computed together: its place, the digest of its file, and its size."""

    number: int
    sha256: str
    size: int


def blocks_of(settings: Mapping[str, Any]) -> list[Block]:
    """The blocks of a study."""
    return [Block(number, *block) for number, block in enumerate(settings["examples"]["blocks"])]


def stem_of(settings: Mapping[str, Any], model: str, block: Block) -> str:
    """How the names of the files of a model and a block begin."""
    return f"{list(settings['models']).index(model):02d}-{safe_name(model)}-{block.number:06d}"


def lock_of(folder: Path, name: str) -> FileLock:
    """A lock that one process holds at a time. The operating system opens it if the process dies."""
    (folder / LOCKS).mkdir(parents=True, exist_ok=True)
    return FileLock(folder / LOCKS / f"{name}.lock")


@contextmanager
def changing(folder: Path) -> Iterator[dict[str, Any]]:
    """The settings of a study, to be changed inside of the `with` block. They are written at its end."""
    with lock_of(folder, MANIFEST):
        settings = read_settings(folder) if (folder / MANIFEST).is_file() else {}
        before = json.dumps(settings)
        yield settings
        if json.dumps(settings) != before:
            write_whole(folder / MANIFEST, json.dumps(settings, indent=1, ensure_ascii=False).encode())


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the study in a folder, if the file is not broken, and this version of the package wrote it."""
    path = folder / MANIFEST
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if missing := [name for name in _NAMES if settings.get(name) is None]:
            raise ValueError(f"without {', '.join(missing)}, as earlier versions wrote it")
    # Python's JSON raises these for text that is no UTF-8 or no JSON, other JSON, and JSON that is nested too deep.
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} does not hold the settings of a study ({error}): delete the folder, or pass another one."
        ) from error
    return settings


def latest(folder: Path, read: Callable[[dict[str, Any]], T]) -> T:
    """What `read` makes of the settings of a study; once more, if another process replaces its files meanwhile."""
    while True:
        settings = read_settings(folder)
        try:
            return read(settings)
        except ValueError:
            if read_settings(folder) == settings:
                raise


def read_examples(folder: Path, block: Block) -> list[Example]:
    """The examples of a block, if their file has not changed."""
    path = folder / EXAMPLES / f"{block.number:06d}.jsonl"
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != block.sha256:
        raise ValueError(f"{path} is missing or has changed: pass the study's examples and a new folder.")
    return [Example.from_dict(json.loads(line)) for line in data.decode().splitlines()]


def claim(
    folder: Path, models: Iterable[str], codes: Mapping[str, Mapping[str, str]], examples: Sequence[Example], size: int
) -> list[Block]:
    """Add models, "methods" and "metrics" with their codes, and examples to the study in a folder, which may be new.

    Returns:
        The blocks that hold the passed examples.

    Raises:
        ValueError: The folder holds something else, a study of another version, or other examples of an id.
        OSError: The folder cannot be written.
    """
    manifest = folder / MANIFEST
    entries = [path.name for path in folder.iterdir()] if folder.is_dir() and not manifest.is_file() else []
    if any(name not in (EXAMPLES, LOCKS) and not name.endswith(TEMPORARY) for name in entries):
        raise ValueError(f"{folder} is not empty, and holds no {MANIFEST}: pass a new folder or that of a study.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {manifest}: {error.strerror}") from error
    with changing(folder) as settings:
        if settings and settings["captum_vz"] != __version__:
            made = settings["captum_vz"]
            raise ValueError(f"{folder} holds a study of captum_vz {made}, and this is {__version__}: pass another.")
        blocks = blocks_of(settings) if settings else []
        known = {example.id: (example, block) for block in blocks for example in read_examples(folder, block)}
        for example in examples:
            if example.id in known and known[example.id][0] != example:
                raise ValueError(
                    f"example {example.id!r} is in {folder} with other contents: pass another id, or another folder."
                )
        check_groups([*examples, *(example for example, _ in known.values())])
        wanted = {known[example.id][1].number for example in examples if example.id in known}
        new = [example for example in examples if example.id not in known]
        for start in range(0, len(new), size):
            some = new[start : start + size]
            data = "".join(f"{json.dumps(example.to_dict(), sort_keys=True)}\n" for example in some).encode()
            write_whole(folder / EXAMPLES / f"{len(blocks):06d}.jsonl", data)
            wanted.add(len(blocks))
            blocks.append(Block(len(blocks), hashlib.sha256(data).hexdigest(), len(some)))
        empty = {"captum_vz": __version__, "holds": {}, "parts": {}, "models": [], "methods": {}, "metrics": {}}
        settings |= empty | settings
        settings["models"] = list(dict.fromkeys([*settings["models"], *models]))
        for kind, own in codes.items():
            settings[kind] |= own
        settings["examples"] = {
            "count": sum(block.size for block in blocks),
            "blocks": [[block.sha256, block.size] for block in blocks],
        }
    return [block for block in blocks if block.number in wanted]


def check_groups(examples: Sequence[Example]) -> None:
    """Refuse a group whose name a summary has for all examples, unless it is the only one."""
    groups = {example.group for example in examples}
    if ALL in groups and len(groups) > 1:
        raise ValueError(
            f"a group is called {ALL!r}, which names all examples in a summary: give the group another name."
        )
