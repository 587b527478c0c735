"""Tables of the report in Markdown, and lines on what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with aligned columns."""
    # A bar or a line's end in a name would end its cell.
    lines = [[" ".join(cell.split("\n")).replace("|", "\\|") for cell in line] for line in (heads, *rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def number(value: float, digits: int = 2) -> str:
    """A cell; empty if there is no number."""
    return "" if value != value else f"{value:.{digits}f}"


def failed_lines(skipped: DataFrame) -> list[str]:
    """A line for each method or metric that has no number for some sentences, with the most frequent reason.

    Args:
        skipped: As :attr:`Study.skipped <captum_vz.study.Study.skipped>` has it.
    """
    lines = []
    for who in ("method", "metric"):
        for name, some in skipped[skipped[who].notna()].groupby(who, sort=False) if len(skipped) else ():
            count = some["example"].nunique()
            lines.append(f"{name}: {count} sentences skipped, most often because: {some['skipped'].mode()[0]}")
    return lines
