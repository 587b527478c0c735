"""References for the time of the maps: the definition, one token at a time, and the machine's matrix product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from captum_vz.functional import cosine_distance, normalize_rows
from tests.benchmarks.models import Size


def sequential(model: nn.Module, layers: list[nn.Module], size: Size, ids: Tensor) -> Callable[[], list[Tensor]]:
    """The definition as in the paper's code: one more call of the layer for each layer and each token."""

    def run() -> list[Tensor]:
        calls: list[tuple[nn.Module, Any, Any, Tensor]] = []

        def keep(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append((layer, args, kwargs, first(output)))

        handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in layers]
        model(ids)
        for handle in handles:
            handle.remove()
        return [rerun(*call) for call in calls]

    def rerun(layer: nn.Module, args: Any, kwargs: Any, clean: Tensor) -> Tensor:
        columns = []
        for token in range(ids.shape[1]):

            def zero(module: nn.Module, inputs: Any, output: Tensor, token: int = token) -> Tensor:
                output = output.clone()
                output[:, token, size.first_value :] = 0
                return output

            with size.values(layer).register_forward_hook(zero):
                columns.append(cosine_distance(first(layer(*args, **kwargs)), clean))
        return normalize_rows(torch.stack(columns, dim=-1))

    return run


def floor(size: Size, layers: int, pairs: int, dtype: torch.dtype, device: str, chunk: int) -> Callable[[], None]:
    """The feed-forward's last matrix on all pairs, in chunks: a lower bound, because every exact map needs it."""
    chunk = min(chunk, pairs)
    width, out = size.last
    left = torch.randn(chunk, width, device=device, dtype=dtype)
    weight = torch.randn(out, width, device=device, dtype=dtype)
    product = partial(linear, weight=weight)

    def run() -> None:
        for _ in range(layers):
            for start in range(0, pairs, chunk):
                product(left[: min(chunk, pairs - start)])

    return run


def first(output: Any) -> Tensor:
    """The hidden states of a layer: its output, or the first entry of a tuple."""
    return output if isinstance(output, Tensor) else output[0]
