"""Tables on stdout, and progress on stderr: with rich in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from captum_vz.visualization.pictures.parts.style import MARK
from captum_vz.visualization.terminal import BAR, bar, columns_of, printable, shade

BLUE: Final = "#2171b5"
TRACK: Final = "grey50"  # the rest of a bar, up to the score of a full bar
GAP: Final = 2  # columns between the columns of a table


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that moves its cursor and shows colours, and the user has not refused colours.

    NO_COLOR: https://no-color.org.
    """
    shown = stream is not None and stream.isatty()
    return bool(shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is done and since when, on stderr, while the block runs. Nothing is shown if stderr is no terminal.

    Yields:
        A function that changes the text.
    """
    if not is_terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda text: progress.update(task, description=text)


def counted(total: int, what: str) -> Any:
    """A bar on stderr that counts steps, as a context manager with `update`. None is shown if stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, desc=what, leave=False, disable=not is_terminal(sys.stderr), dynamic_ncols=True)


def print_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    right: Sequence[int] = (),
    marked: int | None = None,
    plain: str | None = None,
) -> None:
    """Print a table: with rich in a terminal, else as plain columns.

    Args:
        heads: The heads of the columns.
        rows: Cells, as strings or as rich's texts (made by :func:`share_cell` and :func:`bar_cell`).
        right: The columns that are aligned at the right.
        marked: The row that is printed in the colour of a mark.
        plain: What is printed if stdout is no terminal. None: the columns.
    """
    if is_terminal(sys.stdout):
        _print_rich(heads, rows, right, marked)
    else:
        print(plain_table(heads, rows, right) if plain is None else plain)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Aligned columns, one line for each row. Control characters are written as escapes.

    >>> print(plain_table(["token", "share"], [["hat", "0.5"], ["pictures", "0.25"]], right=[1]))
    token     share
    hat         0.5
    pictures   0.25
    """
    lines = [[printable(str(cell)) for cell in line] for line in ([heads] if any(heads) else []) + list(rows)]
    widths = [max(map(columns_of, column)) for column in zip(*lines, strict=True)]

    def padded(place: int, cell: str) -> str:
        blank = " " * (widths[place] - columns_of(cell))
        return blank + cell if place in right else cell + blank

    return "\n".join((" " * GAP).join(padded(i, cell) for i, cell in enumerate(line)).rstrip() for line in lines)


def share_cell(word: str, share: float) -> Any:
    """A token whose background darkens with its share, from 0 to 1. The square root of the share is shown."""
    if not is_terminal(sys.stdout):
        return word
    from rich.text import Text

    background, ink = shade(min(max(share, 0.0), 1.0) ** 0.5)
    no_share = (background, ink) == shade(0.0)  # the terminal's own colours, which may be light on dark
    return Text(f" {printable(word)} ", style="" if no_share else f"color({ink}) on color({background})")


def bar_cell(share: float, width: int = BAR) -> Any:
    """A bar that is full at a share of 1."""
    drawn = bar(min(max(share, 0.0), 1.0), width)
    if not is_terminal(sys.stdout):
        return drawn
    from rich.text import Text

    return Text(drawn, style=BLUE) + Text("·" * (width - len(drawn)), style=TRACK)


def _print_rich(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int], marked: int | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, force_terminal=True, highlight=False)
    table = Table(box=box.SIMPLE_HEAD if any(heads) else None, pad_edge=False, show_header=any(heads))
    for place, head in enumerate(heads):
        name = Text("\n".join(map(printable, head.split("\n"))))
        align: Any = "right" if place in right else "left"
        table.add_column(name, justify=align, overflow="fold", no_wrap=place == 0)
    for place, row in enumerate(rows):
        cells = [cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row]
        table.add_row(*cells, style=f"bold {MARK}" if place == marked else "")
    console.print(table)
