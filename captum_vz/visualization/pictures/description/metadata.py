"""The metadata of files: what a picture shows, in words, and where its numbers come from."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

from captum_vz.visualization.pictures.description.content import contents_of, heading_of, provenance_of
from captum_vz.visualization.terminal import printable

#: The key of the provenance in PNG files.
KEY: Final = "captum_vz"
_MOST_SENTENCES: Final = 12


def alt_text_of(figure: Any) -> str:
    """A figure in words: its title and what each panel shows. Empty if no picture of this package is in it."""
    contents = contents_of(figure)
    if not contents:
        return ""
    heading = heading_of(figure)
    sentences = [one.sentence for one in contents]
    if len(sentences) > _MOST_SENTENCES:
        left = len(sentences) - _MOST_SENTENCES
        sentences = [*sentences[: _MOST_SENTENCES - 1], f"{left} more panels follow.", sentences[-1]]
    # Files take neither NUL nor half of a pair of surrogates.
    return printable(" ".join([*([f"{heading.rstrip('.')}."] if heading else []), *sentences]))


def full_provenance(figure: Any) -> dict[str, str]:
    """The provenance of a figure, with the package and its version."""
    version = getattr(sys.modules["captum_vz"], "__version__", "")
    return {"package": f"captum_vz {version}"} | provenance_of(figure)


def metadata_for(figure: Any, file_format: str) -> dict[str, Any] | None:
    """The metadata of a file, as matplotlib takes it for the format. None: the format has none."""
    title = printable(heading_of(figure)) or "captum_vz"
    words, origin = alt_text_of(figure), full_provenance(figure)
    record = json.dumps(origin)
    match file_format.lower():
        case "png":
            return {"Title": title, "Description": words, "Software": origin["package"], KEY: record}
        case "svg" | "svgz":
            # Without a date, the same numbers give the same file.
            fields = {"Title": title, "Description": words, "Creator": origin["package"], "Source": record}
            return fields | {"Date": None}
        case "pdf":
            fields = {"Title": title, "Subject": words, "Creator": origin["package"], "Keywords": record}
            return fields | {"CreationDate": None}
    return None
