"""Grades for Value Zeroing, computed by the learner: rows, maps, cross-attention, and effects on a decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.functional import normalize_rows
from captum_vz_lessons.check.verdict import LIKENESS, Verdict, exercise, judge, several, tensor_of

#: A sentence for exercises with the embedded model. Its target is the mask.
SENTENCE = "the pictures of some hat [MASK] scaring marcus."


@exercise(
    "For each source j, compare the layer's outputs with and without the value of j: `1 - "
    "torch.cosine_similarity(without, clean, dim=-1)`. This is column j. Divide each row by its sum. In cross-"
    "attention, sources are tokens of the encoder. In a row, there is one distance for each source."
)
def value_zeroing(
    yours: Any, inputs: Any, *, model: Any, layer: int = -1, token: int | None = None, attention: str = "self"
) -> Verdict:
    r"""Grade Value Zeroing, :math:`\hat C_{ij}`: a map `(out, in)`, or the row of the output token at position `token`.

    `inputs` holds one example. `attention="cross"` asks for the attention of a decoder's layer to the encoder.

    >>> from captum_vz import ValueZeroing
    >>> from captum_vz.testbed import load_model
    >>> from captum_vz_lessons import check
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer(check.SENTENCE, return_tensors="pt")
    >>> scores = ValueZeroing(model, model.bert.encoder.layer[-1]).attribute(inputs)[0]
    >>> check.value_zeroing(scores[6], inputs, model=model, token=6).passed
    True
    >>> check.value_zeroing(scores[:, 6], inputs, model=model, token=6)
    Not yet. value_zeroing: rows and columns are swapped. ...
    """
    layers = find_layers(model, "decoder" if attention == "cross" else None)
    asked = layers[layer]

    def of(one: nn.Module = asked, attention: str = attention, **options: Any) -> Tensor:
        found: Tensor = ValueZeroing(model, one, attention=attention, **options).attribute(inputs)[0]
        return found

    right = of()

    def mistakes() -> dict[str, Any]:
        distances = of(normalize=False)
        wrong: dict[str, Any] = {
            "rows and columns are swapped. Row i holds the sources of output token i: zero the value of token j, and "
            "look at how far the output of token i moves.": (
                right.mT,
                normalize_rows(distances.mT),
                distances.mT,
            ),
            "each column is divided by its sum. Divide each row by its sum.": distances / distances.sum(0),
            "the map is divided by one sum. Divide each row by its own.": distances / distances.sum(),
            "these are the distances themselves. Divide each row by its sum.": distances,
            "these are similarities. The distance is 1 - cos, which is 0 for a token that changes nothing.": (
                normalize_rows(1 - distances),
                1 - distances,
            ),
            "these are attention weights. Value Zeroing measures how far the output moves without a value.": (
                LayerAttention(model, asked, attention=attention).attribute(inputs)[0]
            ),
            "this is the Euclidean distance. The exercise asks for the cosine distance.": (
                of(distance="euclidean"),
                normalize_rows(of(distance="euclidean", normalize=False).square()),
            ),
            "the row is divided by its largest entry. Divide it by its sum.": distances / distances.amax(-1, True),
            "the row is divided by its Euclidean length. Divide it by its sum.": normalize(distances, dim=-1),
            "the row is divided by a softmax. Divide the distances by their sum.": distances.softmax(-1),
            "the token itself is left out. The value of a token counts for its own output, too.": (
                normalize_rows(distances.clone().fill_diagonal_(0))
            ),
        }
        wrong |= {f"this is layer {n}. Take another layer.": of(one) for n, one in enumerate(layers)}
        if attention == "cross":
            wrong["this is the decoder's self-attention. Pass attention='cross'."] = of(attention="self")
            encoder = of(find_layers(model, "encoder")[-1], "self")
            wrong["this is a map of the encoder. Take a layer of the decoder, with attention='cross'."] = encoder
        elif isinstance(asked, nn.TransformerEncoderLayer) and not asked.norm_first:
            wrong["the value is zeroed in one head only. Zero it in all."] = of(heads=0)
        if token is None:
            return wrong
        other = {f"this is the row of output token {n}. Take the row of token {token}.": r for n, r in enumerate(right)}
        rows = {name: tuple(one[token] for one in several(some)) for name, some in wrong.items()}
        return {"this is the whole map. Take the row of the output token.": right} | rows | other

    return judge(yours, right if token is None else right[token], mistakes)


@exercise("Take the row's largest entry: `map[row].argmax()`.")
def source_read(yours: Any, model: Any, inputs: Any, row: int) -> Verdict:
    """Grade the source position on which `row` of cross-attention of the last decoder layer draws most.

    `inputs` is one example, with `input_ids` and `decoder_input_ids`.
    """
    layer = find_layers(model, "decoder")[-1]
    best = ValueZeroing(model, layer, attention="cross").attribute(inputs)[0].argmax(1).tolist()
    ids = inputs["input_ids"][0].tolist()
    same = [place for place, one in enumerate(ids) if one == ids[best[row]]]
    mistakes = {
        f"position {place} holds the same token, and has the smaller share of the row.": place for place in same
    }
    mistakes |= {f"this is the position of row {other}.": place for other, place in enumerate(best)}
    return judge(yours, best[row], mistakes)


@exercise(
    "Compute the number once with all values, and once without the values of token j. The effect of j is the first "
    "minus the second."
)
def effect(
    yours: Any, inputs: Any, *, model: Any, target: Any, layers: Any = None, together: Sequence[int] = ()
) -> Verdict:
    """Grade the signed effect of each token's values on a decision, see :class:`~captum_vz.ValueZeroingEffect`.

    `model` may be a function that returns the logits, if `layers` are passed. The tokens at positions `together` are
    zeroed together, and each of them has the effect of all.
    """
    layers = find_layers(model) if layers is None else list(layers)

    def of(some: list[nn.Module], groups: Tensor | None = None) -> Tensor:
        method = ValueZeroingEffect(model, some)
        found: Tensor = method.attribute(inputs, target=target, feature_mask=groups)[0]
        return found

    alone = right = of(layers)
    places, summed = list(together), alone.clone()
    if places:
        groups = torch.arange(len(alone))[None]
        groups[0, places] = places[0]
        right = of(layers, groups)
        summed[places] = alone[places].sum()
    mistakes: dict[str, Any] = {
        "the sign is wrong. The effect is the clean number minus the number without the value.": -right,
        "the sign is lost. An effect below 0 says that the value speaks against the target.": right.abs(),
        "the values were zeroed in the last layer only. Zero them in all layers.": of(layers[-1:]),
        "the effects are divided by their sum. They are differences of logits.": right / right.sum(),
        "the tokens of a group were zeroed one at a time. Zero their values together.": (alone, summed),
    }
    if (found := tensor_of(yours)) is not None and found.numel() == right.numel():
        clean = (found.reshape(-1) + right).mean()  # if these are the numbers without each value
        if clean.abs() > LIKENESS * right.abs().max():
            mistakes["these are the numbers without each value. Subtract them from the clean number."] = clean - right
    return judge(yours, right, mistakes)
