"""Pictures and pages, written whole or refused with one line."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from captum_vz.cli.errors import CommandError
from captum_vz.visualization import add_provenance


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # characters that the font does not have
            figure.savefig(path, format=path.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}.") from error


def save_page(text: str, path: Path) -> None:
    """Write an HTML page."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}.") from error


def name_files(picture: Path | None, page: Path | None) -> None:
    """Print the names of the files that were written."""
    if picture is not None:
        print(f"picture: {picture}")
    if page is not None:
        print(f"page: {page}")
