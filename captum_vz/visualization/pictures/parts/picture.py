"""Figures that carry their description, and the axes that pictures draw into."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any

from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure, FigureBase

from captum_vz._files import write_file
from captum_vz.errors import ArgumentError
from captum_vz.visualization.pictures.description import alt_text_of, metadata_for, root_figure
from captum_vz.visualization.pictures.parts.fonts import TEXT_IN_FILES
from captum_vz.visualization.pictures.parts.style import DPI, FONT_SIZE


class Picture(Figure):
    """A matplotlib figure that writes its description and its provenance into PNG, SVG and PDF files.

    Text in PDF files is set in TrueType fonts, and text in SVG files is text, whichever way the figure is saved.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _Canvas(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        super().__setstate__(state)  # type: ignore[misc]  # not in matplotlib's stubs
        _Canvas(self)

    def savefig(self, fname: Any, *, transparent: bool | None = None, **kwargs: Any) -> None:
        """Write the figure as matplotlib does, with metadata, and a file whole or not at all."""
        write_figure(self, super().savefig, fname, kwargs | {"transparent": transparent})

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        """What a notebook shows without matplotlib's magic commands, with the description as alternative text."""
        file = BytesIO()
        self.savefig(file, format="png")
        width, height = (round(96 * inches) for inches in self.get_size_inches())  # in CSS pixels
        return file.getvalue(), {"alt": alt_text_of(self), "width": width, "height": height}


class _Canvas(FigureCanvasBase):
    """What `savefig`, notebooks and other programs write a picture by."""

    def print_figure(self, filename: Any, *args: Any, **kwargs: Any) -> Any:
        # Fonts of several pages are embedded when the user closes the pages, with the user's settings.
        with rc_context({} if isinstance(filename, PdfPages) else TEXT_IN_FILES):
            return super().print_figure(filename, *args, **kwargs)


def write_figure(figure: Figure, save: Callable[..., None], target: Any, options: dict[str, Any]) -> None:
    """Write a figure by matplotlib's `savefig`, with its metadata. Metadata that is passed replaces the figure's own.

    A file is written whole or not at all: on a full disk, matplotlib would leave a part of it, and lose an older file.
    """
    path = os.fsdecode(target) if isinstance(target, (str, os.PathLike)) else None
    kind = options.pop("format", None) or os.path.splitext(path or "")[1][1:]
    if not kind:  # as matplotlib does
        kind = figure.canvas.get_default_filetype()
        path = None if path is None else f"{path.rstrip('.')}.{kind}"
    own = metadata_for(figure, kind)
    if own is not None:
        options["metadata"] = own | dict(options.get("metadata") or {})
    # Of these formats, matplotlib writes several files.
    if path is None or kind == "pgf" or (kind in ("svg", "svgz") and not rcParams["svg.image_inline"]):
        save(target if path is None else path, format=kind, **options)
        return
    drawn = BytesIO()
    save(drawn, format=kind, **options)
    write_file(path, drawn.getvalue())


def new_picture(size: tuple[float, float], font: float = FONT_SIZE) -> Picture:
    """A figure of a size in inches that is not registered with pyplot."""
    return Picture(figsize=size, dpi=DPI[font < 7])


def target_figure(ax: Any, fig: Any) -> None:
    """Check that `ax` and `fig` are not both given, and are of matplotlib."""
    if ax is not None and fig is not None:
        raise ArgumentError("ax and fig are both given: pass the axes, or the figure in which to make axes.")
    if fig is not None and not isinstance(fig, FigureBase):
        raise ArgumentError(f"fig is of type {type(fig).__name__}: pass a figure or a subfigure of matplotlib.")
    if ax is not None and (not isinstance(ax, (Axes, Iterable)) or isinstance(ax, str)):
        raise ArgumentError(f"ax is of type {type(ax).__name__}: pass axes of matplotlib, or a list of axes.")


def axes_list(ax: Any, count: int) -> list[Axes]:
    """The given axes as a list of `count`."""
    found = [ax] if isinstance(ax, Axes) else list(getattr(ax, "flat", ax))
    if len(found) != count or not all(isinstance(one, Axes) for one in found):
        raise ArgumentError(f"ax holds {len(found)} axes, but there are {count} panels: pass one for each panel.")
    return found


def size_of(figure: FigureBase) -> tuple[float, float]:
    """The size of a figure or a subfigure in inches."""
    dpi = root_figure(figure).dpi
    box: Any = figure.bbox  # type: ignore[attr-defined]  # not in matplotlib's stubs
    return float(box.width) / dpi, float(box.height) / dpi


def size_of_axes(panel: Axes) -> tuple[float, float]:
    """The size of axes in inches, as far as it is known before the figure is drawn."""
    width, height = size_of(panel.figure)
    box = panel.get_position()
    return box.width * width, box.height * height


def is_outer(panel: Axes, others: Sequence[Axes]) -> tuple[bool, bool]:
    """Whether no other axes are below a panel in its grid, and whether none are at its left."""
    own = panel.get_subplotspec()
    places = [other.get_subplotspec() for other in others]
    grid = [one for one in places if own is not None and one is not None and one.get_gridspec() is own.get_gridspec()]
    if own is None:
        return True, True
    below = any(one.colspan == own.colspan and one.rowspan.start > own.rowspan.start for one in grid)
    left = any(one.rowspan == own.rowspan and one.colspan.start < own.colspan.start for one in grid)
    return not below, not left


def add_axes(figure: FigureBase, box: tuple[float, float, float, float], size: tuple[float, float]) -> Axes:
    """Axes at left, top, width and height in inches, from the upper left corner."""
    left, top, width, height = box
    place = (left / size[0], 1 - (top + height) / size[1], width / size[0], height / size[1])
    return figure.add_axes(place)


def name_axes(
    figure: FigureBase,
    size: tuple[float, float],
    across: str,
    down: str,
    boxes: Sequence[tuple[float, float, float, float]],
    bottom: float,
) -> None:
    """Write what columns and rows are below and at the left of the middle of panels, whose boxes are in inches."""
    font: dict[str, Any] = {"fontsize": FONT_SIZE + 0.5, "color": "0.25"}
    left = min(box[0] for box in boxes if box[1] == boxes[-1][1])  # the lowest panels
    middle = (left + boxes[-1][0] + boxes[-1][2]) / 2
    figure.text(middle / size[0], 1 - (bottom - 0.05) / size[1], across, va="bottom", ha="center", **font)
    middle = (boxes[0][1] + boxes[-1][1] + boxes[-1][3]) / 2
    figure.text(0.05 / size[0], 1 - middle / size[1], down, va="center", rotation=90, **font)
