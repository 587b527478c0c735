"""The folder of a study: its manifest, its examples, its locks, and the identity of the code and weights in its rows.

``study.json`` lists the models, methods and metrics, and each file of rows with its size and digest. A file counts from
the moment at which it is listed there. So a process may end at any time.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pickle
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import nn

from captum_vz import __version__
from captum_vz._files import TEMPORARY, safe_name, write_whole
from captum_vz.attr._call import unwrapped
from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.study.examples import Example
from captum_vz.visualization.pictures.files import weights_fingerprint

with needs_extra("captum_vz.study", "study"):
    from filelock import FileLock
    from joblib.hashing import NumpyHasher

T = TypeVar("T")

# A model and its tokenizer, or a function that loads them. It is called only if there is work left for this model.
Loaded = tuple[Any, Any]
Source = Loaded | Callable[[], Loaded]

ALL: Final = "all"  #: the group of all examples together, in a summary
MANIFEST: Final = "study.json"
EXAMPLES: Final = "examples"
LOCKS: Final = ".locks"
LIBRARIES: Final = ("torch", "transformers", "captum", "numpy")  #: libraries that change numbers
_PACKAGES: Final = ("captum_vz", *LIBRARIES, "scipy", "joblib")  #: packages whose version names their code
#: What the settings hold.
_NAMES: Final = ("captum_vz", "models", "methods", "metrics", "examples", "parts", "holds")


def own_device() -> torch.device:
    """The device of this process, if a launcher started several on this machine."""
    # Rollouts are products in float64, which Apple's GPUs do not support.
    kind = next((one for one in ("cuda", "xpu") if getattr(torch, one).is_available()), "cpu")
    if kind == "cpu" or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % getattr(torch, kind).device_count())


def digest(*parts: Any) -> str:
    """A digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def fingerprint(model: Any, tokenizer: Any, weights: str | None = None) -> str:
    """A digest of a model's class, weights and vocabulary. The digest of the weights is given if it is known."""
    vocabulary = digest(sorted(tokenizer.get_vocab().items()))
    return digest(type(model).__name__, weights or weights_fingerprint(model), len(tokenizer), vocabulary)


def check_weights(folder: Path, settings: Mapping[str, Any], name: str, weights: str) -> None:
    """Refuse a model whose finished parts were made with other weights."""
    if {settings["holds"][part["holds"]]["weights"] for part in settings["parts"].get(name, {}).values()} - {weights}:
        raise ValueError(f"{folder} was made with other weights of the model {name!r}: pass these, or another folder.")


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
    """What `read` returns for the settings of a study. It runs again if another process replaces files meanwhile."""
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

    The result are the blocks that hold the passed examples. A folder with something else, with a study of another
    version or with other examples of an id is a ValueError, and one that cannot be written an OSError.
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
        sizes = [[block.sha256, block.size] for block in blocks]
        settings["examples"] = {"count": sum(block.size for block in blocks), "blocks": sizes}
    return [block for block in blocks if block.number in wanted]


def check_groups(examples: Sequence[Example]) -> None:
    """Refuse a group whose name a summary has for all examples, unless it is the only one."""
    groups = {example.group for example in examples}
    if ALL in groups and len(groups) > 1:
        raise ValueError(
            f"a group is called {ALL!r}, which names all examples in a summary: give the group another name."
        )


def code_identity(thing: Any, given: str | None = None) -> str:
    """The qualified name of a class, object or function, with a digest of its file and of what it holds.

    What it holds: its base classes, what it encloses, the state of objects, and the arguments of partials. Files that
    it imports are not covered. In a session without files, neither are the functions that it calls. A version that the
    user gives stands for all of it. What cannot be compared, such as an open file, is refused.
    """
    core = unwrapped(thing)
    core = getattr(core, "__func__", core)  # of a method
    core = core if inspect.isclass(core) or inspect.isroutine(core) else type(core)
    if given is not None:
        return f"{_name(core)} version {given}"
    try:
        return f"{_name(core)} {_Hasher('sha1').hash([_source(core), thing])[:16]}"
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(
            f"{_name(core)} holds something that the next start of a study cannot compare ({error}). Register it with "
            "version=, and give another version when its scores change."
        ) from error


class _Hasher(NumpyHasher):
    """Joblib's digest of objects. Functions and classes count by their files, and by what they enclose."""

    def __init__(self, hash_name: str) -> None:
        super().__init__(hash_name)
        self.seen: dict[int, Any] = {}  # holds the objects, so that no other one gets such an id

    def save(self, obj: Any) -> None:
        """Add an object to the digest."""
        if isinstance(obj, torch.Tensor):
            flat = obj.detach().to_dense().cpu().flatten().contiguous()
            obj = [str(obj.dtype), list(obj.shape), flat.view(torch.uint8).numpy()]
        elif isinstance(obj, nn.Module):  # a run of the model may change its other attributes
            own = [vars(part) for part in obj.modules() if not _package(type(part))]
            plain = [{name: x for name, x in one.items() if isinstance(x, (str, int, float))} for one in own]
            obj = [[type(part) for part in obj.modules()], plain, dict(obj.state_dict())]
        elif isinstance(obj, CodeType):
            obj = [obj.co_code, *obj.co_names, *obj.co_consts]
        elif isinstance(obj, (set, frozenset)):  # joblib orders some sets by hashes, which differ between processes
            obj = sorted(obj, key=repr)
        elif inspect.isclass(obj) or isinstance(obj, FunctionType):
            known, self.seen[id(obj)] = id(obj) in self.seen, obj
            obj = [_name(obj), *([] if known else _held(obj))]
        super().save(obj)


def _held(thing: Any) -> list[Any]:
    """The source of a class or function, and what it holds: base classes, functions, code, closures and defaults."""
    own = not _package(thing)
    if inspect.isclass(thing):
        functions = [one for one in map(inspect.unwrap, vars(thing).values()) if isinstance(one, FunctionType)]
        return [_source(thing), *((*thing.__mro__[1:], *functions) if own else ())]
    full = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
    return [_source(thing), full, thing.__defaults__, thing.__kwdefaults__, thing.__code__ if own else None]


def _source(thing: Any) -> str:
    """The package whose version names the code of a class or function, or a digest of its file; empty without one."""
    file = Path(getattr(sys.modules.get(thing.__module__ or ""), "__file__", None) or "")
    return _package(thing) or (hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "")


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or 'builtins'}.{getattr(thing, '__qualname__', repr(thing))}"


def _package(thing: Any) -> str:
    """The package whose version names the code of a class or function; empty for other code."""
    package = _name(thing).partition(".")[0]
    if package in _PACKAGES:
        return f"{package} {version(package.replace('_', '-'))}"
    return "Python" if package in sys.stdlib_module_names else ""


def made_by(model: Any) -> dict[str, str]:
    """What computes the rows of a part: the model, its weights, the device, and the versions of the libraries."""
    device = model.device
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    found = {
        "model": type(model).__name__,
        "source": str(getattr(model, "name_or_path", "") or ""),
        "weights": weights_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": f"{device.type}{name}",
        "captum_vz": __version__,
        "python": platform.python_version(),
    }
    # Unlike the metadata of a package, `__version__` names the build, such as that for a version of CUDA.
    return found | {library: str(import_module(library).__version__) for library in LIBRARIES}
