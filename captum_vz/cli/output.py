"""What commands write: tables and progress in a terminal, plain lines elsewhere, pictures and pages in files."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from captum_vz._files import write_file
from captum_vz.cli.options import CommandError
from captum_vz.visualization import add_provenance, weights_fingerprint
from captum_vz.visualization.pictures.axes import MARK
from captum_vz.visualization.terminal import BAR, WHITE, bar, columns_of, shade
from captum_vz.visualization.tokens import printable

BLUE: Final = "#2171b5"
TRACK: Final = "grey50"  # the rest of a bar, up to the score of a full bar
GAP: Final = 2  # columns between the columns of a plain table
LEAST_BAR: Final = 4  # a terminal with less room shows no bars


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that moves its cursor and shows colours, and the user has not refused colours.

    NO_COLOR: https://no-color.org. Without rich, which comes with transformers, all terminals are plain.
    """
    shown = stream is not None and stream.isatty() and find_spec("rich") is not None
    return bool(shown and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show the current task and its duration on stderr while the block runs. Nothing is shown outside a terminal.

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
    keys: int = 1,
    right: Sequence[int] = (),
    marked: int | None = None,
    bars: Sequence[float] | None = None,
) -> None:
    """Print a table: with rich in a terminal, as plain columns otherwise.

    A table that is wider than the terminal is printed in parts, each with the first columns. No column is left out.

    Args:
        heads: The heads of the columns. A head may have several lines.
        rows: Cells, as strings or as rich's texts (made by :func:`share_cell`).
        keys: How many first columns name the rows.
        right: The columns that are aligned at the right.
        marked: The row that is printed in the colour of a mark.
        bars: A share for each row, drawn in a last column that is as wide as the terminal allows.
    """
    between, edges = (3, 2) if is_terminal(sys.stdout) else (GAP, 0)
    columns = [list(column) for column in zip(heads, *rows, strict=True)]
    room = columns_of_stdout() - edges
    if bars is not None:
        width = min(BAR, room - sum(_width(column) + between for column in columns))
        if width >= LEAST_BAR:
            columns.append(["0 to 1", *(bar_cell(share, width) for share in bars)])
    lead = columns[:keys]
    room -= sum(min(_width(column), room // 2) + between for column in lead)
    for number, part in enumerate(_parts([_width(column) for column in columns[keys:]], room, between)):
        places = [*range(keys), *(keys + place for place in part)]
        shown, *lines = zip(*(columns[place] for place in places), strict=True)
        aligned = [place for place, origin in enumerate(places) if origin in right]
        if is_terminal(sys.stdout):
            _print_rich(shown, lines, aligned, marked)
        else:
            print(f"{chr(10) if number else ''}{plain_table(shown, lines, aligned)}")


def columns_of_stdout() -> int:
    """The columns of the terminal that stdout is; a large number if stdout is no terminal."""
    is_shown = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_shown else sys.maxsize


def _parts(widths: Sequence[int], room: int, between: int) -> list[list[int]]:
    """The places of columns, cut into parts that fit a width."""
    parts: list[list[int]] = [[]]
    left = room
    for place, width in enumerate(widths):
        if parts[-1] and width > left:
            parts.append([])
            left = room
        parts[-1].append(place)
        left -= width + between
    return parts


def _width(column: Sequence[Any]) -> int:
    return max(columns_of(line) for cell in column for line in str(cell).split("\n"))


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Aligned columns, one line for each row. Control characters are written as escapes.

    >>> print(plain_table(["token", "share"], [["hat", "0.5"], ["pictures", "0.25"]], right=[1]))
    token     share
    hat         0.5
    pictures   0.25
    """
    split = [head.split("\n") for head in heads]
    height = max(map(len, split)) if any(heads) else 0
    top = zip(*([""] * (height - len(lines)) + lines for lines in split), strict=True) if height else ()
    lines = [[printable(str(cell)) for cell in line] for line in [*top, *rows]]
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
    if (background, ink) == shade(0.0):
        style = ""  # the terminal's own colours, which may be light on dark
    elif _console().color_system in ("256", "truecolor"):
        style = f"color({ink}) on color({background})"
    else:  # the nearest of 16 colours would be black on blue
        style = "bold white on blue" if ink == WHITE else "bold"
    return Text(f" {printable(word)} ", style=style)


def bar_cell(share: float, width: int = BAR) -> Any:
    """A bar that is full at a share of 1."""
    drawn = bar(min(max(share, 0.0), 1.0), width)
    if not is_terminal(sys.stdout):
        return drawn
    from rich.text import Text

    return Text(drawn, style=BLUE) + Text("·" * (width - len(drawn)), style=TRACK)


def joined_cell(words: str, drawn: str) -> Any:
    """Words and a bar in one cell."""
    if not is_terminal(sys.stdout):
        return words + drawn
    from rich.text import Text

    return Text(words, no_wrap=True) + Text(drawn, style=BLUE)


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stdout, force_terminal=True, highlight=False)


def _print_rich(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int], marked: int | None) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if any(heads) else None, pad_edge=False, show_header=any(heads))
    for place, head in enumerate(heads):
        name = Text("\n".join(map(printable, head.split("\n"))))
        table.add_column(name, justify="right" if place in right else "left", overflow="fold")
    for place, row in enumerate(rows):
        cells = [cell if isinstance(cell, Text) else Text(printable(str(cell))) for cell in row]
        table.add_row(*cells, style=f"bold {MARK}" if place == marked else "")
    _console().print(table)


def page_origin(options: argparse.Namespace, model: Any) -> dict[str, str]:
    """Where the numbers of a page come from, by field."""
    weights = f"sha256 {weights_fingerprint(model)[:12]}"
    return {"model": options.model, "weights": weights, "command": shlex.join(options.command_line)}


def save_picture(figure: Any, options: argparse.Namespace, model: Any, method: str) -> None:
    """Write a figure of matplotlib to `--output`, as PNG unless the name says otherwise.

    The file carries where its numbers come from: the model and a fingerprint of its weights, the method, the text and
    the command. :func:`captum_vz.visualization.read_provenance` reads it.

    Args:
        figure: The figure.
        options: The options of the command.
        model: The model.
        method: The method.
    """
    path: Path = options.output
    add_provenance(
        figure, model=model, name=options.model, method=method, text=options.text, command=options.command_line
    )
    try:
        with warnings.catch_warnings(), file_errors(path):
            warnings.simplefilter("ignore")  # characters that the font does not have
            figure.savefig(path, format=path.suffix[1:].lower() or "png")
    except ValueError as error:
        raise CommandError(f"cannot write {path}: {error}.") from error


def save_page(text: str, path: Path) -> None:
    """Write a page, or another text."""
    with file_errors(path):
        write_file(path, text)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a `CommandError`."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}.") from error


def name_files(picture: Path | None, page: Path | None) -> None:
    """Print the names of the files that were written."""
    if picture is not None:
        print(f"picture: {picture}")
    if page is not None:
        print(f"page: {page}")
