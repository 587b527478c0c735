"""The files that a visitor downloads. They say where their numbers come from."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from captum_vz import __version__
from captum_vz.app.models import Loaded
from captum_vz.app.pages import frame, page, table
from captum_vz.visualization import View, add_provenance, weights_fingerprint

TITLE: Final = "Which token does each token draw on?"
_fingerprint: Final = lru_cache(maxsize=2)(weights_fingerprint)


class Files:
    """The files of one answer.

    Args:
        folder: An empty folder.
        loaded: The model.
        model: Its name.
        method: The methods, as one text.
        text: The text that is explained.
    """

    def __init__(self, folder: Path, loaded: Loaded, model: str, method: str, text: str) -> None:
        self.folder = folder
        weights = _fingerprint(loaded.model)
        kind = type(loaded.model).__name__
        self.origin = {"model": model, "model class": kind, "weights": weights, "method": method, "text": text}

    @property
    def paths(self) -> list[str]:
        """All files, by name."""
        return [str(path) for path in sorted(self.folder.iterdir())]

    def save_page(self, view: View) -> None:
        """The view as a page, with a table that says where the numbers come from."""
        rows = [["package", f"captum_vz {__version__}"], *map(list, self.origin.items())]
        origin = table("Where the numbers come from", ["field", "value"], rows)
        (self.folder / "page.html").write_text(page(TITLE, frame(view), origin), "ascii")

    def save_picture(self, figure: Figure, name: str, method: str | None = None) -> str:
        """A figure as PNG and SVG, whose metadata say where the numbers come from. The path of the PNG.

        Args:
            figure: The figure.
            name: The name of the files, without an ending.
            method: The method that the figure shows. None: all methods of the answer.
        """
        fields: dict[str, Any] = self.origin | ({} if method is None else {"method": method})
        add_provenance(figure, name=fields.pop("model"), **fields)
        for ending in ("png", "svg"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # characters that the font does not have
                figure.savefig(self.folder / f"{name}.{ending}")
        return str(self.folder / f"{name}.png")

    def save_json(self, record: Mapping[str, Any], name: str) -> None:
        """Numbers as JSON, with where they come from."""
        provenance = {"package": f"captum_vz {__version__}", **self.origin}
        (self.folder / f"{name}.json").write_text(json.dumps({**record, "provenance": provenance}), "utf-8")
