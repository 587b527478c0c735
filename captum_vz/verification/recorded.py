"""What a plain run of the model gives to each layer, and the maps of a layer by the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._private import tree_leaves, tree_map
from captum_vz.verification.definition import Definition, NoDefinitionError


@dataclass
class LayerRun:
    """The last run of a layer in a plain run of the model."""

    layer: nn.Module
    args: tuple[Any, ...]  # copied before it ran, as are the keyword arguments
    kwargs: dict[str, Any]
    returned: list[Tensor]
    place: int = 0  # of its hidden states in what it returned: the tensor that the next layer was given, or the first

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the layer returned."""
        return self.returned[self.place]

    @property
    def states(self) -> list[Tensor]:
        """The arguments that may be hidden states: tensors as wide as the output."""
        tensors = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]
        tensors = [x for x in tensors if x.is_floating_point() and x.dim() > 1]
        return [x for x in tensors if x.dim() > 2 and x.shape[-1] == self.hidden.shape[-1]] or tensors[:1]

    def ready(self, dtype: torch.dtype | None) -> Callable[[int | None], Tensor]:
        """A function that runs a copy of the layer on its input, in `dtype` or (None) as it is.

        The function may be given a position of the input, whose vector is replaced by noise.
        """
        layer = copy.deepcopy(self.layer)
        given = (self.args, self.kwargs)
        if dtype is not None:
            layer = layer.to(dtype)
            given = tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, given)

        def run(position: int | None = None) -> Tensor:
            args, kwargs = _copied(given)
            if position is not None:
                changed = LayerRun(layer, args, kwargs, self.returned, self.place).states[0]
                vectors = _by_position(changed)
                noise = torch.randn(vectors.shape[-1], generator=torch.Generator().manual_seed(position))
                vectors[:, position] += noise.to(vectors)
            return _tensors(layer(*args, **kwargs))[self.place]

        return run


