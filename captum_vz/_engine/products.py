"""Products of many rows with one matrix, the fastest way that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

# oneDNN compiles a kernel for each number of rows, and keeps it, half a megabyte: so rows come in few numbers. In
# bfloat16, beyond some 600 rows, it takes twice the time for each (measured on AMX).
STEP = 16
ROWS = {torch.float32: 1024, torch.bfloat16: 512}
# Rows that pay for putting an (out, in) weight into oneDNN's layout; one that is (in, out) takes three times as long.
WORTH = 384


class Product:
    """`rows @ matrix + bias` for rows `(n, a)` and a matrix `(a, b)`, about `count` of them in many calls.

    On a CPU it is oneDNN's: torch's own, in float32, is the Intel library's, which reaches two thirds of the speed of
    other makers' hardware; and none but oneDNN takes a matrix that is laid out once for all calls.
    """

    def __init__(self, matrix: Tensor, bias: Tensor | None = None, count: int = WORTH) -> None:
        self.matrix = matrix
        self.bias = None if bias is None else bias.contiguous()  # oneDNN reads it as if it were
        self.packed = _packed(matrix) if count >= WORTH * (1 if matrix.T.is_contiguous() else 3) else None

    def __call__(self, rows: Tensor) -> Tensor:
        if self.packed is None:
            return rows @ self.matrix if self.bias is None else torch.addmm(self.bias, rows, self.matrix)
        linear = torch.ops.mkldnn._linear_pointwise
        parts = [linear(part, self.packed, self.bias, "none", [], "") for part in _in_few_sizes(rows)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(rows)]


def padded(rows: int) -> int:
    """The next of the few numbers of rows that products come in."""
    return -(-rows // STEP) * STEP


def _in_few_sizes(rows: Tensor) -> Iterator[Tensor]:
    for part in rows.split(ROWS[rows.dtype]):
        missing = padded(len(part)) - len(part)
        yield functional.pad(part, (0, 0, 0, missing)) if missing else part


def _packed(matrix: Tensor) -> Tensor | None:
    """The matrix in oneDNN's layout; None where that is not to be had."""
    if matrix.device.type != "cpu" or matrix.dtype not in (torch.float32, torch.bfloat16):
        return None
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    try:  # the operators of compiled models, which torch does not promise to keep
        return torch.ops.mkldnn._reorder_linear_weight(matrix.T)
    except (AttributeError, RuntimeError):
        return None
