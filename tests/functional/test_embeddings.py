"""Scores of tokens from attributions to embeddings equal loops over numbers."""

from math import sqrt
from typing import Any

import pytest
import torch

from captum_vz.errors import ArgumentError
from captum_vz.functional import token_scores

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


def test_token_scores_default_keeps_sign() -> None:
    attributions = torch.tensor([[[1.0, -3.0], [2.0, 0.5]]])
    assert torch.equal(token_scores(attributions), torch.tensor([[-2.0, 2.5]]))


@pytest.mark.parametrize("reduce", ["l1", "l2"])
def test_token_scores_norms_ignore_sign(reduce: Any) -> None:
    attributions = torch.randn(2, 3, 5)
    assert torch.equal(token_scores(attributions, reduce), token_scores(-attributions, reduce))


@pytest.mark.parametrize("reduce", NAIVE)
def test_token_scores_of_half_precision(reduce: Any) -> None:
    attributions = torch.rand(1, 2, 1000).bfloat16()
    scores = token_scores(attributions, reduce)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), token_scores(attributions.double(), reduce), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("attributions", "reduce", "message"),
    [
        (torch.zeros(2, 3), "sum", r"attributions is \(2, 3\): pass \(batch, tokens, d\)"),
        (torch.zeros(2, 3, 4, 5), "l2", r"attributions is \(2, 3, 4, 5\): pass \(batch, tokens, d\)"),
        ((torch.zeros(2, 3, 4),), "sum", r"attributions is of type tuple: pass a tensor .* one such tensor for each"),
        (torch.zeros(2, 3, 4), "mean", "reduce is 'mean': pass 'sum', 'l1' or 'l2'"),
    ],
)
def test_token_scores_of_wrong_arguments(attributions: Any, reduce: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        token_scores(attributions, reduce)
