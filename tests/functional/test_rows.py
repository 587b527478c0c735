"""Rows of scores sum to one, except for rows of zeros."""

import pytest
import torch

from captum_vz.errors import ArgumentError
from captum_vz.functional import head_vectors, logit_contributions, normalize_rows, widen
from tests.benchmarks.measure import operations


def test_normalize_rows_equals_naive_twin() -> None:
    scores = torch.rand(2, 3, 5, dtype=torch.float64)
    result = normalize_rows(scores)
    for b in range(2):
        for i in range(3):
            for j in range(5):
                assert result[b, i, j] == pytest.approx(scores[b, i, j] / sum(scores[b, i].tolist()))
    torch.testing.assert_close(result.sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_normalize_rows_of_zeros() -> None:
    scores = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert torch.equal(normalize_rows(scores), torch.tensor([[0.0, 0.0], [0.25, 0.75]]))


def test_normalize_rows_ignores_scale() -> None:
    row = torch.tensor([1.0, 2.0, 5.0])
    torch.testing.assert_close(normalize_rows(row * 1e-30), normalize_rows(row))


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_widen_and_normalize_rows_dtype(given: torch.dtype, returned: torch.dtype) -> None:
    assert widen(torch.ones(2, dtype=given)).dtype == returned
    assert normalize_rows(torch.ones(2, dtype=given)).dtype == returned


def test_parts_of_wrong_shape() -> None:
    values = torch.rand(1, 2, 3, 4)
    with pytest.raises(ArgumentError, match=r"need \(head \* 4"):
        head_vectors(values, torch.rand(9, 5))
    update, layer_map = torch.rand(1, 2, 3), torch.rand(1, 3, 3)
    with pytest.raises(ArgumentError, match="updates and 1 maps"):
        logit_contributions([update, update], [layer_map])


def test_logits_need_no_product_of_maps() -> None:
    maps, updates = [torch.rand(1, 10, 10) for _ in range(3)], [torch.rand(1, 1, 10) for _ in range(3)]
    assert operations(lambda: logit_contributions(updates, maps)) == 2 * 2 * 10 * 10
