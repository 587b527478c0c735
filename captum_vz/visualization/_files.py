"""Tables as text, and text in files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def comma_separated(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as comma-separated values. NUL becomes an escape, because csv of Python 3.10 refuses it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([one.replace("\0", "\\x00") if isinstance(one, str) else one for one in row])
    return text.getvalue()


def written(text: str, path: str | Path | None) -> str:
    """The text, also written to `path` if it is given. Halves of surrogate pairs become escapes in the file."""
    if path is not None:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    return text
