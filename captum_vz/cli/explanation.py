"""Run a text through a model: the layers' maps, their rollout, and the scores of one token."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz.cli.errors import CommandError
from captum_vz.cli.models import Loaded
from captum_vz.study.examples.text import PreparedText, prepare_text
from captum_vz.study.methods import Batch, Method, rollout_of
from captum_vz.visualization import readable_tokens


@dataclass
class Explanation:
    """What the command prints and draws. Scores and maps are those of the method's `attribute`, for one text.

    Attributes:
        tokens: The tokens as a person reads them, special tokens included.
        token: The position of the token explained.
        layer: The layer of the scores, from 0; of joined maps, the last of the layers; None: all layers.
        depth: The number of layers from which `layer` is chosen.
        scores: `(in,)`, summing to 1.
        maps: A map `(out, in)` for each layer; empty if the method has no layer maps.
        rollout: The joined maps `(out, in)` through all layers; None if no method joins these maps.
        predictions: The model's likeliest words and their probabilities, at a mask or after the token.
    """

    tokens: list[str]
    token: int
    layer: int | None
    depth: int
    scores: Tensor
    maps: list[Tensor]
    rollout: Tensor | None
    predictions: list[tuple[str, float]]


def explain(text: str, loaded: Loaded, method: Method, token: str | None, layer: int) -> Explanation:
    """Run the text through the model and compute scores and maps.

    Args:
        text: The text.
        loaded: The model.
        method: A row of :data:`~captum_vz.study.METHODS`.
        token: The token to explain, by its position or as it is written. None: see
            :func:`~captum_vz.study.examples.text.find_token`.
        layer: The layer, negative ones from the end. Methods without layers ignore it.
    """
    model, tokenizer, layers = loaded
    try:
        prepared = prepare_text(model, tokenizer, text, token)
    except ValueError as error:
        message = str(error)
        raise CommandError(f"--{message}" if message.startswith("token ") else message) from error
    for remark in _remarks(text, tokenizer, prepared, token):
        warnings.warn(remark, stacklevel=2)
    if method.layered:  # the one layer of ALBERT runs as often as the configuration says
        _check_layer(layer, max(len(layers), getattr(model.config, "num_hidden_layers", 0)))
    batch = Batch(model, tokenizer, layers, prepared.inputs, [prepared.token])
    maps, rollout = _maps(batch, method)
    rows = method.rows(batch)
    if method.layered:
        _check_layer(layer, len(rows))
    return Explanation(
        tokens=list(prepared.tokens),
        token=prepared.token,
        layer=layer % len(rows) if method.layered else None,
        depth=len(rows),
        scores=rows[layer if method.layered else 0][0],
        maps=maps,
        rollout=rollout,
        predictions=_predictions(model, tokenizer, prepared),
    )


def _check_layer(layer: int, depth: int) -> None:
    if not -depth <= layer < depth:
        raise CommandError(f"--layer {layer} is out of range: the model has {depth} layers, {-depth} to {depth - 1}.")


def _remarks(text: str, tokenizer: Any, prepared: PreparedText, token: str | None) -> list[str]:
    """What a user may not have meant: unknown words, a mask that is none, and the token that is explained instead."""
    mask, names = tokenizer.mask_token, prepared.tokens
    ids = prepared.inputs["input_ids"][0].tolist()
    masks = [i for i, number in enumerate(ids) if mask is not None and number == tokenizer.mask_token_id]
    # The unknown token of some decoders is also the one that begins or ends each text.
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    unknown = [i for i, number in enumerate(ids) if number == tokenizer.unk_token_id and number not in ends]
    remarks = []
    if unknown:
        remarks.append(
            f"the tokenizer does not know what stands at {_listed(unknown)}: the model is given {names[unknown[0]]}."
        )
    for written in dict.fromkeys(re.findall(r"\[mask\]|<mask>", text, re.IGNORECASE)):
        if mask is None:
            remarks.append(f"{written} is read as text: the model has no mask token.")
        elif written not in ("[MASK]", mask):
            remarks.append(f"{written} is read as text: write [MASK] for the mask.")
    if token is None and len(masks) > 1:
        remarks.append(f"the text has {len(masks)} masks, at {_listed(masks)}: --token {masks[0]} is explained.")
    if token is None and not masks:
        remarks.append(f"the text has no mask: its last token is explained, --token {prepared.token}.")
    return remarks


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


@torch.no_grad()
def _predictions(model: Any, tokenizer: Any, text: PreparedText) -> list[tuple[str, float]]:
    """The three likeliest words where the model predicts one: at a mask, or after the token of a causal model."""
    name = type(model).__name__
    if not (text.is_mask if name.endswith("ForMaskedLM") else name.endswith(("ForCausalLM", "LMHeadModel"))):
        return []
    likeliest = model(**text.inputs).logits[0, text.token].float().softmax(-1).topk(3)
    words = readable_tokens(tokenizer, likeliest.indices.tolist())
    return list(zip(words, likeliest.values.tolist(), strict=True))
