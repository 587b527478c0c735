"""A figure in words and as a table."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_vz.errors import ArgumentError
from captum_vz.visualization._files import comma_separated, written
from captum_vz.visualization.pictures.description.content import contents_of
from captum_vz.visualization.pictures.description.metadata import alt_text_of, full_provenance
from captum_vz.visualization.terminal import printable

if TYPE_CHECKING:
    import pandas as pd


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
