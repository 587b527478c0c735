"""Batches: filled by tokens, halved when memory runs out; the numbers do not depend on them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from captum_vz.study import Batch, Example, Scorer
from tests.study.conftest import Shipped

WORDS = ("the", "pictures", "of", "some", "hat", "near", "the", "birds")


@pytest.fixture(scope="module")
def ragged() -> list[Example]:
    """24 sentences of 2 to 9 words."""
    found = []
    for number in range(24):
        words = ("hats", *WORDS[: number % 8], "[MASK]")
        found.append(Example(str(number), words, len(words) - 1, (0,), "are", "is"))
    return found


class Watched:
    """Equal scores, and the shapes of the batches. Batches of more than `most` tokens run out of memory."""

    def __init__(self, most: int = 10**9, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.most = most
        self.error = error
        self.seen: list[tuple[int, int]] = []

    def rows(self, batch: Batch) -> Tensor:
        mask = batch.inputs["attention_mask"]
        self.seen.append((mask.shape[0], mask.shape[1]))
        if mask.numel() > self.most:
            raise self.error("no room")
        return mask


def scored(loaded: Shipped, examples: list[Example], watched: Watched, **options: Any) -> list[dict[str, Any]]:
    return Scorer(*loaded, {"watched": watched.rows}, "cue_dot", **options).score(examples)


@pytest.mark.parametrize("tokens", [1, 30, 64, 10**6])
def test_batches_are_filled_by_tokens(tokens: int, shipped: Shipped, ragged: list[Example]) -> None:
    watched = Watched()
    rows = scored(shipped, ragged, watched, batch_tokens=tokens)
    assert [row["example"] for row in rows] == [example.id for example in ragged]
    assert all(count * length <= tokens or count == 1 for count, length in watched.seen)
    assert sum(count for count, _ in watched.seen) == 24
    if tokens == 64:  # no two neighbours would have fitted together
        pairs = zip(watched.seen, watched.seen[1:], strict=False)
        assert all((one[0] + 1) * other[1] > tokens or (one[0] + 1) * one[1] > tokens for one, other in pairs)


def test_batch_without_memory_is_halved(shipped: Shipped, ragged: list[Example]) -> None:
    watched = Watched(most=60)
    rows = scored(shipped, ragged, watched)
    assert len(rows) == 24
    assert all(row["skipped"] is None for row in rows)
    sizes = [count * length for count, length in watched.seen]
    failed = [place for place, size in enumerate(sizes) if size > 60]
    assert 1 <= len(failed) <= 3  # 24, 12 and 6 sentences
    assert failed == list(range(len(failed)))  # later batches fit at once
    assert len(sizes) < 12


def test_other_error_costs_each_once(shipped: Shipped, ragged: list[Example]) -> None:
    watched = Watched(most=10, error=KeyError)
    scored(shipped, ragged, watched)
    assert len(watched.seen) == 1 + 24
