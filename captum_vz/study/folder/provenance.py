"""Where the numbers of a study come from: code, models and libraries; and what a reader needs to repeat it."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import platform
import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, Final, TypeVar, cast

import torch
from matplotlib.figure import FigureBase
from torch import nn

from captum_vz import __version__
from captum_vz.errors import ArgumentError, needs_extra
from captum_vz.study.examples import counted
from captum_vz.study.folder import digest
from captum_vz.visualization.pictures.files import add_provenance, root_figure, weights_fingerprint

with needs_extra("captum_vz.study", "study"):
    from joblib.hashing import NumpyHasher

AnyFigure = TypeVar("AnyFigure", bound=FigureBase)

#: The key of the settings that holds it. It is no part of what the rows are made of.
PROVENANCE: Final = "provenance"
_LIBRARIES: Final = ("torch", "transformers", "captum", "numpy")
#: The seeds of the bootstrap, and of methods that draw random numbers.
_SEEDS: Final = {"bootstrap": 0, "methods": 0}
_FOOT_SIZE: Final = 6
#: Packages whose version names their code.
_PACKAGES: Final = ("captum_vz", *_LIBRARIES, "scipy", "joblib")
#: How the identity of code begins that the versions of the libraries name.
_PACKAGED: Final = tuple(f"{name}." for name in ("captum_vz", *_LIBRARIES))


def code_identity(thing: Any, given: str | None = None) -> str:
    """The qualified name of a class, object or function, with a digest of its file and of what it holds.

    What it holds: its base classes, what it encloses, the state of objects, and the arguments of partials. Files that
    it imports are not covered. In a session without files, neither are the functions that it calls. A version that the
    user gives stands for all of it.

    Raises:
        ArgumentError: It holds something that cannot be compared, such as an open file.
    """
    core = thing
    while isinstance(core, partial) or inspect.ismethod(core):
        core = core.func if isinstance(core, partial) else core.__func__
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
    """The source of a class or function, and what it holds: base classes, code, closures and defaults."""
    own, functions, held = not _package(thing), [thing], list[Any]([_source(thing)])
    if inspect.isclass(thing):
        held += thing.__mro__[1:] if own else ()
        functions = [one for one in map(inspect.unwrap, vars(thing).values()) if own and isinstance(one, FunctionType)]
    for one in functions:
        full = [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]
        held += [full, one.__defaults__, one.__kwdefaults__, one.__code__ if own else None]
    return held


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
    name = f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device.type)
    found = {
        "model": type(model).__name__,
        "source": str(getattr(model, "name_or_path", "") or ""),
        "weights": weights_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": name,
        "captum_vz": __version__,
        "python": platform.python_version(),
    }
    # Unlike the metadata of a package, `__version__` names the build, such as that for a version of CUDA.
    return found | {library: str(import_module(library).__version__) for library in _LIBRARIES}


def provenance_of(settings: Mapping[str, Any], confidence: float, resamples: int) -> dict[str, Any]:
    """Where the results of a study with these settings come from."""
    makers: dict[str, list[Any]] = {name: [] for name in settings["models"]}
    for name, parts in settings["parts"].items():
        for key in dict.fromkeys(part["holds"] for part in parts.values()):
            maker = settings["holds"][key]["made_by"]
            makers[name] += [maker] if maker and maker not in makers[name] else []
    found = {"models": makers, "seeds": _SEEDS, "confidence": confidence, "resamples": resamples}
    # Results with another digest of what they are made of are old.
    return found | {"results": digest({k: one for k, one in settings.items() if k != PROVENANCE})}


def repeat_lines(settings: Mapping[str, Any]) -> list[str]:
    """What a reader needs to repeat a study, one line for each thing; nothing for a study that is not finished."""
    found = settings.get(PROVENANCE)
    if not found:
        return []
    makers = [(name, one) for name, some in found["models"].items() for one in some]
    libraries = ("captum_vz", "python", *_LIBRARIES)
    versions = dict.fromkeys(", ".join(f"{library} {one[library]}" for library in libraries) for _, one in makers)
    lines = [f"Versions: {'; or '.join(versions)}."]
    for name, one in makers:
        source = f" from {one['source']}" if one["source"] else ""
        where = f"weights with the SHA-256 {one['weights']}, {one['dtype']} on {one['device']}"
        lines.append(f"Model {name}: {one['model']}{source}, {where}.")
    code = [*settings["methods"].items(), *settings["metrics"].items()]
    lines += [f"Own code: {name}, {one}." for name, one in code if not one.startswith(_PACKAGED)]
    blocks = hashlib.sha256("".join(checksum for checksum, _ in settings["examples"]["blocks"]).encode()).hexdigest()
    seeds = ", ".join(f"{name} {seed}" for name, seed in found["seeds"].items())
    lines.append(f"Sentences: {settings['examples']['count']:,}, digest {blocks[:16]}.")
    lines.append(f"Seeds: {seeds}. Intervals: {100 * found['confidence']:g} %, {found['resamples']:,} resamples.")
    return lines


def sign_figure(figure: AnyFigure, *settings: Mapping[str, Any]) -> AnyFigure:
    """Write at the foot of a figure where its numbers come from, and keep the details with its file.

    The `settings` are those of the finished studies that its numbers come from, whose intervals have one level.
    """
    lines = list(dict.fromkeys(line for one in settings for line in repeat_lines(one)))
    if not lines:
        return figure
    makers = [(name, one) for each in settings for name, some in each[PROVENANCE]["models"].items() for one in some]
    first = makers[0][1] if makers else {}
    counts = " and ".join(dict.fromkeys(counted(one["examples"]["count"], "sentence") for one in settings))
    parts = [
        f"captum_vz {first.get('captum_vz', __version__)}, torch {first.get('torch', '')}",
        *dict.fromkeys(f"{name} {one['weights'][:8]}, {one['dtype']}, {one['device']}" for name, one in makers),
        f"study of {counts}, {100 * settings[0][PROVENANCE]['confidence']:g} % intervals",
    ]
    width = int(figure.get_figwidth() * 72 / (0.55 * _FOOT_SIZE))  # type: ignore[attr-defined]  # of every Figure
    wrapped, root = textwrap.wrap("; ".join(parts), width), root_figure(figure)
    # The foot has room of its own, so that it does not take that of the axes.
    root.set_figheight(root.get_figheight() + 1.25 * _FOOT_SIZE / 72 * len(wrapped))
    foot = figure.supxlabel("\n".join(wrapped), x=0.01, ha="left", fontsize=_FOOT_SIZE, color="0.45")
    foot.set_parse_math(False)
    more: dict[str, str] = {}
    for key, _, value in (line.partition(": ") for line in lines):
        more[key.lower()] = "; ".join(filter(None, [more.get(key.lower()), value]))
    return add_provenance(figure, **cast(Any, more))
