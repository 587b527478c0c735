"""One text run through a model: the layers' maps, their rollout, and the scores of one token."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz.app.models import Loaded
from captum_vz.errors import ArgumentError
from captum_vz.generation.words import TokenText
from captum_vz.study.examples.text import (
    PreparedText,
    content_specials,
    max_tokens,
    predicts_next,
    prepare_text,
)
from captum_vz.study.methods import METHODS, Batch, Method, rollout_of
from captum_vz.visualization import readable_tokens


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
