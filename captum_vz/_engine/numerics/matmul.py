"""Linear products through oneDNN, on CPUs where oneDNN is faster than torch's default.

In float32 on a CPU, torch uses MKL. MKL reaches about half of the processor's peak for few rows, and about two thirds
for many rows on processors that are not Intel's. oneDNN, which torch includes, comes close to the peak. The choice
depends on the machine, the layout of the weight and the number of rows. It depends on no timing, so the numbers are the
same in each run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from captum_vz._private import (
    current_function_mode,
    has_dispatch_modes,
    has_function_modes,
    is_transformed,
    pop_function_mode,
)

# oneDNN compiles a kernel of half a megabyte for each number of rows and keeps it, so rows are padded to few numbers.
# In bfloat16 a product of more than about 600 rows takes twice the time for each row (measured on AMX).
STEP = 16
FEW, STEP_OF_FEW = 128, 4
ROWS = {torch.float32: 1024, torch.bfloat16: 512}
# The overhead of a oneDNN call is too high for a matrix of fewer entries, and for a product of fewer multiplications.
SMALL = 1 << 17
LEAST_WORK = 1 << 22
# With AVX-512, oneDNN is faster for any number of rows (measured on Zen 4). With AVX2, it is faster for few rows and a
# contiguous (out, in) weight (measured on Zen 3). Other processors were not measured and use torch's default.
UNLIMITED = sys.maxsize
# torch has these operators for compiled models and may remove them. No others accept a matrix in oneDNN's own layout.
OPERATORS = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
# Number of rows from which converting an (out, in) weight to oneDNN's layout saves time. Converting an (in, out) weight
# takes three times as long.
ROWS_THAT_PAY_REORDER = 1536
_PLAIN = (Tensor, nn.Parameter)
# Functions that linear modules call, with their arguments as (rows, weight, bias): nn.Linear, transformers' Conv1D.
_LINEAR: dict[Any, Callable[..., tuple[Tensor, Tensor, Tensor | None]]] = {
    functional.linear: lambda rows, weight, bias=None: (rows, weight, bias),
    torch.addmm: lambda bias, rows, matrix: (rows, matrix.T, bias),
}


class Product:
    """Compute `rows @ matrix + bias` for rows `(n, a)` and a matrix `(a, b)`.

    `count` is about the number of rows that all calls together will pass.
    """

    def __init__(self, matrix: Tensor, bias: Tensor | None = None, count: int = 0) -> None:
        self.weight = matrix.T
        self.bias = None if bias is None else bias.contiguous()  # oneDNN ignores its strides
        self.by_onednn = _most_rows_by_onednn(self.weight)
        if self.by_onednn == UNLIMITED and count >= ROWS_THAT_PAY_REORDER * (1 if self.weight.is_contiguous() else 3):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) <= self.by_onednn:
            return _by_onednn(rows, self.weight, self.bias)
        return functional.linear(rows, self.weight, self.bias)


class OneDnnLinears(TorchFunctionMode):
    """Let linear modules that run inside a `with` block multiply as `Product` does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _LINEAR and 1 < len(args) <= 3 and not kwargs:
            rows, weight, bias = _LINEAR[func](*args)
            if _is_plain(rows, weight, bias) and rows.shape[:-1].numel() <= _most_rows_by_onednn(weight):
                bias = None if bias is None else bias.contiguous()
                return _by_onednn(rows.flatten(0, -2), weight, bias).view(*rows.shape[:-1], weight.shape[0])
        return func(*args, **kwargs) if kwargs else func(*args)

    def __exit__(self, *error: Any) -> None:
        if current_function_mode() is self:  # it may have been left before, or never entered
            pop_function_mode()

    @staticmethod
    def gain(weights: Iterable[Tensor]) -> bool:
        """Return whether this mode makes products with any of the weights faster.

        Ask before the mode is entered, because a mode costs time at each function call.
        """
        return not has_function_modes() and any(
            x.dim() == 2 and x.dtype == torch.float32 and _most_rows_by_onednn(x) for x in weights
        )


def with_onednn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`, a module for example, inside `OneDnnLinears`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with OneDnnLinears():
            return function(*args, **kwargs)

    return run


def padded(rows: int) -> int:
    """Return the number of rows that a product of `rows` rows is padded to."""
    step = STEP if rows > FEW else min(STEP, STEP_OF_FEW)
    return -(-rows // step) * step


def _is_plain(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a product may go to oneDNN: large enough, plain float32 tensors, and no gradients or modes."""
    for x in (rows, weight) if bias is None else (rows, weight, bias):
        plain = type(x) in _PLAIN and x.layout == torch.strided and not x.is_nested
        if not plain or x.dtype != torch.float32 or not x.is_cpu:
            return False
    return (
        weight.dim() == 2
        and rows.dim() > 1
        and (bias is None or bias.shape == weight.shape[:1])
        and rows.shape[-1:] == weight.shape[1:]
        and rows.shape[:-1].numel() * weight.numel() >= LEAST_WORK
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not has_function_modes()  # the user's modes must see this call
        and not is_transformed()  # oneDNN drops forward-mode tangents
    )


def _most_rows_by_onednn(weight: Tensor) -> int:
    """Return the largest number of rows for which oneDNN is faster with a weight `(out, in)`; 0 if never."""
    in_order = weight.is_contiguous()
    if not (
        weight.numel() >= SMALL
        and weight.device.type == "cpu"
        and weight.dtype in ROWS
        and not has_dispatch_modes()  # a mode that counts operations may not know oneDNN's
        and (in_order or weight.T.is_contiguous())
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)
    ):
        return 0
    if weight.dtype == torch.bfloat16:
        return UNLIMITED if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 0
    return {"AVX512": UNLIMITED, "AVX2": FEW if in_order else 0}.get(torch.backends.cpu.get_cpu_capability(), 0)


def _by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    count, most = rows.shape[0], ROWS[rows.dtype]
    if missing := padded(count) - count:
        rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
    parts = rows.split(most) if count > most else (rows,)
    products = [torch.ops.mkldnn._linear_pointwise(part, weight, bias, "none", [], "") for part in parts]
    product = torch.cat(products) if count > most else products[0]
    return product[:count] if missing else product


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether the device has units for bfloat16 products, several times as fast as float32 products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        able = torch.cpu.get_capabilities()
        return bool(able.get("amx_bf16") or able.get("avx512_bf16"))
    return False
