"""One text explained, by one method or several: scores, maps, their picture and their interactive view."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz.app.models import Loaded
from captum_vz.errors import ArgumentError
from captum_vz.generation.words import TokenText
from captum_vz.study import Table, compare
from captum_vz.study.examples.text import (
    PreparedText,
    content_specials,
    max_tokens,
    predicts_next,
    prepare_text,
    word_id,
)
from captum_vz.study.methods import METHODS, Batch, Method, check_methods, rollout_of
from captum_vz.visualization import View, draw_maps, readable_tokens, view

if TYPE_CHECKING:
    from captum_vz.study.scoring.truth import Truth


@dataclass
class Explanation:
    """What is printed and drawn. Scores and maps belong to the method's `attribute`, for one text.

    Attributes:
        method: The name of the method in :data:`~captum_vz.study.METHODS`.
        tokens: The tokens as a person reads them, special tokens included.
        token: The position of the token explained.
        layer: The layer of the scores, from 0; of joined maps, the last of the layers; None: all layers.
        depth: The number of layers from which `layer` is chosen.
        scores: `(in,)`, summing to 1.
        maps: A map `(out, in)` for each layer; empty if the method has no layer maps.
        rollout: The joined maps `(out, in)` through all layers; None if no method joins these maps.
        predictions: The model's likeliest words and their probabilities, at a mask or after the token.
        words: The number of each token's word in the text.
        special: Whether each token begins, ends or pads texts. Masks and unknown words are content.
        distances: Maps of Value Zeroing before rows are divided by their sums; empty unless they were asked for.
    """

    method: str
    tokens: list[str]
    token: int
    layer: int | None
    depth: int
    scores: Tensor
    maps: list[Tensor]
    rollout: Tensor | None
    predictions: list[tuple[str, float]]
    words: list[int]
    special: list[bool]
    distances: list[Tensor] = field(default_factory=list)

    @property
    def scope(self) -> str:
        """The layers of the scores, such as "layer 3"; empty for a method without layers."""
        return METHODS[self.method].scope(self.layer or 0)


def explain(
    text: str,
    loaded: Loaded,
    name: str,
    token: str | None,
    layer: int,
    option: str = "",
    distances: bool = False,
) -> Explanation:
    """Run the text through the model and compute scores and maps.

    Args:
        text: The text.
        loaded: The model.
        name: The name of a method in :data:`~captum_vz.study.METHODS`.
        token: The token to explain, by its position or as it is written. None: see
            :func:`~captum_vz.study.examples.text.find_token`.
        layer: The layer, negative ones from the end. Methods without layers ignore it.
        option: What stands before the names of options in messages, such as "--".
        distances: Whether to compute the distances of Value Zeroing as well, by running its layers once more.

    Raises:
        ArgumentError: There is no such token or layer, or the text is empty or too long.
    """
    model, tokenizer, layers = loaded
    method = METHODS[name]
    try:
        prepared = prepare_text(model, tokenizer, text, token)
    except ValueError as error:
        message = str(error)
        raise ArgumentError(f"{option}{message}" if message.startswith("token ") else message) from error
    for remark in remarks(text, loaded, prepared, token, option):
        warnings.warn(remark, stacklevel=2)
    if method.layered:
        check_layer(layer, depth_of(loaded), option)
    batch = Batch(model, tokenizer, layers, prepared.inputs, [prepared.token])
    ids = prepared.inputs["input_ids"][0].tolist()
    read = TokenText.of(tokenizer, ids)
    content = content_specials(tokenizer).values()
    maps, rollout = _maps(batch, method)
    rows = method.rows(batch)
    if method.layered:
        check_layer(layer, len(rows), option)
    return Explanation(
        method=name,
        tokens=list(prepared.tokens),
        token=prepared.token,
        layer=layer % len(rows) if method.layered else None,
        depth=len(rows),
        scores=rows[layer if method.layered else 0][0],
        maps=maps,
        rollout=rollout,
        predictions=_predictions(model, tokenizer, prepared),
        words=list(read.words),
        special=[mark and number not in content for number, mark in zip(ids, read.special, strict=True)],
        distances=_distances(batch) if distances and method.maps is ValueZeroing else [],
    )


def depth_of(loaded: Loaded) -> int:
    """How many maps of layers there are. ALBERT's only layer runs as often as the configuration says."""
    return max(len(loaded.layers), getattr(loaded.model.config, "num_hidden_layers", 0))


