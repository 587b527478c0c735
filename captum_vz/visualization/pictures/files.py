"""What a figure shows, in words and as a table; where its numbers come from; and both in the files of the figure."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from xml.etree import ElementTree

import torch
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from torch import Tensor, nn

from captum_vz._files import comma_separated, write_file, written
from captum_vz.errors import ArgumentError
from captum_vz.visualization.tokens import printable

if TYPE_CHECKING:
    import pandas as pd

AnyFigure = TypeVar("AnyFigure", bound=FigureBase)
_DUBLIN_CORE: Final = "{http://purl.org/dc/elements/1.1/}"  # the names of metadata in SVG
#: Settings for files. Publishers refuse the Type 3 fonts that matplotlib embeds in PDF by default. Text in SVG can be
#: searched and edited.
TEXT_IN_FILES: Final[Any] = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}
KEY: Final = "captum_vz"  # of the provenance in PNG files
#: The names of the title, the description, the program, the provenance and the date.
_FIELDS: Final = {
    "png": ("Title", "Description", "Software", KEY),
    "svg": ("Title", "Description", "Creator", "Source", "Date"),
    "pdf": ("Title", "Subject", "Creator", "Keywords", "CreationDate"),
}
_MOST_SENTENCES: Final = 12
#: The names of attributes: of axes, and of figures.
_CONTENT, _PROVENANCE = "captum_vz_content", "captum_vz_provenance"


@dataclass(frozen=True)
class Content:
    """What one panel shows."""

    sentence: str  # the panel in words, with its largest numbers
    columns: tuple[str, ...]  # the names of the columns of its table
    rows: Callable[[], list[tuple[Any, ...]]]  # makes the rows of its table


def root_figure(figure: Any) -> Figure:
    """The figure that holds a subfigure, or the figure itself."""
    found: Figure = figure.canvas.figure  # in every version of matplotlib
    return found


def set_content(panel: Axes, content: Content) -> None:
    """Keep what a panel shows with the panel."""
    setattr(panel, _CONTENT, content)


def largest(scores: Tensor, name: Callable[[int], str], count: int = 3, form: str = ".2f") -> str:
    """The largest scores in words, such as "pictures 0.97, some 0.01"."""
    flat = scores.flatten().nan_to_num(nan=0.0)
    places = flat.abs().topk(min(count, flat.numel())).indices.tolist()
    return ", ".join(f"{name(place)} {float(flat[place]):{form}}" for place in places)


def _heading_of(figure: Any) -> str:
    """The title of a figure, or of the figure that holds a subfigure. Empty if there is none."""
    titles = (str(getattr(one, "get_suptitle", str)()) for one in (figure, root_figure(figure)))
    return " ".join(next(filter(None, titles), "").split())


def _contents_of(figure: Any) -> list[Content]:
    return [getattr(panel, _CONTENT) for panel in figure.axes if hasattr(panel, _CONTENT)]


def _provenance_of(figure: Any) -> dict[str, str]:
    """The provenance of a figure, with the package and its version."""
    version = getattr(sys.modules["captum_vz"], "__version__", "")
    return {"package": f"captum_vz {version}"} | getattr(root_figure(figure), _PROVENANCE, {})


def alt_text_of(figure: Any) -> str:
    """A figure in words: its title and what each panel shows. Empty if no picture of this package is in it."""
    sentences = [one.sentence for one in _contents_of(figure)]
    if len(sentences) > _MOST_SENTENCES:
        more = f"{len(sentences) - _MOST_SENTENCES} more panels follow."
        sentences = [*sentences[: _MOST_SENTENCES - 1], more, sentences[-1]]
    if sentences and (heading := _heading_of(figure)):
        sentences.insert(0, f"{heading.rstrip('.')}.")
    return printable(" ".join(sentences))  # files take neither NUL nor half of a pair of surrogates


@dataclass(frozen=True)
class Description:
    """What a figure shows. Printing it prints the text.

    Attributes:
        text: The figure in words, with its largest numbers: an alternative text for readers who do not see it.
        columns: The names of the columns of the table.
        rows: All numbers of the figure, one row for each.
        provenance: Where the numbers come from, see :func:`add_provenance`.
    """

    text: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    provenance: dict[str, str]

    def __str__(self) -> str:
        """The text."""
        return self.text

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as comma-separated values, also written to `path` if it is given."""
        return written(comma_separated([self.columns, *self.rows]), path)

    def to_pandas(self) -> pd.DataFrame:
        """The table as a DataFrame. It needs pandas, of the extra `study`."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(self.columns))


def describe(figure: Any) -> Description:
    """A figure of this package in words and as a table.

    Args:
        figure: What a function of this package that draws has returned; or any figure, or axes of a figure, that such
            a function has drawn into.

    Returns:
        The text, the numbers, and where they come from. The numbers are the drawn numbers, after words are merged.

    Raises:
        ArgumentError: Nothing in the figure was drawn by this package.

    >>> import torch
    >>> from captum_vz.visualization import draw_maps
    >>> figure = draw_maps([torch.tensor([[0.75, 0.25], [0.5, 0.5]])], ["a", "b"], token=0)
    >>> print(describe(figure))
    layer 0, map of 2 tokens: the row of a has its largest scores at a 0.75, b 0.25.
    >>> describe(figure).rows[1]
    ('layer 0', 0, 'a', 1, 'b', 0.25)
    """
    contents = _contents_of(figure)
    if not contents:
        raise ArgumentError(
            f"Nothing in this {type(figure).__name__} was drawn by captum_vz: pass a figure that it has drawn."
        )
    columns = tuple(dict.fromkeys(name for one in contents for name in one.columns))
    lines = (dict(zip(one.columns, row, strict=True)) for one in contents for row in one.rows())
    rows = [tuple(line.get(name, "") for name in columns) for line in lines]
    return Description(alt_text_of(figure), columns, rows, _provenance_of(figure))


class Picture(Figure):
    """A matplotlib figure that writes its description and its provenance into PNG, SVG and PDF files.

    Text in PDF files is set in TrueType fonts, and text in SVG files is text.
    """

    def savefig(self, fname: Any, *, transparent: bool | None = None, **kwargs: Any) -> None:
        """Write the figure as matplotlib does, with metadata, and a file whole or not at all."""
        _write(self, super().savefig, fname, kwargs | {"transparent": transparent})

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """What a notebook shows without matplotlib's magic commands, with the description as alternative text."""
        file = BytesIO()
        self.savefig(file, format="png")
        width, height = (round(96 * inches) for inches in self.get_size_inches())  # in CSS pixels
        return file.getvalue(), {"alt": alt_text_of(self), "width": width, "height": height}


