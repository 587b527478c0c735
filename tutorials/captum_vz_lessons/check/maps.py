"""Grades for maps: of Value Zeroing and its effects on a decision, and for numbers that are read from all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from captum_vz import LayerAttention, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.functional import add_residual, deciding_layer, normalize_rows
from captum_vz_lessons.check.verdict import LIKENESS, Verdict, exercise, judge, judge_function, several, tensor_of

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


@exercise(
    "Give each map its residual first, if the exercise asks for one: `(map + identity) / 2`. Multiply the maps with"
    " `@`, the map of the last layer on the left."
)
def rollout(yours: Any, maps: Sequence[Tensor], *, residual: float | None = None, token: int | None = None) -> Verdict:
    """Grade a rollout, the product of the maps of all layers, or its row of the output token at position `token`.

    `maps` holds a map `(1, out, in)` or `(out, in)` for each layer, first layer first. `residual` is what each map gets
    before the product, see :func:`captum_vz.functional.add_residual`.
    """
    plain = _stacked(maps)
    given, eye = add_residual(plain, residual), torch.eye(plain.shape[-1], dtype=plain.dtype)
    right = _product(given)
    mistakes = {
        "the factors are in the wrong order. The map of the last layer comes first: S_2 @ S_1 @ S_0.": (
            _product(given.flip(0))
        ),
        "rows and columns are swapped. Row i belongs to output token i.": right.mT,
        "the entries are multiplied one by one. Use the matrix product, @.": given.prod(0),
        "the entries are multiplied one by one, and rows divided. Use @.": normalize_rows(given.prod(0)),
        "this is the mean of the maps. A rollout is their product.": given.mean(0),
        "this is the sum of the maps. A rollout is their product.": given.sum(0),
        "this is the map of the last layer alone. Multiply the maps of all layers.": given[-1],
        "the last layer is missing in the product.": _product(given[:-1]),
        "the first layer is missing in the product.": _product(given[1:]),
        "rows and columns are swapped in each map.": _product(given.mT),
        "the maps got a residual that the exercise does not ask for.": _product(add_residual(plain, 0.5)),
        "the residual connection is forgotten. Each map gets it before the product.": _product(plain),
        "the residual is added to the product. Add it to each map.": add_residual(_product(plain)[None], residual)[0],
        "rows do not sum to 1: after the identity is added, divide by 2.": _product(plain + eye),
        "each map is halved, but the other half, the identity, is not added.": _product(plain / 2),
    }
    rows = slice(None) if token is None else token
    return judge(yours, right[rows], {name: one[rows] for name, one in mistakes.items()})


def _product(maps: Tensor) -> Tensor:
    return reduce(lambda joined, one: one @ joined, maps)


@exercise("In the map of layer l, take the entry [position after the layer, position before it]. Multiply the entries.")
def path_share(yours: Any, maps: Sequence[Tensor], path: Sequence[int]) -> Verdict:
    r"""Grade the share of one path through the layers, :math:`\prod_l S_l[t_{l+1}, t_l]`. A rollout sums up all paths.

    `path` holds its positions, from the input to the output: one more than there are layers.
    """
    given = _stacked(maps)

    def steps(of: Tensor, order: Sequence[int] = path) -> Tensor:
        return of[torch.arange(len(of)), list(order[1:]), list(order[:-1])]

    entries = steps(given)
    mistakes = {
        "rows and columns are swapped: S[token after, token before].": steps(given.mT).prod(),
        "the path begins at the input: the map of the first layer takes its first step.": steps(given.flip(0)).prod(),
        "the path runs backwards. It begins at the input token.": steps(given, path[::-1]).prod(),
        "this is the sum of the steps. A path's share is their product.": entries.sum(),
        "this is the mean of the steps. A path's share is their product.": entries.mean(),
        "the first step is missing, from the input to the first layer's output.": entries[1:].prod(),
        "the last step is missing.": entries[:-1].prod(),
        "this is the whole rollout. Take the one path only.": _product(given)[path[-1], path[0]],
        "the maps got a residual that the exercise does not ask for.": steps(add_residual(given, 0.5)).prod(),
    }
    return judge(yours, entries.prod(), mistakes)


@exercise(
    "The neighbors of token i are at `[:, i, i - 1]` and `[:, i, i + 1]`. Add both up for each word, and take the mean"
    " over the words."
)
def neighbor_share(yours: Any, maps: Sequence[Tensor], words: Sequence[int]) -> Verdict:
    """Grade the mean share that the tokens at `words` give to both neighbors, one number for each layer."""
    stacked, rows = _stacked(maps), list(words)
    place = torch.arange(stacked.shape[-1])
    distance = place[:, None] - place  # out - in
    near = distance.abs() == 1

    def shares(where: Tensor, of: Tensor = stacked, rows: Any = rows) -> Tensor:
        return (of * where).sum(-1)[:, rows].mean(-1)

    right = shares(near)
    mistakes = {
        "the share of the word itself is included. Neighbors are at a distance of 1.": shares(distance.abs() <= 1),
        "only the neighbor before the word is counted.": shares(distance == 1),
        "only the neighbor after the word is counted.": shares(distance == -1),
        "this is the mean of the two neighbors. Add them up.": right / 2,
        "all tokens are counted. Take the mean over the words.": shares(near, rows=slice(None)),
        "this is the sum over the words. Take their mean.": right * len(rows),
        "divide by the number of words, and not by that of all tokens.": right * len(rows) / len(place),
        "this is the larger of the two neighbors. Add them up.": (stacked * near).amax(-1)[:, rows].mean(-1),
        "rows and columns are swapped. A row holds what an output token draws on.": shares(near, stacked.mT),
    }
    return judge(yours, right, mistakes)


@exercise("The tokens draw on each other at `[:, one, other]` and `[:, other, one]`. Take the mean of both.")
def pair_share(yours: Callable[[Tensor, int, int], Any], maps: Sequence[Tensor], one: int, other: int) -> Verdict:
    """Grade a function of maps `(layers, out, in)`, `one` and `other`: how much two tokens draw on each other.

    This is the mean of the two entries, one number for each layer.
    """

    def of(join: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, int, int], Tensor]:
        return lambda maps, one, other: join(maps[:, one, other], maps[:, other, one])

    direction = "this is one direction only. Take the mean of both entries, (one, other) and (other, one)."
    mistakes = {
        direction: (of(lambda there, back: there), of(lambda there, back: back)),
        "this is the sum. Take the mean.": of(torch.add),
        "this is the product. Take the mean.": of(torch.mul),
        "this is the larger of the two entries. Take their mean.": of(torch.maximum),
        "these are the shares that the tokens give to themselves.": (
            lambda maps, one, other: (maps[:, one, one] + maps[:, other, other]) / 2
        ),
    }
    right = of(lambda there, back: (there + back) / 2)
    return judge_function(yours, right, [(_stacked(maps), one, other)], mistakes)


@exercise(
    "Begin with `relevance.clamp_min(0)`. Set the first entry and the entry of the explained token to 0, and divide by"
    " the sum. Then take `rows @ relevance`."
)
def layer_products(yours: Any, rows: Tensor, relevance: Tensor) -> Verdict:
    """Grade how far the last token's row in each layer agrees with what the decision rests on, `(layers,)`.

    `rows` is `(layers, tokens)`, `relevance` `(tokens,)`, see :func:`captum_vz.functional.deciding_layer`.
    """
    rows, right = rows.double(), deciding_layer(rows.double(), relevance)[1]

    def products(amounts: Tensor, *apart: int) -> Tensor:
        amounts = amounts.double().clone()
        amounts[list(apart)] = 0
        return rows @ (amounts / amounts.sum())

    positive = relevance.clamp_min(0)
    mistakes = {
        "the first token counts. Set its relevance to 0.": products(positive, -1),
        "the explained token counts. Set its relevance to 0.": products(positive, 0),
        "the first and the explained token count. Set their relevance to 0.": products(positive),
        "negative relevances count. Keep the positive ones only.": products(relevance, 0, -1),
        "negative relevances count with their size. Keep the positive ones only.": products(relevance.abs(), 0, -1),
        "divide the relevances by their sum.": right * float(positive[1:-1].sum()),
        "this is the share of one token. Add up over all tokens.": rows[:, positive[1:-1].argmax() + 1],
    }
    return judge(yours, right, mistakes)


def _stacked(maps: Sequence[Tensor]) -> Tensor:
    """The maps of one example, `(layers, out, in)` in float64."""
    return torch.stack([torch.as_tensor(one).double().reshape(one.shape[-2:]) for one in maps])
