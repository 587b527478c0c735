"""Draw the pictures of the README and of the pages: python tutorials/images/draw.py

The code is that of the pages. Each PNG file that it writes is kept if a document shows it.
"""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

from captum_vz.cli import main

IMAGES = Path(__file__).parent
ROOT = IMAGES.parents[1]
PAGE = ROOT / "tutorials" / "docs" / "pictures.md"
EXPLAINED = ["explain", "the pictures of some hat [MASK] scaring marcus.", "--output", "explained.png"]


def code_of(page: Path) -> str:
    """The Python blocks of a page, one after another."""
    return "\n".join(re.findall(r"^```python\n((?s:.*?))^```$", page.read_text("utf-8"), re.MULTILINE))


def shown_in(page: Path) -> set[str]:
    """The names of the pictures that a document shows."""
    return set(re.findall(r"!\[[^\]]+\]\([^)]*?([\w-]+\.png)\)", page.read_text("utf-8")))


def draw(target: Path) -> list[str]:
    """Draw all pictures into a folder, and return their names."""
    wanted = shown_in(PAGE) - {"view.png"} | {"explained.png"}  # explain_pages.py draws the view
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            main(EXPLAINED)
            exec(compile(code_of(PAGE), PAGE.name, "exec"), {"__name__": "page"})
            for name in sorted(wanted):
                (target / name).write_bytes(Path(name).read_bytes())
        finally:
            os.chdir(before)
    return sorted(wanted)


if __name__ == "__main__":
    print(*draw(IMAGES), sep="\n")
