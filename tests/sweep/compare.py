"""One layer's maps against the twin's."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from captum_vz import ValueZeroing
from captum_vz._engine.replay.packed import PackedPairs
from captum_vz._engine.replay.sequences import WholeSequences
from captum_vz._engine.structure.windows import Windows
from tests.sweep.rows import Row
from tests.sweep.twin import Product, Run, by_token, twin_scores, twin_scores_by_position

TOLERANCE = 1e-4
# Sources that the twin zeroes in one layer: all of a sentence, evenly chosen ones of an image or a sound.
SOURCES = 16


def compare(
    model_type: str, stack: str, forward: Callable[..., Any], inputs: dict[str, Any], run: Run
) -> Iterator[Row]:
    """A row for each attention of a layer: self, and cross where there is one."""
    attentions = run.attentions()
    for attention in ("self", "cross")[: len(attentions) or 1]:
        name = stack if attention == "self" else f"{stack}, cross"
        tried: list[Any] = []
        try:
            with replays_noted(tried), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rows that stay zero are told of; the twin tells too
                method = ValueZeroing(forward, run.layer, attention=attention, normalize=False)
                scores = method.attribute(inputs)
        except AssertionError as error:
            # What else comes out of a softmax (convolutions, windows of several sizes) is no second attention.
            if attention == "self" or "has no second attention" not in str(error):
                yield Row(model_type, name, "refused" if attentions else "other form", note=describe(error))
            continue
        except Exception as error:  # none that we raise on purpose
            yield Row(model_type, name, "fails", note=describe(error))
            continue
        products = next((some for some in attentions if some[0].weights.shape[1:] == scores.shape[1:]), [])
        row = Row(model_type, name, "no twin", way_of(tried))
        count = scores.shape[2]
        sources = sorted({round(place) for place in torch.linspace(0, count - 1, min(SOURCES, count)).tolist()})
        singles = [[source] for source in sources]
        side = "decoder_attention_mask" if "decoder" in stack else "attention_mask"
        mask = inputs.get(side, inputs.get("attention_mask"))
        if not run.reproduced:
            row.note = "the layer, run again on what it was given, returns something else"
        # Whatever is told by position is zeroed by position, also where a window is as long as the sequence.
        elif products and by_token(run.hidden, *scores.shape[:2]).dim() == 3 and row.way != "windows":
            valid = valid_rows(mask, run, scores.shape[0], scores.shape[1])
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
            assert of_words is not None  # as before
            found = scores_of(words, method, inputs, count)
            valid = torch.ones(scores.shape[:2]) if row.way == "windows" else valid_rows(mask, run, *scores.shape[:2])
            pairs = [(scores[:, :, sources], by_position), (found, of_words)]
            row.judge([(one, other[:, : scores.shape[1]] * valid[..., None]) for one, other in pairs], TOLERANCE)
        else:
            shapes = [tuple(some[0].weights.shape) for some in attentions]
            row.note = f"products of softmaxed weights {shapes} for a map {tuple(scores.shape)}"
        yield row


def shape_in(run: Run, scores: Tensor) -> torch.Size:
    """The shape of a layer's map with what its model put behind the inputs (Longformer, up to its window)."""
    batch, out, count = scores.shape
    length = run.hidden.shape[1]
    behind = run.hidden.dim() == 3 and len(run.hidden) == batch and out == count < length
    return torch.Size((batch, length, length)) if behind else scores.shape


@dataclass
class Zeroed:
    """What is zeroed at a time, in one head or in all, and the row of the map that is wanted, or all."""

    groups: list[list[int]]
    head: int | None = None
    row: int | None = None


def words_of(count: int) -> list[list[int]]:
    """Words of two tokens each, evenly chosen ones where they are many."""
    words = [[source, source + 1] for source in range(0, count - 1, 2)] + [[count - 1]] * (count % 2)
    return words[:: math.ceil(len(words) / SOURCES)]


def scores_of(
    words: list[list[int]], method: ValueZeroing, inputs: dict[str, Any], count: int, **options: Any
) -> Tensor:
    """The scores `(..., word)` of some words; what else the `count` sources are is one more."""
    mask = torch.zeros(1, count, dtype=torch.long)
    for number, word in enumerate(words, start=1):
        mask[0, word] = number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spread = method.attribute(inputs, feature_mask=mask, **options)
    # All members of a word carry its score, but for those that are padding.
    return torch.stack([spread[..., word].amax(-1) for word in words], dim=-1)


def further_checks(
    method: ValueZeroing, inputs: dict[str, Any], scores: Tensor, products: list[Product]
) -> Iterator[tuple[Tensor, Zeroed]]:
    """Scores of words of two tokens, in all heads; and in the last head, of one row, some words at a time."""
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
    except AssertionError:  # heads that share a value cannot lose it one by one, where attention is inline
        return
    yield found, Zeroed(words, head, row)


def valid_rows(mask: Tensor | None, run: Run, batch: int, out: int) -> Tensor:
    """Which targets are no padding, `(batch, out)`: by the model's mask, or by the weights where frames are pooled."""
    if mask is not None and mask.shape == (batch, out):
        return mask.bool()
    weights = run.attentions()[0][0].weights
    if weights.shape[1:] != (out, out) or out == 1 or len(weights) % batch:
        return torch.ones(batch, out, dtype=torch.bool)
    weights = weights.unflatten(0, (batch, -1))
    sees_itself = weights.amax(1).diagonal(dim1=1, dim2=2) > 0
    # A row of padding that sees nothing has the same weight everywhere.
    sees_nothing = (weights.amax(-1) - weights.amin(-1) < 1e-6).all(1)
    return sees_itself & ~sees_nothing


@contextmanager
def replays_noted(tried: list[Any]) -> Iterator[None]:
    """Note which ways of replaying are tried: the last one is the one that served."""
    with ExitStack() as patches:
        for way in (PackedPairs, WholeSequences, Windows):
            made = patch.object(way, "__init__", _noting(way.__init__, tried))
            patches.enter_context(made)
        yield


def _noting(construct: Callable[..., None], tried: list[Any]) -> Callable[..., None]:
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        tried.append(self)
        construct(self, *args, **kwargs)

    return noting


def way_of(tried: list[Any]) -> str:
    if not tried:
        return ""
    if isinstance(tried[-1], Windows):
        return "windows"
    if isinstance(tried[-1], WholeSequences):
        return "whole sequences"
    answered = isinstance(tried[-1].answer, torch.nn.Module)
    return "packed pairs" if answered else "packed, function answered"


def describe(error: Exception) -> str:
    """An error as one line of the table, without the paths of the machine that it was raised on."""
    text = re.sub(r"/(?:[\w.@-]+/)+", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:300]
