"""Compare the maps of one layer with the twin's."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing
from captum_vz.verification.definition import Product
from tests.sweep.replays import PACKED, WINDOWS, replays_noted, way_of, why_not_folded
from tests.sweep.rows import Row
from tests.sweep.twin import Run, by_token, twin_scores, twin_scores_by_position

TOLERANCE = 1e-4
# How many sources the twin zeroes in one layer. Of more sources it takes every second, third, and so on.
SOURCES = 16


def compare(
    model_type: str, stack: str, forward: Callable[..., Any], inputs: dict[str, Any], run: Run, long: bool = False
) -> Iterator[Row]:
    """A row for each attention of a layer: self-attention, and cross-attention if there is one.

    If the error of self-attention names the attention modules of the layer, there is a row for each of them instead.

    With `long`, the row of a layer that is replayed as packed pairs says why it does not fold.
    """
    attentions = run.attentions()
    asked: list[tuple[str, Any]] = [(stack, "self"), (f"{stack}, cross", "cross")][: len(attentions) or 1]
    while asked:
        name, attention = asked.pop(0)
        try:
            with replays_noted() as replays, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rows of zeros give a warning; the twin checks them
                method = ValueZeroing(forward, run.layer, attention=attention, normalize=False)
                scores = method.attribute(inputs)
        except AssertionError as error:
            if attention == "self" and (names := names_in(error)):
                asked = [(f"{stack}, {one}", run.layer.get_submodule(one)) for one in names]
                continue
            # Some layers use a softmax elsewhere (convolutions, windows of several sizes): no second attention.
            if attention != "cross" or "has no second attention" not in str(error):
                yield Row(model_type, name, "refused" if attentions else "other form", note=describe(error))
            continue
        except Exception as error:  # not raised on purpose
            yield Row(model_type, name, "fails", note=describe(error))
            continue
        first = attentions[0] if attentions else []
        alike = next((some for some in attentions if some[0].weights.shape[1:] == scores.shape[1:]), [])
        products = alike
        if isinstance(attention, nn.Module):  # attentions before it may be of a kind whose weights tell no padding
            products = first = run.products_of(attention)
        row = Row(model_type, name, "no twin", way_of(replays, long))
        row.note = why_not_folded(replays) if long and row.way == PACKED else ""
        count = scores.shape[2]
        sources = sorted({round(place) for place in torch.linspace(0, count - 1, min(SOURCES, count)).tolist()})
        singles = [[source] for source in sources]
        side = "decoder_attention_mask" if "decoder" in stack else "attention_mask"
        mask = inputs.get(side, inputs.get("attention_mask"))
        if not run.reproduced:
            row.note = "the layer, run again on its recorded input, returns another output"
        # Windows are always zeroed by position, even if a window is as long as the sequence.
        elif products and by_token(run.hidden, *scores.shape[:2]).dim() == 3 and row.way != WINDOWS:
            valid = valid_rows(mask, first, scores.shape[0], scores.shape[1])
            checks = [(scores[:, :, sources], Zeroed(singles))]
            checks += further_checks(method, inputs, scores, products)
            pairs = []
            for found, zeroed in checks:
                expected = twin_scores(run, products, zeroed.groups, zeroed.head, scores.shape[0])
                expected = expected if expected.shape[:2] == scores.shape[:2] else expected.transpose(0, 1)
                expected = expected * valid[..., None]
                pairs.append((found, expected if zeroed.row is None else expected[:, zeroed.row]))
            row.judge(pairs, TOLERANCE)
        elif attentions and (by_position := twin_scores_by_position(run, shape_in(run, scores), singles)) is not None:
            words = words_of(count)
            of_words = twin_scores_by_position(run, shape_in(run, scores), words)
            assert of_words is not None  # because by_position is not
            found = scores_of(words, method, inputs, count)
            valid = torch.ones(scores.shape[:2]) if row.way == WINDOWS else valid_rows(mask, first, *scores.shape[:2])
            pairs = [(scores[:, :, sources], by_position), (found, of_words)]
            row.judge([(one, other[:, : scores.shape[1]] * valid[..., None]) for one, other in pairs], TOLERANCE)
        else:
            shapes = [tuple(some[0].weights.shape) for some in attentions]
            row.note = f"products of softmaxed weights {shapes} for a map {tuple(scores.shape)}"
        yield row


def names_in(error: Exception) -> list[str]:
    """The names of attention modules that an error lists, in the order in which they ran."""
    return re.findall(r"'([\w.]+)'", str(error).partition("attention=layer.get_submodule(")[2])


def shape_in(run: Run, scores: Tensor) -> torch.Size:
    """The shape of the map with the padding that the model itself appended (Longformer fills up its window)."""
    batch, out, count = scores.shape
    length = run.hidden.shape[1]
    appended = run.hidden.dim() == 3 and len(run.hidden) == batch and out == count < length
    return torch.Size((batch, length, length)) if appended else scores.shape


@dataclass
class Zeroed:
    """Groups of sources to zero, in one head or (None) in all heads, for one row of the map or (None) all rows."""

    groups: list[list[int]]
    head: int | None = None
    row: int | None = None


def words_of(count: int) -> list[list[int]]:
    """Words of two tokens each: all of them, or evenly spaced ones if there are too many."""
    words = [[source, source + 1] for source in range(0, count - 1, 2)] + [[count - 1]] * (count % 2)
    return words[:: math.ceil(len(words) / SOURCES)]


def scores_of(
    words: list[list[int]], method: ValueZeroing, inputs: dict[str, Any], count: int, **options: Any
) -> Tensor:
    """The scores of some words, `(..., word)`. All other sources, of `count`, are one more group."""
    mask = torch.zeros(1, count, dtype=torch.long)
    for number, word in enumerate(words, start=1):
        mask[0, word] = number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spread = method.attribute(inputs, feature_mask=mask, **options)
    # All tokens of a word have its score, except padding.
    return torch.stack([spread[..., word].amax(-1) for word in words], dim=-1)


def further_checks(
    method: ValueZeroing, inputs: dict[str, Any], scores: Tensor, products: list[Product]
) -> Iterator[tuple[Tensor, Zeroed]]:
    """Scores of words of two tokens in all heads, then in the last head for one row, three words at a time."""
    batch, out, count = scores.shape
    words = words_of(count)
    yield scores_of(words, method, inputs, count), Zeroed(words)
    values = products[0].values
    if values.dim() < 3 or len(values) % batch:
        return
    head, row = len(values) // batch - 1, out // 2
    of_head = ValueZeroing(method.forward_func, method.layer, attention=method.attention, heads=[head], normalize=False)
    try:
        found = scores_of(words, of_head, inputs, count, token=row, perturbations_per_eval=3)
    except AssertionError:  # heads that share a value cannot be zeroed one by one if the attention is inline
        return
    yield found, Zeroed(words, head, row)


def valid_rows(mask: Tensor | None, first: list[Product], batch: int, out: int) -> Tensor:
    """Which targets are not padding, `(batch, out)`: from the mask, or from the weights if the model pools frames."""
    if mask is not None and mask.shape == (batch, out):
        return mask.bool()
    weights = first[0].weights
    if weights.shape[1:] != (out, out) or out == 1 or len(weights) % batch:
        return torch.ones(batch, out, dtype=torch.bool)
    weights = weights.unflatten(0, (batch, -1))
    sees_itself = weights.amax(1).diagonal(dim1=1, dim2=2) > 0
    # A padded row that attends to nothing has the same weight everywhere.
    sees_nothing = (weights.amax(-1) - weights.amin(-1) < 1e-6).all(1)
    return sees_itself & ~sees_nothing


def describe(error: Exception) -> str:
    """An error as one line of the table, without the paths of this machine."""
    text = re.sub(r"/(?:[\w.@-]+/)+", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:300]