def plain_run(forward: Callable[[], Any], layers: Sequence[nn.Module]) -> dict[int, LayerRun]:
    """Run the model as it is, and keep the last run of each layer, by its index. Layers that did not run are left out.

    The hooks are removed when this function returns, also after an error.
    """
    runs: dict[int, LayerRun] = {}
    given: dict[int, tuple[Any, ...]] = {}

    def before(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[index] = _copied((args, kwargs))

    def after(index: int, layer: nn.Module, output: Any) -> None:
        args, kwargs = given.pop(index)
        runs[index] = LayerRun(layer, args, kwargs, [one.clone() for one in _tensors(output)])

    with torch.no_grad(), ExitStack() as hooks:
        for index, layer in enumerate(layers):
            # The index is the default of an argument, because the loop goes on.
            pre = layer.register_forward_pre_hook(lambda _, a, k, i=index: before(i, a, k), with_kwargs=True)
            hooks.enter_context(pre)
            hooks.enter_context(layer.register_forward_hook(lambda m, _, output, i=index: after(i, m, output)))
        forward()
    for index, run in runs.items():
        for following in runs[index + 1].states[:1] if index + 1 in runs else ():
            same = [one.shape == following.shape and torch.equal(one, following) for one in run.returned]
            run.place = same.index(True) if any(same) else 0
    return runs


@dataclass
class DefinedMap:
    """The distances of some sources by the definition."""

    scores: Tensor  # `(batch, out, source)`, in float64
    sources: list[int]  # the source of each column
    padding: Tensor  # which targets are padding, `(batch, out)`, by the mask of the inputs or by the attention weights
    reproduced: float  # the largest change of the output since the plain run, as a share of a token's largest entry
    at_projection: bool  # whether all values were zeroed where they are projected


def defined_map(
    run: LayerRun,
    attention: str,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    mask: Tensor | None,
    most: int,
    projected: bool = True,
) -> DefinedMap:
    """The map `(batch, out, in)` of a layer by the definition, in a dtype (None: the layer's own).

    The `mask` of tokens that are no padding is `(batch, out)`; None: the attention weights tell padding. Of more
    sources than `most`, evenly spaced ones are taken. `projected`: whether to zero values where they are projected.
    """
    batch, out, count = shape
    definition = Definition(run.ready(dtype), projected)
    # A decoder block that reads as many tokens as it has calls two attentions of one size, the self-attention first.
    which = (0 if attention == "self" else -1) if len(run.states) > 1 and projected else None
    products = definition.attention(out, count, which)
    by_position = not products
    products = products or definition.products
    rows_of = definition.rows_of_position if by_position else partial(definition.rows, products)

    def tokens_of(hidden: Tensor) -> Tensor:
        """In layers with windows, the positions, without those that the model appended to fill a window."""
        return _by_token(_by_position(hidden)[:, :out] if by_position else hidden, batch, out)

    clean = tokens_of(definition.clean)
    sources = sorted({round(place) for place in torch.linspace(0, count - 1, min(most, count)).tolist()})
    columns = []
    for source in sources:
        zeroed = tokens_of(definition.zeroed(products, rows_of(source)))
        columns.append(half_squared_distance_of_directions(zeroed, clean))
    scores = torch.stack(columns, dim=-1)
    padding = _padding(products[0].weights, batch, out)
    if mask is not None and mask.shape == (batch, out):
        padding = ~mask.bool().to(scores.device)
    before = tokens_of(run.hidden).double()
    difference = (clean.double() - before).abs().amax(-1) / before.abs().amax(-1).clamp_min(1e-300)
    reproduced = float(difference.masked_fill(padding, 0).max())
    at_projection = all(one.operator is not None for one in products)
    return DefinedMap(scores.cpu(), sources, padding.cpu(), reproduced, at_projection)


def half_squared_distance_of_directions(a: Tensor, b: Tensor) -> Tensor:
    """1 - cosine, as half the squared distance of the unit vectors, `(..., d), (..., d) -> (...)`, in float64."""
    a, b = a.double(), b.double()
    return 0.5 * (a / a.norm(dim=-1, keepdim=True) - b / b.norm(dim=-1, keepdim=True)).square().sum(-1)


def _padding(weights: Tensor, batch: int, out: int) -> Tensor:
    """Which targets are padding, `(batch, out)`, by their weights.

    No target sees padding. Padding sees nothing, and then all its weights are equal. Or all tokens that somebody sees
    see themselves too, so that only a mask of tokens can hide it.
    """
    count = weights.shape[-1]
    if weights.dim() != 3 or len(weights) % batch or out != count or out == 1:
        return torch.zeros(batch, out, dtype=torch.bool, device=weights.device)
    weights = weights.unflatten(0, (batch, -1))
    sees_nothing = (weights.amax(-1) - weights.amin(-1) < 1e-6).all(1)
    sees = (weights.amax(1) > 0) & ~sees_nothing[:, :, None]
    is_seen, sees_itself = sees.any(1), sees.diagonal(dim1=1, dim2=2)
    return ~is_seen & (sees_nothing | (sees_itself | ~is_seen).all(1, keepdim=True))


def _tensors(output: Any) -> list[Tensor]:
    tensors = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
    if not tensors:
        raise NoDefinitionError(f"the layer returned {type(output).__name__}, which holds no tensor")
    return tensors


def _by_token(hidden: Tensor, batch: int, out: int) -> Tensor:
    """One vector for each token, `(batch, out, d)`, also if a token has several, or if tokens come first."""
    if hidden.dim() == 4 and hidden.shape[:2] == (batch, out):
        return hidden.flatten(2)
    if hidden.dim() == 4 and hidden.shape[1:3] == (batch, out):
        return hidden.movedim(0, 2).flatten(2)
    if hidden.dim() == 2 and batch == 1:
        hidden = hidden[None]
    if hidden.dim() == 3 and hidden.shape[:2] != (batch, out) and hidden.shape[:2] == (out, batch):
        hidden = hidden.transpose(0, 1)
    if hidden.dim() != 3 or hidden.shape[:2] != (batch, out):
        raise NoDefinitionError(f"the layer returned {tuple(hidden.shape)} for a map {(batch, out)} (batch, out)")
    return hidden


def _by_position(hidden: Tensor) -> Tensor:
    """A view `(batch, positions, features)`. A grid `(batch, height, width, features)` is flattened row by row."""
    return hidden[None] if hidden.dim() == 2 else hidden.view(len(hidden), -1, hidden.shape[-1])


def _copied(given: Any) -> Any:
    """The arguments of a layer, copied: a layer may write into its input, and caches grow in each run.

    An object that occurs twice stays one object.
    """
    copies: dict[int, Any] = {}

    def copied(x: Any) -> Any:
        if isinstance(x, Tensor):
            return copies.setdefault(id(x), x.clone(memory_format=torch.contiguous_format))
        return copies.setdefault(id(x), copy.deepcopy(x)) if hasattr(x, "get_seq_length") else x

    return tree_map(copied, given, is_leaf=lambda x: hasattr(x, "get_seq_length"))
