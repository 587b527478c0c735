"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import without_hooks
from captum_vz._engine.numerics.matmul import with_onednn
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_same_function
from captum_vz._engine.replay.answers import ModuleAnswer
from captum_vz._engine.replay.folded.activations import ACTIVATIONS
from captum_vz._engine.structure.modules import matrix, read_norm

if TYPE_CHECKING:
    from captum_vz._engine.capture.records import AttentionRecord
    from captum_vz._engine.replay.folded.activations import Activation
    from captum_vz._engine.replay.packed import PackedPairs
    from captum_vz._engine.structure.modules import Norm

# A module, its input and its output, `(n, features)`.
Run = tuple[nn.Module, Tensor, Tensor]


@dataclass(frozen=True)
class FeedForwardStructure:
    """What follows the attention: its output projection, and the norm and linear modules that see its result first."""

    projection: nn.Module
    norm: Norm | None = None  # None: no module sees it, the output is a sum that it is part of
    linears: tuple[nn.Module, ...] = ()
    lasts: tuple[nn.Module, ...] = ()  # linear modules that see it later
    activations: tuple[tuple[nn.Module, Activation], ...] = ()  # of what the linears give


class _ReachedError(Exception):
    """A run has come to the module before which it was to end; the argument is that module's input."""


class Trace:
    """Runs packed positions and keeps what went into each innermost module, and what came out: `(n, d)`."""

    def __init__(self, replay: PackedPairs) -> None:
        self.replay = replay
        self.end: list[nn.Module] = []
        self.seen: list[Run] = []
        modules = [m for m in replay.runner.layer.modules() if m is not replay.answer]
        self.expected = [m for m in modules if any(True for _ in m.parameters(recurse=False))]
        if any(any(True for _ in m.children()) for m in self.expected):
            raise CannotReplayError("parameters lie beside modules")
        # Of a layer's many functions, the products alone: to ask at each of them takes more time than the few rows.
        replay.around = nullcontext
        if isinstance(replay.answer, ModuleAnswer):
            replay.answer.projection = tuple(map(with_onednn, replay.answer.projection))
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
        raise CannotReplayError("a module that ran once did not run again")

    def shape(self, call: AttentionRecord, context: Tensor) -> FeedForwardStructure:
        """The shape that the last run shows, the context of its last position having been NaN.

        Raises:
            CannotReplayError: It is none that can be folded.
        """
        # Each module once, on every position: so none of them picks positions, as a mixture's experts do.
        expected = {*map(id, self.expected)}
        ran = [m for m, x, _ in self.seen if id(m) in expected and len(x) == len(context)]
        if len(ran) != len(self.expected) or {*map(id, ran)} != expected:
            raise CannotReplayError("not every module with parameters ran once, on every position")
        projection = call.projection
        if projection is None:
            takes_context = [module for module, x, _ in self.seen if _equal(x, context)]
            projection = takes_context[0] if takes_context else None
        if projection is None or matrix(projection) is None:
            raise CannotReplayError("the context goes through no plain linear projection")
        seen = [run for run in self.seen if id(run[0]) in expected]
        dependent = [(m, x, y) for m, x, y in seen if m is not projection and x[-1].isnan().any()]
        if not dependent:
            return FeedForwardStructure(projection)
        module, x, normed = dependent[0]
        norm = read_norm(module, x[:-1], normed[:-1])
        linears = tuple(m for m, x, _ in dependent if matrix(m) is not None and _equal(x, normed))
        if not linears:
            raise CannotReplayError("no plain linear module takes the output of the norm behind the attention")
        lasts = tuple(m for m, _, _ in dependent if matrix(m) is not None and m not in linears)
        pres = [y for m, _, y in dependent if m in linears]
        behind = [(m, x, y) for m, x, y in self.seen if any(_equal(x, pre) for pre in pres)]
        known = [(m, _activation(m, x, y)) for m, x, y in behind]
        return FeedForwardStructure(projection, norm, linears, lasts, tuple((m, f) for m, f in known if f is not None))


def _activation(module: nn.Module, x: Tensor, y: Tensor) -> Activation | None:
    """The known activation that makes `y` of `x`, as the module does, which may have bounds that these do not reach."""
    contiguous = torch.contiguous_format
    found = next((f for f in ACTIVATIONS if is_same_function(f(x.clone(memory_format=contiguous)), y)), None)
    if found is None:
        return None
    far = torch.linspace(-64, 64, x.shape[-1], dtype=x.dtype, device=x.device).expand(2, -1)
    return found if is_same_function(found(far.clone()), module(far.clone())) else None


def _keeping(module: nn.Module, seen: list[Run], end: list[nn.Module]) -> Callable[..., Any]:
    # Of a trace just the lists: it holds the replay that holds this function, and would outlive the pass with it.
    run = module if matrix(module) is None else with_onednn(module)

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


def replace_forwards(replay: PackedPairs, forwards: Mapping[nn.Module, Callable[..., Any]]) -> None:
    """Let functions answer for some modules of a replay. The modules themselves are not touched."""
    answering = {module: without_hooks(module) for module in forwards}
    for module, forward in forwards.items():
        answering[module].__dict__["forward"] = forward
    replay.runner.replace_modules(answering)
