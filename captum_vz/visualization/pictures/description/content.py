"""What a figure knows of itself: the numbers that its panels show, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_CONTENT: Final = "captum_vz_content"  # the attribute of axes
_HEADING: Final = "captum_vz_heading"  # the attribute of figures
_PROVENANCE: Final = "captum_vz_provenance"  # the attribute of figures


@dataclass(frozen=True)
class Content:
    """What one panel shows.

    Attributes:
        sentence: The panel in words, with its largest numbers.
        columns: The names of the columns of its table.
        rows: Makes the rows of its table.
    """

    sentence: str
    columns: tuple[str, ...]
    rows: Callable[[], list[tuple[Any, ...]]]


def root_figure(figure: Any) -> Figure:
    """The figure that holds a subfigure, or the figure itself."""
    found: Figure = figure.canvas.figure  # in every version of matplotlib
    return found


def set_content(panel: Axes, content: Content) -> None:
    """Keep what a panel shows with the panel."""
    setattr(panel, _CONTENT, content)


def contents_of(figure: Any) -> list[Content]:
    """What the panels of a figure show, in their order."""
    found = [getattr(panel, _CONTENT, None) for panel in figure.axes]
    return [one for one in found if one is not None]


def set_heading(figure: Any, heading: str) -> None:
    """Keep the title that was given to a figure, because the drawn title has spaces for emoji."""
    setattr(figure, _HEADING, (figure.get_suptitle(), heading))


def heading_of(figure: Any) -> str:
    """The title of a figure, or of the figure that holds a subfigure. Empty if there is none."""
    for one in (figure, root_figure(figure)):
        drawn = str(getattr(one, "get_suptitle", str)())
        if drawn:
            kept, heading = getattr(one, _HEADING, ("", ""))
            return str(heading) if kept == drawn else drawn
    return ""


def set_provenance(figure: Any, fields: Mapping[str, str]) -> None:
    """Keep the provenance with the figure."""
    setattr(root_figure(figure), _PROVENANCE, dict(fields))


def provenance_of(figure: Any) -> dict[str, str]:
    """The provenance of a figure; empty if there is none."""
    return dict(getattr(root_figure(figure), _PROVENANCE, {}))
