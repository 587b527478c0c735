"""Hidden Token Attribution in loops: a backward pass for each output entry, or a finite difference for each input."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tests.reference.case import Case
from tests.reference.naive import hidden_states


def replace_first_input(case: Case, act: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Calls `act` on the first input of the first layer in a pass, and uses the result as input instead."""
    runs: list[nn.Module] = []

    def before(layer: nn.Module, args: tuple[Any, ...]) -> Any:
        runs.append(layer)
        replaced = act(args[0]) if len(runs) == 1 else None
        return None if replaced is None else (replaced, *args[1:])

    return case.layers[0].register_forward_pre_hook(before)


def layer_outputs(case: Case, vectors: Tensor, module: nn.Module | None = None) -> list[Tensor]:
    """The output of each layer if `vectors` are the input of the first layer, or the output of `module`."""
    outputs: list[Tensor] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        outputs.append(hidden_states(output))

    with ExitStack() as hooks:
        for layer in case.layers:
            hooks.enter_context(layer.register_forward_hook(keep))
        if module is None:
            hooks.enter_context(replace_first_input(case, lambda _: vectors))
        else:
            hooks.enter_context(module.register_forward_hook(lambda *_: vectors))
        case.model(**case.inputs)
    return outputs


def vectors_of(case: Case, module: nn.Module | None = None) -> Tensor:
    """The tokens' vectors in the clean pass: the input of the first layer, or the output of `module`."""
    seen: list[Tensor] = []
    if module is None:
        hook = replace_first_input(case, seen.append)
    else:
        hook = module.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad(), hook:
        case.model(**case.inputs)
    return seen[0].clone()


def naive_jacobian_norms(case: Case, module: nn.Module | None = None, most: int | None = None) -> list[Tensor]:
    """The map of each layer, ``(batch, out, in)``, or of the first ones. Rows of padding are zero."""
    vectors = vectors_of(case, module).requires_grad_()
    maps = []
    for hidden in layer_outputs(case, vectors, module)[:most]:
        batch, out, width = hidden.shape
        result = torch.zeros(batch, out, vectors.shape[1], dtype=torch.float64)
        real = case.mask(case.family.mask, out)
        for i in range(out):
            for k in range(width):
                # Examples are independent, so one backward pass serves all of them.
                (gradient,) = torch.autograd.grad(hidden[:, i, k].sum(), vectors, retain_graph=True)
                for b in range(batch):
                    if real[b, i]:
                        result[b, i] += gradient[b].square().sum(-1)
        maps.append(result.sqrt())
    return maps


@torch.no_grad()
def stepped_jacobian_norm(case: Case, layer_index: int, b: int, i: int, j: int, step: float = 1e-5) -> float:
    """One number of the map by finite differences, without gradients."""
    vectors = vectors_of(case)
    total = 0.0
    for k in range(vectors.shape[2]):
        moved = []
        for sign in (1, -1):
            changed = vectors.clone()
            changed[b, j, k] += sign * step
            moved.append(layer_outputs(case, changed)[layer_index][b, i])
        total += ((moved[0] - moved[1]) / (2 * step)).square().sum().item()
    return sqrt(total)