def _write(figure: Figure, save: Callable[..., None], target: Any, options: dict[str, Any]) -> None:
    """Write a figure by matplotlib's `savefig`, with its metadata. Metadata that is passed replaces the figure's own.

    A file is written whole or not at all: on a full disk, matplotlib would leave a part of it, and lose an older file.
    """
    from matplotlib.backends.backend_pdf import PdfPages  # its import takes longer than a picture

    path = os.fsdecode(target) if isinstance(target, (str, os.PathLike)) else None
    kind = options.pop("format", None) or os.path.splitext(path or "")[1][1:]
    if not kind:  # as matplotlib does
        kind = figure.canvas.get_default_filetype()
        path = path and f"{path.rstrip('.')}.{kind}"
    if names := _FIELDS.get(kind.lower()):
        origin, title = _provenance_of(figure), printable(_heading_of(figure)) or "captum_vz"
        fields = (title, alt_text_of(figure), origin["package"], json.dumps(origin), None)
        # Without dates, equal numbers give equal files.
        options["metadata"] = dict(zip(names, fields, strict=False)) | dict(options.get("metadata") or {})
    is_whole = names and (kind != "svg" or rcParams["svg.image_inline"])  # else matplotlib may write several files
    drawn = BytesIO() if path and is_whole else None
    # Fonts of several pages are embedded when the user closes the pages, with the user's settings.
    with rc_context({} if isinstance(target, PdfPages) else TEXT_IN_FILES):
        save(drawn or path or target, format=kind, **options)
    if path and drawn:
        write_file(path, drawn.getvalue())


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
        ArgumentError: The model is no module of torch.

    >>> import torch
    >>> from captum_vz.visualization import draw_maps
    >>> figure = draw_maps([torch.eye(2)], ["a", "b"])
    >>> describe(add_provenance(figure, method="value-zeroing", text="a b")).provenance["method"]
    'value-zeroing'
    """
    fields = _provenance_of(figure)
    if model is not None:
        kind = type(model).__name__
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model is of type {kind}: pass a module of torch, and its name by name=.")
        fields |= {"model class": kind, "weights": weights_fingerprint(model)}
    if command is not None and not isinstance(command, str):
        command = shlex.join(command)
    given = {"model": name, "method": method, "text": text, "command": command} | more
    fields |= {key: value for key, value in given.items() if value is not None}
    setattr(root_figure(figure), _PROVENANCE, fields)
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
        if isinstance(values, Tensor):
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
    _write(root, root.savefig, path, options)


def read_provenance(path: str | Path) -> dict[str, str]:
    """The provenance that a PNG or SVG file of a picture carries.

    It is what :func:`add_provenance` was given, the package and its version, and "description", the figure in words.

    Raises:
        ArgumentError: The file is neither PNG nor SVG, or carries no provenance of this package.
    """
    path = Path(path)
    ending = path.suffix.lower()
    if ending not in (".png", ".svg"):
        raise ArgumentError(f"{path.name} is no PNG or SVG file by its name: pass the path of a picture in PNG or SVG.")
    if ending == ".png":
        from PIL import Image

        with Image.open(path) as image:
            fields: dict[str, str] = getattr(image, "text", {})
        record, words = fields.get(KEY), fields.get("Description")
    else:
        try:
            root = ElementTree.parse(path).getroot()
        except ElementTree.ParseError as error:
            raise ArgumentError(f"{path.name} is no SVG: {error}.") from error
        record, words = (root.findtext(f".//{_DUBLIN_CORE}{name}") for name in ("source", "description"))
    try:
        found = json.loads(record or "{}")
    except ValueError:  # another program's
        found = {}
    if not isinstance(found, dict) or "package" not in found:
        raise ArgumentError(f"{path.name} carries no provenance: pass a file that a figure of captum_vz has written.")
    return {str(key): str(value) for key, value in found.items()} | ({"description": words} if words else {})
