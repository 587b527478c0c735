"""Pictures and pages, written whole or refused with one line."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from captum_vz.cli.errors import CommandError


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib, as PNG unless the name says otherwise."""
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
