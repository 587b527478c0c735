"""Writes the pictures of the gallery: `python tutorials/docs/site/gallery.py [FOLDER]` runs the code of the page."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "tutorials" / "docs" / "gallery.md"
PICTURES = ROOT / "tutorials" / "images" / "gallery"


def main(folder: Path = PICTURES) -> None:
    """Runs all Python blocks of the page in the folder, where they write their pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL))
    exec(compile(code, str(PAGE), "exec"), {"__name__": "gallery"})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
