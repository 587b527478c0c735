"""What commands write: lines and tables on stdout, the current work on stderr, pictures and pages in files."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import W_OK, access
from pathlib import Path
from typing import Any

from captum_vz._files import write_file
from captum_vz._start import is_terminal
from captum_vz.errors import ArgumentError
from captum_vz.visualization import add_provenance, weights_fingerprint
from captum_vz.visualization.tokens import printable


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show the current task on stderr of a terminal while the block runs. Yields a function that changes the text."""

    def say(text: str) -> None:
        if is_terminal(sys.stderr):
            columns = shutil.get_terminal_size().columns - 1
            print(f"{printable(text)[:columns]}\x1b[K\r", end="", file=sys.stderr, flush=True)

    say(what)
    try:
        yield say
    finally:
        say("")


def check_files(picture: Path | None = None, page: Path | None = None) -> None:
    """Refuse files that cannot be written, before anything is computed."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    for path in filter(None, (picture, page)):
        if not path.parent.is_dir():
            raise ArgumentError(f"cannot write {path}: there is no folder {path.parent}.")
        if path.is_dir():
            raise ArgumentError(f"cannot write {path}: Is a directory.")
        if not access(path if path.exists() else path.parent, W_OK):
            raise ArgumentError(f"cannot write {path}: Permission denied.")
    if page is not None and page.suffix[1:].lower() in formats:
        raise ArgumentError(f"{page} is the name of a picture: pass a name that ends with .html.")
    if picture is not None and picture.suffix and picture.suffix[1:].lower() not in formats:
        raise ArgumentError(f"cannot write {picture}: pass a name that ends with one of {', '.join(sorted(formats))}.")
    if picture is not None and page is not None and picture.absolute() == page.absolute():
        raise ArgumentError(f"{picture} is the name of two files: pass different names.")


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is computed."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ArgumentError(f"cannot write {folder}: {existing} is a file.")
    if not access(existing, W_OK):
        raise ArgumentError(f"cannot write {folder}: {existing} is not writable.")


def page_origin(options: argparse.Namespace, model: Any) -> dict[str, str]:
    """Where the numbers of a page come from, by field."""
    weights = f"sha256 {weights_fingerprint(model)[:12]}"
    return {"model": options.model, "weights": weights, "command": shlex.join(options.command_line)}


def save_picture(figure: Any, options: argparse.Namespace, model: Any, method: str) -> None:
    """Write a figure of matplotlib to `--output`, as PNG unless the name says otherwise.

    The file carries where its numbers come from: the model and a fingerprint of its weights, the method, the text and
    the command. :func:`captum_vz.visualization.read_provenance` reads it.
    """
    path: Path = options.output
    add_provenance(
        figure, model=model, name=options.model, method=method, text=options.text, command=options.command_line
    )
    with warnings.catch_warnings(), file_errors(path):
        warnings.simplefilter("ignore")  # characters that the font does not have
        figure.savefig(path, format=path.suffix[1:].lower() or "png")


def save_page(text: str, path: Path) -> None:
    """Write a page, or another text."""
    with file_errors(path):
        write_file(path, text)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Say which file an error of the disk is about."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ArgumentError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error


def name_files(picture: Path | None, page: Path | None) -> None:
    """Print the names of the files that were written."""
    for kind, path in (("picture", picture), ("page", page)):
        if path is not None:
            print(f"{kind}: {path}")
