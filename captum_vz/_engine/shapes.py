"""The shape of what follows a layer's attention, told from one traced run: what the fast lane needs to know of it.

No layer is known by name. A run of packed positions is traced, with one position whose context is NaN: whatever that
position turns into NaN depends on the context, and nothing else does. The first module that depends on it must be a
norm of the residual stream, and some linear modules must take that norm's output; or no module at all depends on it, as
in layers whose feed-forward runs in parallel to the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine.activations import ACTIVATIONS, Activation
from captum_vz._engine.products import multiplying_fast
from captum_vz._engine.recording import AttentionCall
from captum_vz._engine.replay import (
    ModuleAnswer,
    NotReproducedError,
    PackedPairs,
    bare,
    check_reproduced,
    with_stand_ins,
)


@dataclass(frozen=True)
class Norm:
    """A norm, read as `scale * direction(x) + beta`: LayerNorm, or without centring RMSNorm."""

    module: nn.Module
    gamma: Tensor
    beta: Tensor
    centred: bool
    eps: float

    def direction(self, x: Tensor) -> Tensor:
        """The part that is linear in `x (..., d)`."""
        return self.gamma * self._centre(x)

    def scale(self, x: Tensor) -> Tensor:
        """One over the size of `x (..., d)`, `(..., 1)`."""
        square = torch.linalg.vector_norm(self._centre(x), dim=-1, keepdim=True).square() / x.shape[-1]
        return (square + self.eps).rsqrt()

    def normed_and_scale(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the module makes of `x (..., d)`, and the scale of it `(..., 1)`."""
        if not self.centred:
            return self.module(x), self.scale(x)
        normed, _, scale = torch.native_layer_norm(x, x.shape[-1:], self.gamma, self.beta, self.eps)
        return normed, scale

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


@dataclass(frozen=True)
class Shape:
    """What follows the attention: its output projection, and the norm and linear modules that see its result first."""

    projection: nn.Module
    norm: Norm | None = None  # None: no module sees it, the output is a sum that it is part of
    linears: tuple[nn.Module, ...] = ()
    lasts: tuple[nn.Module, ...] = ()  # linear modules that see it later
    activations: tuple[tuple[nn.Module, Activation], ...] = ()  # of what the linears give


# A module, its input and its output, `(n, features)`.
Run = tuple[nn.Module, Tensor, Tensor]


class _ReachedError(Exception):
    """A run has come to the module before which it was to end; the argument is that module's input."""


