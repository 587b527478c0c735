"""Files with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line that is not empty, from 1, and its object.

    Raises:
        ValueError: The file is not text in UTF-8, or a line is not a JSON object. The message names the line.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")  # some programs write a byte order mark
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {number}: it is not text in UTF-8.") from error
    # Only a line feed ends a line, because JSON strings may hold other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}: it is nested too deep for Python's JSON.") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:60]}")
        yield number, fields