def check_layer(layer: int, depth: int, option: str) -> None:
    """Refuse a layer that is not one of `depth` layers."""
    if not -depth <= layer < depth:
        raise ArgumentError(
            f"{option}layer {layer} is out of range: the model has {depth} layers, {-depth} to {depth - 1}."
        )


def check_room(text: str, loaded: Loaded, new: int) -> None:
    """Refuse a text that is too long for the model with this number of new tokens."""
    most, count = max_tokens(loaded.model, loaded.tokenizer), len(loaded.tokenizer(text)["input_ids"])
    room = new if most is None else most - count + 1  # the last new token is no input
    if new > room:
        raise ArgumentError(
            f"the text is {count} tokens long, and the model takes at most {most}: ask for at most {room} new tokens."
        )


def remarks(text: str, loaded: Loaded, prepared: PreparedText, token: str | None, option: str) -> list[str]:
    """What a user may not have meant: unknown words, a mask that is none, and the token that is explained instead."""
    model, tokenizer, _ = loaded
    mask, names = None if predicts_next(model) else tokenizer.mask_token, prepared.tokens
    ids = prepared.inputs["input_ids"][0].tolist()
    masks = [i for i, number in enumerate(ids) if mask is not None and number == tokenizer.mask_token_id]
    # The unknown token of some decoders also begins or ends each text.
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    unknown = [i for i, number in enumerate(ids) if number == tokenizer.unk_token_id and number not in ends]
    found = []
    if unknown:
        found.append(
            f"the tokenizer does not know what stands at {_listed(unknown)}: the model is given {names[unknown[0]]}."
        )
    for written in dict.fromkeys(re.findall(r"\[mask\]|<mask>", text, re.IGNORECASE)):
        if tokenizer.mask_token is None:
            found.append(f"{written} is read as text: the model has no mask token.")
        elif mask is None:
            found.append(f"{written} is no mask for a model that predicts the next token: end the text before it.")
        elif written not in ("[MASK]", mask):
            found.append(f"{written} is read as text: write [MASK] for the mask.")
    if token is None and len(masks) > 1:
        found.append(f"the text has {len(masks)} masks, at {_listed(masks)}: {option}token {masks[0]} is explained.")
    if token is None and not masks:
        why = "the last token of the text" if predicts_next(model) else "the text has no mask: its last token"
        found.append(f"{why} is explained, {option}token {prepared.token}.")
    return found


def _listed(places: list[int]) -> str:
    return ("position " if len(places) == 1 else "positions ") + ", ".join(map(str, places))


def _maps(batch: Batch, method: Method) -> tuple[list[Tensor], Tensor | None]:
    """The layers' maps of the only example, and their rollout."""
    if method.maps is None:
        return [], None
    joining = rollout_of(method)
    rollout = None
    if joining is not None and joining.joined is not None:
        rollout = batch.joined_maps(joining.joined, method.maps, all_layers=False)[-1][0]
    return [one[0] for one in batch.whole_maps(method.maps)], rollout


def _distances(batch: Batch) -> list[Tensor]:
    return [one[0] for one in batch.whole_maps(partial(ValueZeroing, normalize=False))]


@torch.no_grad()
def _predictions(model: Any, tokenizer: Any, text: PreparedText) -> list[tuple[str, float]]:
    """The three likeliest words where the model predicts one: at a mask, or after the token of a causal model."""
    if not (text.is_mask if type(model).__name__.endswith("ForMaskedLM") else predicts_next(model)):
        return []
    likeliest = model(**text.inputs).logits[0, text.token].float().softmax(-1).topk(3)
    words = readable_tokens(tokenizer, likeliest.indices.tolist())
    return list(zip(words, likeliest.values.tolist(), strict=True))


