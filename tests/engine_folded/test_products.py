"""Products through oneDNN are those of torch, whatever the number of rows, and are used where they can be."""

from __future__ import annotations

import pytest
import torch

from captum_vz._engine.products import STEP, WORTH, Product

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-13}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, STEP, STEP + 1, 512, 1024, 2051])
@pytest.mark.parametrize("transposed", [True, False], ids=["(out, in)", "(in, out)"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_same_numbers(dtype: torch.dtype, rows: int, transposed: bool, with_bias: bool) -> None:
    weight = torch.randn(24, 40, dtype=dtype)
    matrix = weight.T if transposed else weight.T.contiguous()
    bias = torch.randn(24, dtype=dtype) if with_bias else None
    x = torch.randn(rows, 40, dtype=dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias)
    for count in (WORTH - 1, 3 * WORTH):
        found = Product(matrix, bias, count)(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=DTYPES[dtype], atol=20 * DTYPES[dtype])


@pytest.mark.parametrize("bias", [torch.randn(48)[::2], torch.randn(1).expand(24)], ids=["strided", "expanded"])
def test_a_bias_in_any_layout(bias: torch.Tensor) -> None:
    weight, rows = torch.randn(24, 40), torch.randn(7, 40)
    torch.testing.assert_close(Product(weight.T, bias, WORTH)(rows), rows @ weight.T + bias)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch comes without oneDNN")
def test_where_onednn_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(4, 8).T
    assert Product(matrix, count=WORTH).packed is not None
    assert Product(matrix.contiguous(), count=WORTH).packed is None
    assert Product(matrix.contiguous(), count=3 * WORTH).packed is not None
    assert Product(matrix.bfloat16(), count=WORTH).packed is not None
    assert Product(matrix, count=WORTH - 1).packed is None  # laying it out would cost more than it gains
    assert Product(matrix.double(), count=WORTH).packed is None
    assert Product(matrix.to("meta"), count=WORTH).packed is None
    with torch.backends.mkldnn.flags(enabled=False):
        assert Product(matrix, count=WORTH).packed is None


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_a_torch_without_the_operators(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    matrix, rows = torch.randn(4, 8).T, torch.randn(3, 8)
    assert torch.equal(Product(matrix, count=WORTH)(rows), rows @ matrix)
