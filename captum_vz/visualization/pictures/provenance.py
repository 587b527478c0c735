"""Where the numbers of a picture come from, in the picture's file."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

import torch
from matplotlib import rc_context
from matplotlib.figure import FigureBase
from torch import Tensor, nn

from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures.description import KEY, provenance_of, root_figure, set_provenance
from captum_vz.visualization.pictures.parts.fonts import TEXT_IN_FILES
from captum_vz.visualization.pictures.parts.picture import write_figure

AnyFigure = TypeVar("AnyFigure", bound=FigureBase)
_SVG = "{http://www.w3.org/2000/svg}"
_SOURCE = "{http://purl.org/dc/elements/1.1/}source"


def add_provenance(
    figure: AnyFigure,
    *,
    model: nn.Module | None = None,
    name: str | None = None,
    method: str | None = None,
    text: str | None = None,
    command: str | Sequence[str] | None = None,
    **more: str,
) -> AnyFigure:
    """States where the numbers of a figure come from. Files of the figure carry it.

    `figure.savefig` of figures that this package made writes it into PNG, SVG and PDF files, next to a description of
    the figure. For other figures, use :func:`save_figure`. :func:`read_provenance` reads it.

    Args:
        figure: The figure.
        model: The model. Its class and a fingerprint of its weights are kept.
        name: The name of the model, such as a folder or a Hugging Face id.
        method: The method.
        text: The text that is explained.
        command: The command that draws the figure, as text or as a list of arguments.
        more: Anything else, as text.

    Returns:
        The figure.

    Raises:
        ArgumentError: The model is no module of torch, or a value is no text.

    >>> import torch
    >>> from captum_vz.visualization import draw_maps
    >>> figure = draw_maps([torch.eye(2)], ["a", "b"])
    >>> _ = add_provenance(figure, method="value-zeroing", text="a b")
    >>> figure.savefig("maps.png")  # doctest: +SKIP
    >>> read_provenance("maps.png")  # doctest: +SKIP
    {'package': 'captum_vz 0.1.0', 'method': 'value-zeroing', 'text': 'a b'}
    """
    fields = provenance_of(figure)
    if model is not None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"model is of type {type(model).__name__}: pass a module of torch, and its name by name=."
            )
        fields |= {"model class": type(model).__name__, "weights": weights_fingerprint(model)}
    if command is not None and not isinstance(command, str):
        command = shlex.join(command)
    given = {"model": name, "method": method, "text": text, "command": command} | more
    for key, value in given.items():
        if value is not None and not isinstance(value, str):
            raise ArgumentError(f"{key} is of type {type(value).__name__}: pass text.")
    set_provenance(figure, fields | {key: value for key, value in given.items() if value is not None})
    return figure


def weights_fingerprint(model: nn.Module) -> str:
    """A digest of a model's weights: SHA-256 of the names, shapes, types and bytes of its parameters and buffers.

    Two models with the same digest have the same weights, bit by bit, on any device.

    >>> from captum_vz.testbed import load_model
    >>> weights_fingerprint(load_model()[0]) == weights_fingerprint(load_model()[0])
    True
    """
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        if not isinstance(values, Tensor):
            continue
        digest.update(f"{name} {tuple(values.shape)} {values.dtype}".encode())
        whole = values.detach().cpu().contiguous().reshape(-1)
        digest.update(whole.view(torch.uint8).numpy().data if whole.numel() else b"")
    return digest.hexdigest()


def save_figure(figure: FigureBase, path: str | Path, **options: Any) -> None:
    """Write any figure with the description and the provenance of what this package has drawn into it.

    Fonts in PDF files are TrueType fonts, and text in SVG files is text, as in figures that this package made.

    Args:
        figure: A figure of matplotlib.
        path: The file. Its ending is the format: PNG, SVG and PDF carry metadata.
        options: Options of matplotlib's `savefig`.
    """
    root = root_figure(figure)
    with rc_context(TEXT_IN_FILES):
        write_figure(root, root.savefig, path, options)


def read_provenance(path: str | Path) -> dict[str, str]:
    """The provenance that a PNG or SVG file of a picture carries.

    Args:
        path: The file.

    Returns:
        What :func:`add_provenance` was given, with the package and its version, and "description", the figure in words.

    Raises:
        ArgumentError: The file is neither PNG nor SVG, or carries no provenance of this package.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".png":
        record, words = _read_png(path)
    elif suffix == ".svg":
        record, words = _read_svg(path)
    else:
        raise ArgumentError(f"{path.name} is no PNG or SVG file by its name: pass the path of a picture in PNG or SVG.")
    try:
        found = json.loads(record or "")
    except ValueError:
        found = None
    if not isinstance(found, dict) or "package" not in found:
        raise ArgumentError(f"{path.name} carries no provenance: pass a file that a figure of captum_vz has written.")
    return {str(key): str(value) for key, value in found.items()} | ({"description": words} if words else {})


def this_command() -> str:
    """The command by which this program was started."""
    program, *arguments = sys.argv
    return shlex.join([Path(program).name, *arguments])


def _read_png(path: Path) -> tuple[str | None, str | None]:
    from PIL import Image

    with Image.open(path) as image:
        text: dict[str, str] = getattr(image, "text", {})
        return text.get(KEY), text.get("Description")


def _read_svg(path: Path) -> tuple[str | None, str | None]:
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ArgumentError(f"{path.name} is no SVG: {error}.") from error
    source = root.find(f".//{_SOURCE}")
    words = root.find(f".//{_SOURCE.replace('source', 'description')}")
    return (None if source is None else source.text), (None if words is None else words.text)
