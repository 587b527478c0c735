"""The interactive views of the site's pages. A page has `<!-- view: NAME -->` where a view belongs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import captum_vz
from captum_vz.generation import attribute_generation
from captum_vz.study import compare
from captum_vz.visualization import View

SENTENCE = "the pictures of some hat [MASK] scaring marcus."


def agreement() -> View:
    """The README's sentence, as `captum-vz explain --html` shows it."""
    return captum_vz.explain("agreement", SENTENCE).view(title=SENTENCE)


def methods() -> View:
    """Two methods on one sentence."""
    return compare("agreement", SENTENCE, ["value-zeroing", "attention"]).view(title="Two methods on one sentence")


def generation() -> View:
    """The rows of generated tokens, in each layer."""
    found = attribute_generation("causal", "the pictures of some hat", max_new_tokens=4)
    return found.view(title="What each new token draws on")


VIEWS: dict[str, Callable[[], View]] = {one.__name__: one for one in (agreement, methods, generation)}


def write_views(folder: Path) -> None:
    """Writes each view to a file of the folder, as a frame that a page can hold."""
    folder.mkdir(exist_ok=True)
    for name, make in VIEWS.items():
        (folder / f"{name}.html").write_text(make()._repr_html_(), "ascii")
