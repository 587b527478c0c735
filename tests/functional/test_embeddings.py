"""Scores of tokens from attributions to embeddings equal loops over numbers, and back."""

from math import sqrt
from typing import Any

import pytest
import torch

from captum_vz.errors import ArgumentError
from captum_vz.functional import to_embeddings, token_scores

NAIVE = {
    "sum": lambda entries: sum(entries),
    "l1": lambda entries: sum(abs(entry) for entry in entries),
    "l2": lambda entries: sqrt(sum(entry * entry for entry in entries)),
}


@pytest.mark.parametrize("reduce", NAIVE)
def test_token_scores_equal_naive_twin(reduce: Any) -> None:
    attributions = torch.randn(2, 3, 5, dtype=torch.float64)
    scores = token_scores(attributions, reduce)
    assert scores.shape == (2, 3)
    for b in range(2):
        for j in range(3):
            assert scores[b, j].item() == pytest.approx(NAIVE[reduce](attributions[b, j].tolist()), rel=1e-12)
    assert torch.equal(token_scores(attributions), token_scores(attributions, "sum"))


@pytest.mark.parametrize("reduce", NAIVE)
def test_token_scores_of_half_precision(reduce: Any) -> None:
    attributions = torch.rand(1, 2, 1000).bfloat16()
    scores = token_scores(attributions, reduce)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), token_scores(attributions.double(), reduce), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("attributions", "reduce", "message"),
    [
        (torch.zeros(2, 3), "sum", r"is \(2, 3\)"),
        (torch.zeros(2, 3, 4, 5), "l2", r"is \(2, 3, 4, 5\)"),
        ((torch.zeros(2, 3, 4),), "sum", "of type tuple"),
        (torch.zeros(2, 3, 4), "mean", "reduce is 'mean'"),
    ],
)
def test_token_scores_of_wrong_arguments(attributions: Any, reduce: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        token_scores(attributions, reduce)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_to_embeddings_is_inverse_of_sum(dtype: torch.dtype) -> None:
    row, inputs = torch.randn(2, 5, dtype=dtype), torch.randn(2, 5, 7)
    spread = to_embeddings(row, inputs)
    assert spread.shape == inputs.shape
    assert (spread == spread[..., :1]).all()
    torch.testing.assert_close(token_scores(spread), row.to(spread.dtype))


def test_to_embeddings_keeps_a_tuple() -> None:
    row, inputs = torch.rand(1, 4), torch.randn(1, 4, 3)
    (spread,) = to_embeddings(row, (inputs,))
    assert torch.equal(spread, to_embeddings(row, inputs))


@pytest.mark.parametrize(
    ("row", "inputs", "message"),
    [
        (torch.rand(1, 4), torch.zeros(1, 4, dtype=torch.long), r"is \(1, 4\) of"),
        (torch.rand(1, 4), torch.zeros(1, 4, 3, dtype=torch.long), r"is \(1, 4, 3\) of"),
        (torch.rand(1, 4), [torch.zeros(1, 4, 3)], "of type list"),
        (torch.rand(1, 4), (torch.zeros(1, 4, 3),) * 2, "is a tuple of 2"),
        (torch.rand(1, 5), torch.zeros(1, 4, 3), r"row is \(1, 5\)"),
        (torch.rand(1, 4, 4), torch.zeros(1, 4, 3), r"row is \(1, 4, 4\)"),
        ([0.5, 0.5], torch.zeros(1, 2, 3), "row is of type list"),
    ],
)
def test_to_embeddings_of_wrong_arguments(row: Any, inputs: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        to_embeddings(row, inputs)
