"""The interactive views of the site's pages. A page has `<!-- view: NAME -->` where a view belongs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from captum_vz import LayerAttention, Rollout, ValueZeroing, find_layers
from captum_vz.generation import attribute_generation
from captum_vz.testbed import load_model
from captum_vz.visualization import View, view

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
MASK = 6


def agreement() -> View:
    """Value Zeroing in all layers of the embedded model."""
    return _methods({"Value Zeroing": ValueZeroing}, "What each token draws on, layer by layer")


def methods() -> View:
    """Two methods side by side."""
    return _methods({"Value Zeroing": ValueZeroing, "attention": LayerAttention}, "Two methods on one sentence")


def generation() -> View:
    """The rows of generated tokens, in each layer."""
    model, tokenizer = load_model("causal")
    found = attribute_generation(model, tokenizer, "the pictures of some hat", max_new_tokens=4)
    return found.view(title="What each new token draws on")


def _methods(classes: dict[str, Callable], title: str) -> View:
    model, tokenizer = load_model()
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    layers = find_layers(model)
    maps = {name: kind(model, layers).attribute(inputs) for name, kind in classes.items()}
    rollouts = {name: Rollout(kind(model, layers), residual=0.5).attribute(inputs) for name, kind in classes.items()}
    tokens, words = inputs.tokens(), inputs.word_ids()
    return view(maps, tokens, rollout=rollouts, words=words, token=MASK, layer=3, title=title)


VIEWS: dict[str, Callable[[], View]] = {one.__name__: one for one in (agreement, methods, generation)}


def write_views(folder: Path) -> None:
    """Writes each view to a file of the folder, as a frame that a page can hold."""
    folder.mkdir(exist_ok=True)
    for name, make in VIEWS.items():
        (folder / f"{name}.html").write_text(make()._repr_html_(), "ascii")
