"""TODO."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode

# oneDNN compiles a kernel for each number of rows, and keeps it, half a megabyte: so rows come in few numbers. In
# bfloat16, beyond some 600 rows, it takes twice the time for each (measured on AMX).
STEP = 16
FEW, STEP_OF_FEW = 128, 4
ROWS = {torch.float32: 1024, torch.bfloat16: 512}
# What a call of oneDNN costs, besides the product, is too much for matrices of fewer numbers, or for so few rows that
# the product has fewer multiplications.
SMALL = 1 << 17
LEAST_WORK = 1 << 22
# With AVX-512 oneDNN gains for any rows; with AVX2 for few, by an (out, in) weight (measured on Zen 4 and Zen 3).
# Elsewhere nothing is known, and torch's own serve.
UNLIMITED = sys.maxsize
# Of compiled models, the only ones that take a matrix in oneDNN's own layout. torch does not promise to keep them.
OPERATORS = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
# Rows that pay for putting an (out, in) weight into oneDNN's layout; one that is (in, out) takes three times as long.
ROWS_THAT_PAY_REORDER = 1536
# How linear modules multiply: torch's, and transformers' Conv1D.
_LINEAR: dict[Any, Callable[..., tuple[Tensor, Tensor, Tensor | None]]] = {
    functional.linear: lambda rows, weight, bias=None: (rows, weight, bias),
    torch.addmm: lambda bias, rows, matrix: (rows, matrix.T, bias),
}


class Product:
    """`rows @ matrix + bias` for rows `(n, a)` and a matrix `(a, b)`, about `count` of them in many calls."""

    def __init__(self, matrix: Tensor, bias: Tensor | None = None, count: int = 0) -> None:
        self.weight = matrix.T
        self.bias = None if bias is None else bias.contiguous()  # oneDNN reads it as if it were
        self.by_onednn = _most_rows_by_onednn(self.weight)
        if self.by_onednn == UNLIMITED and count >= ROWS_THAT_PAY_REORDER * (1 if self.weight.is_contiguous() else 3):
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) <= self.by_onednn:
            return _by_onednn(rows, self.weight, self.bias)
        return functional.linear(rows, self.weight, self.bias)


class OneDnnLinears(TorchFunctionMode):
    """Lets the linear modules that run inside a `with` block multiply as `Product` does, while it is `on`."""

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self.on = on

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.on and func in _LINEAR and 1 < len(args) <= 3 and not kwargs:
            rows, weight, bias = _LINEAR[func](*args)
            if _is_plain(rows, weight, bias) and rows.shape[:-1].numel() <= _most_rows_by_onednn(weight):
                bias = None if bias is None else bias.contiguous()
                return _by_onednn(rows.flatten(0, -2), weight, bias).unflatten(0, rows.shape[:-1])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def gain(weights: Iterable[Tensor]) -> bool:
        """Whether products with any of some weights would be faster: to ask at each function costs time."""
        return not torch._C._len_torch_function_stack() and any(
            x.dim() == 2 and x.dtype == torch.float32 and _most_rows_by_onednn(x) for x in weights
        )

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Ask at no function for the length of a `with` block, inside of this one's, unless another mode lies above."""
        if _get_current_function_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


def with_onednn(function: Callable[..., Any]) -> Callable[..., Any]:
    """A module, or another function, that multiplies as within `OneDnnLinears`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with OneDnnLinears():
            return function(*args, **kwargs)

    return run


def padded(rows: int) -> int:
    """The next of the few numbers of rows that products come in."""
    step = STEP if rows > FEW else min(STEP, STEP_OF_FEW)
    return -(-rows // step) * step


def _is_plain(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is a linear module's, of many rows in float32, with nothing else that is to happen to it."""
    given = [rows, weight] if bias is None else [rows, weight, bias]
    return (
        all(type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_nested for x in given)
        and all(x.dtype == torch.float32 and x.device.type == "cpu" for x in given)
        and weight.dim() == 2
        and rows.dim() > 1
        and (bias is None or bias.shape == weight.shape[:1])
        and rows.shape[-1:] == weight.shape[1:]
        and rows.shape[:-1].numel() * weight.numel() >= LEAST_WORK
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_function_stack()  # modes of the user's, which are to see it
        and forward_ad._current_level < 0  # oneDNN's products drop tangents
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _most_rows_by_onednn(weight: Tensor) -> int:
    """How many rows at most oneDNN multiplies by a weight `(out, in)` in less time than torch; 0 where it cannot."""
    in_order = weight.is_contiguous()
    if not (
        weight.numel() >= SMALL
        and weight.device.type == "cpu"
        and weight.dtype in ROWS
        and not torch._C._len_torch_dispatch_stack()  # modes that count operations, say, know torch's own alone
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
    linear = torch.ops.mkldnn._linear_pointwise
    parts = [linear(part, weight, bias, "none", [], "") for part in _in_few_sizes(rows)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(rows)]


def _in_few_sizes(rows: Tensor) -> Iterator[Tensor]:
    for part in rows.split(ROWS[rows.dtype]):
        missing = padded(len(part)) - len(part)
        yield torch.cat([part, part[-1:].expand(missing, -1)]) if missing else part


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device has units for products in bfloat16, several times as fast as those in float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):
        able = torch.cpu.get_capabilities()
        return bool(able.get("amx_bf16") or able.get("avx512_bf16"))
    return False
