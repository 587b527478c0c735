"""What a figure shows, in words and as a table, for readers and for files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from captum_vz._files import comma_separated, written
from captum_vz.errors import ArgumentError
from captum_vz.visualization.terminal import printable

if TYPE_CHECKING:
    import pandas as pd

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


#: The key of the provenance in PNG files.
KEY: Final = "captum_vz"
_MOST_SENTENCES: Final = 12


def alt_text_of(figure: Any) -> str:
    """A figure in words: its title and what each panel shows. Empty if no picture of this package is in it."""
    contents = contents_of(figure)
    if not contents:
        return ""
    heading = heading_of(figure)
    sentences = [one.sentence for one in contents]
    if len(sentences) > _MOST_SENTENCES:
        left = len(sentences) - _MOST_SENTENCES
        sentences = [*sentences[: _MOST_SENTENCES - 1], f"{left} more panels follow.", sentences[-1]]
    # Files take neither NUL nor half of a pair of surrogates.
    return printable(" ".join([*([f"{heading.rstrip('.')}."] if heading else []), *sentences]))


def full_provenance(figure: Any) -> dict[str, str]:
    """The provenance of a figure, with the package and its version."""
    version = getattr(sys.modules["captum_vz"], "__version__", "")
    return {"package": f"captum_vz {version}"} | provenance_of(figure)


def metadata_for(figure: Any, file_format: str) -> dict[str, Any] | None:
    """The metadata of a file, as matplotlib takes it for the format. None: the format has none."""
    title = printable(heading_of(figure)) or "captum_vz"
    words, origin = alt_text_of(figure), full_provenance(figure)
    record = json.dumps(origin)
    match file_format.lower():
        case "png":
            return {"Title": title, "Description": words, "Software": origin["package"], KEY: record}
        case "svg" | "svgz":
            # Without a date, the same numbers give the same file.
            fields = {"Title": title, "Description": words, "Creator": origin["package"], "Source": record}
            return fields | {"Date": None}
        case "pdf":
            fields = {"Title": title, "Subject": words, "Creator": origin["package"], "Keywords": record}
            return fields | {"CreationDate": None}
    return None


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

    def to_html(self, path: str | Path | None = None) -> str:
        """The text and the table in HTML, also written to `path` if it is given."""
        heads = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in self.columns)
        lines = ("".join(f"<td>{_escaped(_short(value))}</td>" for value in row) for row in self.rows)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        table = f"<table><caption>{_escaped(self.text)}</caption><tr>{heads}</tr>{body}</table>"
        return written(table, path)

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
    contents = contents_of(figure)
    if not contents:
        raise ArgumentError(
            f"Nothing in this {type(figure).__name__} was drawn by captum_vz: pass a figure of draw_maps, draw_row, "
            "draw_comparison, draw_route, draw_audio, or of a plot method of this package."
        )
    columns = max((one.columns for one in contents), key=len)
    names = tuple(dict.fromkeys(name for one in contents for name in one.columns))
    if all(one.columns == columns for one in contents):
        rows = [row for one in contents for row in one.rows()]
        return Description(alt_text_of(figure), columns, rows, full_provenance(figure))
    # Panels of different kinds: one table with the columns of all of them.
    merged = [
        tuple(dict(zip(one.columns, row, strict=True)).get(name, "") for name in names)
        for one in contents
        for row in one.rows()
    ]
    return Description(alt_text_of(figure), names, merged, full_provenance(figure))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escaped(text: str) -> str:
    return escape(printable(text))
