"""The naive twin: rerun a recorded layer with one value row zeroed, once for each source token.

The twin knows no model and no name, and shares no code with the engine. It watches torch's operators by the mode of
`verify`, which takes the output of a softmax for attention weights if a matrix product multiplies it. The other factor
of that product is the values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Cache

from captum_vz.verification.definition import Operators, Product, without_fused_attention
from captum_vz.verification.recorded import half_squared_distance_of_directions


def values_of(product: Product, sources: list[int], head: int | None, batch: int) -> Tensor:
    """A mask of the values of some sources, in one head of each of `batch` examples or (None) in all heads."""
    mask = torch.zeros(product.values.shape, dtype=torch.bool)
    mask[..., sources, :] = True
    if head is not None:
        heads = len(mask) // batch
        mask.unflatten(0, (batch, heads))[:, [h for h in range(heads) if h != head % heads]] = False
    return mask


@dataclass
class Run:
    """One call of a layer: its arguments and its output."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor

    def again(self, operators: Operators) -> Tensor:
        """The hidden states of the layer in another run, with its operators watched."""
        with without_fused_attention(), torch.no_grad(), operators:
            return hidden_states(self.layer(*self.args, **self.kwargs))

    @cached_property
    def clean(self) -> tuple[Tensor, list[Product]]:
        """The hidden states of the layer in another run with nothing zeroed, and its products."""
        operators = Operators()
        return self.again(operators), operators.found

    @property
    def reproduced(self) -> bool:
        return torch.allclose(self.clean[0], self.hidden, rtol=1e-4, atol=1e-4, equal_nan=True)

    def attentions(self) -> list[list[Product]]:
        """The products of each attention. Products with weights of the same shape are one attention."""
        attentions: dict[torch.Size, list[Product]] = {}
        for product in self.clean[1]:
            attentions.setdefault(product.weights.shape[1:], []).append(product)
        return list(attentions.values())

    def products_of(self, module: nn.Module) -> list[Product]:
        """The products of one attention module."""
        products = Operators()
        before: list[int] = []
        with ExitStack() as hooks:
            hooks.enter_context(module.register_forward_pre_hook(lambda *_: before.append(len(products.found))))
            hooks.enter_context(module.register_forward_hook(lambda *_: before.append(len(products.found))))
            self.again(products)
        return products.found[before[0] : before[-1]]


def hidden_states(output: Any) -> Tensor:
    """The hidden states of a layer: its output, or the first tensor of a nested tuple."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


def _without_caches(arguments: Any) -> Any:
    return tree_map(lambda x: None if isinstance(x, Cache) else x, arguments, is_leaf=lambda x: isinstance(x, Cache))


@torch.no_grad()
def record(forward: Callable[[], Any], layers: list[nn.Module]) -> list[Run]:
    """The last run of each layer that ran."""
    runs: dict[int, Run] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        runs[id(layer)] = Run(layer, _without_caches(args), _without_caches(kwargs), hidden_states(output).clone())

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(keep, with_kwargs=True))
        forward()
    return [runs[id(layer)] for layer in layers if id(layer) in runs]


def twin_scores(
    run: Run, products: list[Product], groups: list[list[int]], head: int | None = None, batch: int = 1
) -> Tensor:
    """How far each output moves when the values of each group of sources are zeroed, `(batch, out, group)`.

    The values are zeroed in all heads (None), or in one head of each of the `batch` examples.
    """
    clean = by_token(run.clean[0], batch, products[0].weights.shape[1])
    masks = [{one.number: values_of(one, group, head, batch) for one in products} for group in groups]
    zeroed = (by_token(run.again(Operators(zeroed=mask)), *clean.shape[:2]) for mask in masks)
    return torch.stack([half_squared_distance_of_directions(one, clean) for one in zeroed], dim=-1)


def by_token(hidden: Tensor, batch: int, out: int) -> Tensor:
    """The hidden states as one vector for each token, `(batch, out, d)`, also if a token has several vectors."""
    if hidden.shape[:2] == (batch, out) and hidden.dim() == 4:
        return hidden.flatten(2)
    if hidden.shape[:3] == (batch, 1, out) and hidden.dim() == 4:
        return hidden[:, 0]
    if hidden.shape[1:3] == (batch, out) and hidden.dim() == 4:
        return hidden.movedim(0, 2).flatten(2)
    return hidden


def twin_scores_by_position(run: Run, shape: torch.Size, groups: list[list[int]]) -> Tensor | None:
    """The same for layers that see their positions in windows: the values that change with a position are zeroed.

    Returns None if the layer's positions do not make a map of `shape (batch, out, in)`.
    """
    clean, products = run.clean
    tensors = (x for x in tree_leaves((run.args, run.kwargs)) if isinstance(x, Tensor))
    hidden = next(x for x in tensors if x.is_floating_point() and x.dim() > 1)
    for axis in (-1, 1):  # the axis of the features
        inputs, outputs = (_by_position(x.movedim(axis, -1)) for x in (hidden, clean))
        if (*outputs.shape[:2], inputs.shape[1]) == tuple(shape):
            break
    else:
        return None
    columns = []
    for group in groups:
        moved = inputs.clone()
        moved[:, group] += torch.randn(moved[0, group].shape, generator=torch.Generator().manual_seed(group[0]))
        moved = moved.view(hidden.movedim(axis, -1).shape).movedim(-1, axis).contiguous()
        args, kwargs = tree_map(lambda x, moved=moved: moved if x is hidden else x, (run.args, run.kwargs))
        found = Operators()
        Run(run.layer, args, kwargs, run.hidden).again(found)
        masks = {a.number: (a.values != b.values).any(-1) for a, b in zip(products, found.found, strict=True)}
        zeroed = _by_position(run.again(Operators(zeroed=masks)).movedim(axis, -1))
        columns.append(half_squared_distance_of_directions(zeroed, outputs))
    return torch.stack(columns, dim=-1)


def _by_position(hidden: Tensor) -> Tensor:
    """`(batch, positions, features)`; a grid is flattened row by row."""
    return hidden[None] if hidden.dim() == 2 else hidden.reshape(len(hidden), -1, hidden.shape[-1])