class Trace:
    """Runs packed positions and keeps what went into each innermost module, and what came out: `(n, d)`."""

    def __init__(self, replay: PackedPairs) -> None:
        self.replay = replay
        self.end: list[nn.Module] = []
        self.seen: list[Run] = []
        modules = [m for m in replay.layer.modules() if m is not replay.answer]
        self.expected = [m for m in modules if any(True for _ in m.parameters(recurse=False))]
        if any(any(True for _ in m.children()) for m in self.expected):
            raise NotReproducedError("parameters lie beside modules")
        # Of a layer's many functions, the products alone: to ask at each of them takes more time than the few rows.
        replay.around = nullcontext
        if isinstance(replay.answer, ModuleAnswer):
            replay.answer.projection = tuple(map(multiplying_fast, replay.answer.projection))
        innermost = [m for m in modules if not any(True for _ in m.children())]
        replace_forwards(replay, {m: _keeping(m, self.seen, self.end) for m in innermost})

    def run(self, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        self.seen.clear()
        return self.replay.run(batch, out, context)

    def run_until(self, module: nn.Module, batch: Tensor, out: Tensor, context: Tensor) -> Tensor:
        """The input of a module, behind which nothing is run."""
        self.end.append(module)
        try:
            self.run(batch, out, context)
        except _ReachedError as reached:
            return reached.args[0]
        finally:
            self.end.clear()
        raise NotReproducedError("a module that ran once did not run again")

    def shape(self, call: AttentionCall, context: Tensor) -> Shape:
        """The shape that the last run shows, the context of its last position having been NaN.

        Raises:
            NotReproducedError: It is none that can be folded.
        """
        # Each module once, on every position: so none of them picks positions, as a mixture's experts do.
        expected = {*map(id, self.expected)}
        ran = [m for m, x, _ in self.seen if id(m) in expected and len(x) == len(context)]
        if len(ran) != len(self.expected) or {*map(id, ran)} != expected:
            raise NotReproducedError("not every module with parameters ran once, on every position")
        projection = call.projection
        if projection is None:
            takes_context = [module for module, x, _ in self.seen if _equal(x, context)]
            projection = takes_context[0] if takes_context else None
        if projection is None or matrix(projection) is None:
            raise NotReproducedError("the context goes through no plain linear projection")
        seen = [run for run in self.seen if id(run[0]) in expected]
        dependent = [(m, x, y) for m, x, y in seen if m is not projection and x[-1].isnan().any()]
        if not dependent:
            return Shape(projection)
        module, x, normed = dependent[0]
        norm = read_norm(module, x[:-1], normed[:-1])
        linears = tuple(m for m, x, _ in dependent if matrix(m) is not None and _equal(x, normed))
        if not linears:
            raise NotReproducedError("no plain linear module takes the output of the norm behind the attention")
        lasts = tuple(m for m, _, _ in dependent if matrix(m) is not None and m not in linears)
        pres = [y for m, _, y in dependent if m in linears]
        behind = [(m, x, y) for m, x, y in self.seen if any(_equal(x, pre) for pre in pres)]
        known = [(m, _activation(m, x, y)) for m, x, y in behind]
        return Shape(projection, norm, linears, lasts, tuple((m, f) for m, f in known if f is not None))


def _activation(module: nn.Module, x: Tensor, y: Tensor) -> Activation | None:
    """The known activation that makes `y` of `x`, as the module does, which may have bounds that these do not reach."""
    contiguous = torch.contiguous_format
    found = next((f for f in ACTIVATIONS if _close(f(x.clone(memory_format=contiguous)), y)), None)
    if found is None:
        return None
    far = torch.linspace(-64, 64, x.shape[-1], dtype=x.dtype, device=x.device).expand(2, -1)
    return found if _close(found(far.clone()), module(far.clone())) else None


def _keeping(module: nn.Module, seen: list[Run], end: list[nn.Module]) -> Callable[..., Any]:
    # Of a trace just the lists: it holds the replay that holds this function, and would outlive the pass with it.
    run = module if matrix(module) is None else multiplying_fast(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if any(module is one for one in end):
            raise _ReachedError(_by_position(args[0]))
        output = run(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            seen.append((module, _by_position(args[0]), _by_position(output)))
        return output

    return forward


def _by_position(value: Tensor) -> Tensor:
    return value.reshape(-1, value.shape[-1])


def _equal(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(found[:-1], expected[:-1])


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    error = (found[:-1] - expected[:-1]).abs().max()
    return bool(error <= 16 * torch.finfo(expected.dtype).eps * expected[:-1].abs().max())


def matrix(module: nn.Module) -> Tensor | None:
    """The `(in, out)` matrix of a module that multiplies by it and adds a bias; None for any other module."""
    # Exact kinds: subclasses hold their weights in other forms (quantised, adapted).
    kind, weight = type(module), getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta:  # offloaded: torch would multiply by what it never filled
        return None
    if kind in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return weight.T
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return weight
    return None


def read_norm(module: nn.Module, x: Tensor, normed: Tensor) -> Norm:
    """The reading of a norm that explains what it made of `x (n, d)`, found by probing and not by its name.

    Raises:
        NotReproducedError: There is none.
    """
    eps = [value for name, value in vars(module).items() if "eps" in name and isinstance(value, (float, type(None)))]
    if len(eps) != 1:
        raise NotReproducedError("the first module behind the attention is no norm")
    epsilon = torch.finfo(x.dtype).eps if eps[0] is None else eps[0]
    signs = x.new_ones(x.shape[-1])  # there may be no rows, of padding alone
    signs[1::2] = -1
    beta, probed, shifted = module(torch.stack([torch.zeros_like(signs), signs, signs + 1])).unbind()
    centred = bool((shifted - probed).abs().max() < 1e-3 * (probed - beta).abs().max())
    unit = Norm(module, torch.ones_like(signs), beta, centred, epsilon)
    gamma = (probed - beta) / (unit.direction(signs) * unit.scale(signs))
    norm = Norm(module, gamma, beta, centred, epsilon)
    if len(x):
        check_reproduced(norm.scale(x) * norm.direction(x) + beta, normed)
    return norm


def replace_forwards(replay: PackedPairs, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Let functions answer for some modules of a replay. The modules themselves are not touched."""
    answering = {module: bare(module) for module in forwards}
    for module, forward in forwards.items():
        answering[module].__dict__["forward"] = forward
    replay.layer = with_stand_ins(replay.layer, answering)
