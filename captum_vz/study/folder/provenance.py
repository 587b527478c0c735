"""Where the numbers of a study come from, and what a reader needs to repeat it."""

from __future__ import annotations

import hashlib
import platform
import textwrap
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, TypeVar, cast

import torch
from matplotlib.figure import FigureBase

from captum_vz import __version__
from captum_vz.study.folder import digest
from captum_vz.visualization.pictures.files import add_provenance, root_figure, weights_fingerprint

AnyFigure = TypeVar("AnyFigure", bound=FigureBase)

#: The key of the settings that holds it. It is no part of what the rows are made of.
PROVENANCE: Final = "provenance"
_LIBRARIES: Final = ("torch", "transformers", "captum", "numpy")
#: The seeds of the bootstrap, and of methods that draw random numbers.
_SEEDS: Final = {"bootstrap": 0, "methods": 0}
_FOOT_SIZE: Final = 6
#: How the identity of code begins that the versions of the libraries name.
_PACKAGED: Final = tuple(f"{name}." for name in ("captum_vz", *_LIBRARIES))


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
    return found | {"results": digest({k: one for k, one in settings.items() if k not in (PROVENANCE, "tables")})}


def repeat_lines(settings: Mapping[str, Any]) -> list[str]:
    """What a reader needs to repeat a study, one line for each thing; nothing for a study that is not finished."""
    found = settings.get(PROVENANCE)
    if not found:
        return []
    makers = [(name, one) for name, some in found["models"].items() for one in some]
    versions = dict.fromkeys(
        ", ".join(f"{library} {one[library]}" for library in ("captum_vz", "python", *_LIBRARIES)) for _, one in makers
    )
    lines = [f"Versions: {'; or '.join(versions)}."]
    for name, one in makers:
        source = f" from {one['source']}" if one["source"] else ""
        lines.append(
            f"Model {name}: {one['model']}{source}, weights with the SHA-256 {one['weights']}, {one['dtype']} on "
            f"{one['device']}."
        )
    blocks = "".join(checksum for checksum, _ in settings["examples"]["blocks"])
    code = [*settings["methods"].items(), *settings["metrics"].items()]
    lines += [f"Own code: {name}, {one}." for name, one in code if not one.startswith(_PACKAGED)]
    lines.append(
        f"Sentences: {settings['examples']['count']:,}, digest {hashlib.sha256(blocks.encode()).hexdigest()[:16]}."
    )
    seeds = ", ".join(f"{name} {seed}" for name, seed in found["seeds"].items())
    lines.append(f"Seeds: {seeds}. Intervals: {100 * found['confidence']:g} %, {found['resamples']:,} resamples.")
    return lines


def sign_figure(figure: AnyFigure, *settings: Mapping[str, Any]) -> AnyFigure:
    """Write at the foot of a figure where its numbers come from, and keep the details with its file.

    Args:
        figure: The figure.
        settings: The settings of the finished studies that its numbers come from, whose intervals have one level.
    """
    lines = list(dict.fromkeys(line for one in settings for line in repeat_lines(one)))
    if not lines:
        return figure
    makers = [(name, one) for each in settings for name, some in each[PROVENANCE]["models"].items() for one in some]
    first = makers[0][1] if makers else {}
    counts = " and ".join(dict.fromkeys(f"{one['examples']['count']:,}" for one in settings))
    parts = [
        f"captum_vz {first.get('captum_vz', __version__)}, torch {first.get('torch', '')}",
        *dict.fromkeys(f"{name} {one['weights'][:8]}, {one['dtype']}, {one['device']}" for name, one in makers),
        f"study of {counts} sentences, {100 * settings[0][PROVENANCE]['confidence']:g} % intervals",
    ]
    width = int(figure.get_figwidth() * 72 / (0.55 * _FOOT_SIZE))  # type: ignore[attr-defined]  # of every Figure
    wrapped = textwrap.wrap("; ".join(parts), width)
    foot, whole_figure = "\n".join(wrapped), root_figure(figure)
    # The foot has room of its own, so that it does not take that of the axes.
    whole_figure.set_figheight(whole_figure.get_figheight() + 1.25 * _FOOT_SIZE / 72 * len(wrapped))
    label = figure.supxlabel(foot, x=0.01, ha="left", fontsize=_FOOT_SIZE, color="0.45")
    label.set_parse_math(False)
    more: dict[str, str] = {}
    for key, _, value in (line.partition(": ") for line in lines):
        more[key.lower()] = "; ".join(filter(None, [more.get(key.lower()), value]))
    return add_provenance(figure, **cast(Any, more))