def compared(
    text: str,
    loaded: Loaded,
    methods: Sequence[str] | None,
    token: str | None,
    layer: int,
    target: str | None = None,
    foil: str | None = None,
    advance: Callable[[str], object] | None = None,
    option: str = "",
) -> Table:
    """:func:`~captum_vz.study.compare` for a model that was loaded by its name.

    Warnings name what the user may not have meant, as in :func:`explain`. `option`
    stands before the names of options in messages, such as "--".

    Raises:
        ArgumentError: A method is unknown; there is no such token, layer or target; or the text is empty or too long.
    """
    model, tokenizer, layers = loaded
    _check_words(tokenizer, target, foil, option)
    try:
        names = check_methods(methods)
        if any(METHODS[name].layered for name in names):
            check_layer(layer, depth_of(loaded), option)
        for remark in remarks(text, loaded, prepare_text(model, tokenizer, text, token), token, option):
            warnings.warn(remark, stacklevel=2)
        return compare(
            model,
            tokenizer,
            text,
            None if methods is None else names,
            target,
            foil=foil,
            layer=layer,
            layers=layers,
            token=token,
            advance=advance,
        )
    except ValueError as error:
        raise _named(error, option) from error


def _named(error: ValueError, option: str) -> ArgumentError:
    """An error of an argument, with `option` before the name of the argument."""
    named = str(error).startswith(("token ", "layer ", "methods "))
    return ArgumentError(f"{option}{error}" if named else str(error))


def _check_words(tokenizer: Any, target: str | None, foil: str | None, option: str) -> None:
    for name, word in (("target", target), ("foil", foil)):
        try:
            if word is not None:
                word_id(tokenizer, word)
        except ValueError as error:
            raise ArgumentError(
                f"{option}{name} is {word!r}, which is no single token of the tokenizer: pass another word."
            ) from error


def blanked_out(
    text: str,
    loaded: Loaded,
    token: str | None,
    target: str | None = None,
    foil: str | None = None,
    option: str = "",
) -> Truth:
    """:func:`~captum_vz.study.scoring.truth.blank_out_text` for a text and written words.

    Raises:
        ArgumentError: A word is not one token, or there is no such token.
        RefusedError: The model predicts no words.
        ModuleNotFoundError: The extra `study` is not installed.
    """
    from captum_vz.study.scoring.truth import blank_out_text

    model, tokenizer, _ = loaded
    _check_words(tokenizer, target, foil, option)
    try:
        prepared = prepare_text(model, tokenizer, text, token)
    except ValueError as error:
        raise _named(error, option) from error
    target_ids, foil_ids = ([word_id(tokenizer, word)] if word is not None else None for word in (target, foil))
    return blank_out_text(model, tokenizer, prepared, target_ids, foil_ids)


def draw_explanation(found: Explanation) -> Figure:
    """The maps of all layers and their rollout, or the scores of a method without layer maps."""
    if not found.maps:
        scores = {found.method: found.scores.double().cpu()}
        return Table(tuple(found.tokens), found.token, scores, found.layer or 0, {}, {found.method: found.scope}).plot()
    panels = {f"layer {index}": one for index, one in enumerate(found.maps)}
    if found.rollout is not None:
        panels["rollout"] = found.rollout
    # Rows sum to 1, so pictures of any two texts have the same scale.
    look: dict[str, Any] = {"scale": "root", "vmax": 1.0, "label": "share of the row (rows sum to 1)"}
    title = f"{METHODS[found.method].title}: the maps of the layers, and their rollout"
    return draw_maps(panels, found.tokens, found.token, title=title, **look)


def explanation_view(title: str, found: Sequence[Explanation]) -> View:
    """The maps of one text by one or several methods, with their rollouts.

    Value Zeroing has its distances where they were computed, so that the page shows how much there was to divide.
    Methods without layer maps have one row, the row of the explained token. They are shown only if no method has maps.

    Args:
        title: The heading.
        found: The explanations of the same token of the same text.
    """
    first = found[0]
    with_maps = [one for one in found if one.maps]
    if not with_maps:
        rows = {one.method: {one.scope or "scores": one.scores[None]} for one in found}
        named = [first.tokens[first.token]]
        sides: dict[str, Any] = {"columns": first.tokens, "column_words": first.words, "special": first.special}
        return view(rows, named, **sides, offset=first.token, token=0, title=title)
    maps = {one.method: one.distances or one.maps for one in with_maps}
    rollouts = {one.method: one.rollout for one in with_maps if one.rollout is not None}
    layer = -1 if first.layer is None else first.layer
    depths = {len(one.maps) + (one.method in rollouts) for one in with_maps}
    shown = layer if len(depths) == 1 else 0
    return view(
        maps,
        first.tokens,
        rollout=rollouts or None,
        words=first.words,
        special=first.special,
        token=first.token,
        layer=shown,
        title=title,
    )
