"""The layer that decides, against its formula."""

import pytest
import torch

from captum_vz.errors import ArgumentError
from captum_vz.functional import deciding_layer


@pytest.mark.parametrize("token", [-1, 3])
def test_layer_of_the_largest_product(token: int) -> None:
    torch.manual_seed(0)
    rows, relevance = torch.rand(6, 5), torch.tensor([9.0, 0.5, -2.0, 1.5, 4.0])
    share = [0.0 if j in (0, token % 5) else max(float(relevance[j]), 0.0) for j in range(5)]
    expected = [sum(float(row[j]) * share[j] for j in range(5)) / sum(share) for row in rows]
    layer, products = deciding_layer(rows, relevance, token)
    assert layer == max(range(6), key=expected.__getitem__)
    torch.testing.assert_close(products, torch.tensor(expected))
    padded = torch.nn.functional.pad(rows, (2, 0)), torch.nn.functional.pad(relevance, (2, 0), value=7)
    assert not torch.equal(deciding_layer(*padded, token if token < 0 else token + 2)[1], products)
    padded[1][:2] = 0  # padding has no relevance
    torch.testing.assert_close(deciding_layer(*padded, token if token < 0 else token + 2)[1], products)


def test_wrong_rows_are_refused() -> None:
    rows = torch.rand(2, 3)
    with pytest.raises(ArgumentError, match=r"relevance \(2,\)"):
        deciding_layer(rows, torch.ones(2))
    with pytest.raises(ArgumentError, match="token is 3"):
        deciding_layer(rows, torch.ones(3), 3)
    with pytest.raises(ArgumentError, match="layer can be chosen"):
        deciding_layer(rows, torch.tensor([1.0, -1.0, 1.0]))
