"""A sentence through a model: its maps, their rollout, and the scores of one target token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captum_vz import AttentionRollout, LayerAttention, ValueZeroing, ValueZeroingRollout
from captum_vz.cli.errors import CommandError
from captum_vz.cli.models import Loaded
from captum_vz.cli.targets import find_target
from captum_vz.study.targets import longest_text
from captum_vz.visualization import readable_tokens


class Method(NamedTuple):
    """What a method's layer maps are, what their rollout is, and which of the two it prints."""

    maps: Callable[..., Any]
    rollout: Callable[..., Any]
    prints_rollout: bool
    title: str


METHODS = {
    "value-zeroing": Method(ValueZeroing, ValueZeroingRollout, False, "Value Zeroing"),
    "rollout": Method(ValueZeroing, ValueZeroingRollout, True, "Value Zeroing"),
    "attention": Method(LayerAttention, AttentionRollout, False, "attention"),
    "attention-rollout": Method(LayerAttention, AttentionRollout, True, "attention"),
}


@dataclass
class Explanation:
    """What the command prints and draws. Scores and maps are those of the API, `attribute`, for one sentence.

    Attributes:
        tokens: The tokens as they are read, special ones included.
        target: The position of the token explained.
        layer: The layer whose map gives the scores, or up to which the rollout goes; from 0.
        depth: How many such layers there are.
        scores: `(in,)`, summing to 1.
        maps: A map `(out, in)` for each layer.
        rollout: `(out, in)`, through all layers.
        predictions: The model's likeliest words and their probabilities, at a mask or after the target.
    """

    tokens: list[str]
    target: int
    layer: int
    depth: int
    scores: Tensor
    maps: list[Tensor]
    rollout: Tensor
    predictions: list[tuple[str, float]]


def explain(text: str, loaded: Loaded, method: Method, target: str | None, layer: int) -> Explanation:
    """Run the text through the model and compute the maps."""
    model, tokenizer, layers = loaded
    if tokenizer.mask_token:
        text = text.replace("[MASK]", tokenizer.mask_token)
    inputs = tokenizer(text, return_tensors="pt", verbose=False)
    ids = inputs["input_ids"][0].long().tolist()
    masks = [index == tokenizer.mask_token_id for index in ids]
    special = [index in tokenizer.all_special_ids for index in ids]
    if all(special) and not any(masks):
        raise CommandError("the text is empty: there is no token to explain.")
    _refuse_long(len(ids), model, tokenizer)
    tokens = readable_tokens(tokenizer, ids)
    place = find_target(target, tokens, masks, special)
    predictions = _predictions(model, tokenizer, inputs, place, masks[place])
    maps = method.maps(model, layers).attribute(inputs)
    rollouts = method.rollout(model, layers).attribute(inputs, all_layers=True)
    printed = rollouts if method.prints_rollout else maps
    if not -len(printed) <= layer < len(printed):
        raise CommandError(
            f"--layer {layer} is out of range: the model has {len(printed)} layers, "
            f"{-len(printed)} to {len(printed) - 1}."
        )
    return Explanation(
        tokens=tokens,
        target=place,
        layer=layer % len(printed),
        depth=len(printed),
        scores=printed[layer][0, place],
        maps=[one[0] for one in maps],
        rollout=rollouts[-1][0],
        predictions=predictions,
    )


def _refuse_long(count: int, model: Any, tokenizer: Any) -> None:
    limit = longest_text(model, tokenizer)
    if limit is not None and count > limit:
        raise CommandError(f"the text is {count} tokens long, but the model takes at most {limit}.")


@torch.no_grad()
def _predictions(model: Any, tokenizer: Any, inputs: Any, place: int, is_mask: bool) -> list[tuple[str, float]]:
    """The three likeliest words where the model predicts one: at a mask, or, of a causal model, after the target."""
    name = type(model).__name__
    if not (is_mask if name.endswith("ForMaskedLM") else name.endswith(("ForCausalLM", "LMHeadModel"))):
        return []
    likeliest = model(**inputs).logits[0, place].float().softmax(-1).topk(3)
    words = readable_tokens(tokenizer, likeliest.indices.tolist())
    return list(zip(words, likeliest.values.tolist(), strict=True))
