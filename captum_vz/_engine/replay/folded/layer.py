"""A recorded layer as the folded replay runs it: read from a few packed runs, and checked on each target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from captum_vz._engine.numerics.tensors import for_query_heads, gather_rows
from captum_vz._engine.numerics.tolerance import (
    CannotReplayError,
    check_against_changes,
    check_folded,
    folded_bound,
    is_within,
)
from captum_vz._engine.replay.answers import ModuleAnswer
from captum_vz._engine.replay.folded.kernels import FirstLinear, FoldedModules, LaterLinear
from captum_vz._engine.replay.folded.structure import FeedForwardStructure, Trace
from captum_vz._engine.structure.modules import Norm, matrix
from captum_vz._engine.taps.handler import is_hooked

if TYPE_CHECKING:
    from captum_vz._engine.replay.base import ReplayProblem
    from captum_vz._engine.replay.folded.plan import PairChunk, PairTable, SourceBlock
    from captum_vz._engine.replay.packed import PackedPairs

# How many clean targets run to read a layer's structure.
SAMPLED_TARGETS = 8


class FoldedLayer:
    """What the folded replay needs of a layer.

    Attributes:
        outputs: The layer's clean output at each target, `(target, d)`.
        base: The attention's projected output at each target, `(target, d)`. Without `modules`, the clean output.
        projection: The output projection of each head that is zeroed, `(head, d_head, d)`. Without `modules`, times
            the layer scale.
        scale: The layer scale, `(d,)`: by what the layer multiplies the attention's output. None: by 1.
        modules: Answers for the norm and the linear modules. None: no module depends on the attention's output, and
            the layer adds it to the rest.
        runner: Runs the layer with these answers.
        probes: What the packed replay returns for the last row of each chunk, `(chunk, d)`.
        probe_bounds: By how much the folded replay may differ from the probes, `(chunk,)`.
        changed: A buffer for the attention's output of a chunk.

    Args:
        composed: Whether to multiply the attention's projection with the first linear modules.
        in_bfloat16: Whether changes are multiplied in bfloat16.
        packed: Runs positions of the layer, and is checked where the layer is not trusted.
        new_packed: Makes another one, not checked.
    """

    def __init__(
        self,
        problem: ReplayProblem,
        pairs: PairTable,
        blocks: list[SourceBlock],
        composed: bool,
        in_bfloat16: bool,
        packed: PackedPairs,
        new_packed: Callable[[], PackedPairs],
    ) -> None:
        if not isinstance(packed.answer, ModuleAnswer) or packed.later:
            raise CannotReplayError("its attention module is not answered as a whole, or another attention follows")
        self._problem, self._pairs, self._new_packed = problem, pairs, new_packed
        self._dtype = torch.bfloat16 if in_bfloat16 else problem.output.dtype  # in which changes are multiplied
        sizes = [len(chunk.target) for block in blocks for chunk in block.chunks]
        self._longest = max(sizes)
        self.outputs = gather_rows(problem.output, pairs.batch, pairs.out)
        self.changed = self.outputs.new_empty(self._longest, self.outputs.shape[-1])
        self.base = self.outputs
        self.scale: Tensor | None = None
        self.modules: FoldedModules | None = None
        self.runner: PackedPairs | None = None

        contexts = gather_rows(packed.contexts, pairs.batch, pairs.out).flatten(1)
        chunks = [(block, chunk) for block in blocks for chunk in block.chunks]
        lost = torch.stack([self._lost(block, chunk) for block, chunk in chunks])
        trace = Trace(packed)
        structure = self._read(trace, contexts, torch.stack([chunk.target[-1] for _, chunk in chunks]), lost)
        self._weight = structure.weight
        self._clean_input = self._check_residual(trace, structure, contexts, lost[:1])
        projection = self._weight.unflatten(0, (problem.site.shape.heads, -1))
        self.projection = projection if problem.heads.all() else projection[pairs.heads]
        if not self.projection.abs().amax():  # in a fifth of the time that any() takes
            raise CannotReplayError("the projection of these heads is zero, and rounding would give them a score")
        if structure.norm is not None:
            self.base = structure.projection(contexts)
            scale = structure.norm.scale(self._clean_input)
            firsts = [self._first(structure.norm, scale, module, composed) for module in structure.firsts]
            self.modules = FoldedModules(structure.norm, scale, firsts, [*map(self._later, structure.laters)])
            self.runner = self._runner(structure, self.modules)
        elif not problem.trust.library:
            raise CannotReplayError("what the layer's own code does to the attention's output is not checked")

    def norm_input(self, changed: Tensor, target: Tensor) -> Tensor | None:
        """What the norm is given for an attention output `changed (n, d)`. None: the layer's code is trusted."""
        if self._problem.trust.library:
            return None
        # Other code may clamp what no clean position reaches.
        scale = 1 if self.scale is None else self.scale
        return changed * scale + (self._clean_input - self.base * scale).index_select(0, target)

    def _lost(self, block: SourceBlock, chunk: PairChunk) -> Tensor:
        """What the context of a chunk's last row loses, `(head * d_head)`."""
        heads, own = self._pairs.heads, chunk.spans[-1].vectors
        members = slice(own.start // len(heads), own.stop // len(heads))
        values = head_values(self._problem, block, members).sum(0)
        return torch.zeros_like(values).index_copy(0, heads, values[heads]).flatten()

    def _read(self, trace: Trace, contexts: Tensor, last: Tensor, lost: Tensor) -> FeedForwardStructure:
        """Run some clean targets and each chunk's last row, and read the structure from these runs."""
        pairs = self._pairs
        few = min(len(contexts), SAMPLED_TARGETS)
        clean = torch.linspace(len(contexts) - 1, 0, few, dtype=torch.float64, device=last.device).long()
        target = torch.cat([clean, last])
        given = torch.cat([contexts[clean], contexts[last] - lost])
        structure: FeedForwardStructure | None = None
        outputs = []
        for part in torch.arange(len(target), device=target.device).split(self._problem.chunk_rows):
            part = torch.cat([part, part[-1:]])
            context = given[part]
            context[-1] = torch.nan
            outputs.append(trace.run(pairs.batch[target[part]], pairs.out[target[part]], context)[:-1])
            structure = structure or trace.structure(self._problem.site.attention, context)
        assert structure is not None  # narrows the type: each part has a position
        self.probes = torch.cat(outputs)[few:]
        self.probe_bounds = folded_bound(self.probes, self.outputs[last], self._dtype)
        return structure

    def _check_residual(self, trace: Trace, structure: FeedForwardStructure, contexts: Tensor, lost: Tensor) -> Tensor:
        """Check that the residual stream loses at each target what the projection makes of `lost`, times the scale.

        A layer may switch its attention off at some targets. Returns the stream, which the norm is given,
        `(target, d)`. Without a norm, it is the output.
        """
        pairs, clean, run = self._pairs, self.outputs, trace.run
        if structure.norm is not None:
            clean = self._in_clean_pass(structure.norm.module, 0)
            run = partial(trace.run_until, structure.norm.module)
        less = contexts - lost
        parts = torch.arange(len(less), device=less.device).split(self._problem.chunk_rows)
        changed = torch.cat([run(pairs.batch[part], pairs.out[part], less[part]) for part in parts])
        loss = lost @ structure.weight
        expected = clean - loss
        if structure.norm is not None and not is_within(changed, expected, folded_bound(expected, clean)):
            self.scale = self._layer_scale(structure, structure.norm)
            expected = clean - loss * self.scale
            check_against_changes((changed - expected).abs().amax(-1), (changed - clean).abs().amax(-1), clean)
        check_folded(changed, expected, folded_bound(expected, clean))
        return clean

    def _layer_scale(self, structure: FeedForwardStructure, norm: Norm) -> Tensor:
        """The norm's input where the layer's input is zero and the attention's output is one, `(d,)`."""
        replay = self._projected(structure)
        if not replay.runner.states:
            raise CannotReplayError("the layer has no input that could be its residual stream")
        states = replay.runner.states[0]
        replay.runner.arguments = replay.runner.arguments_with(states, torch.zeros_like(states))
        ones = self.outputs.new_ones(1, self.outputs.shape[-1])
        return Trace(replay).run_until(norm.module, self._pairs.batch[:1], self._pairs.out[:1], ones)[0]

    def _projected(self, structure: FeedForwardStructure) -> PackedPairs:
        """Runs the layer with outputs of the attention's projection in the place of contexts."""
        replay = self._new_packed()
        if isinstance(replay.answer, ModuleAnswer) and replay.answer.projection:
            replay.answer.projection = ()
        else:
            replay.runner.replace_forwards({structure.projection: lambda projected: projected})
        return replay

    def _in_clean_pass(self, module: nn.Module, place: int) -> Tensor:
        """A module's input (0) or output (1) at each target in the clean pass, `(target, features)`.

        Results that use it are checked, because each target runs clean in some chunk.
        """
        attention = self._problem.site.attention
        batch, _, tokens, _ = attention.shape
        size = (tokens, batch) if attention.tokens_first else (batch, tokens)
        recorded = self._problem.site.layer.module_io.get(id(module))
        if recorded is None or recorded[place].value.shape[:-1].numel() != batch * tokens:
            raise CannotReplayError("a module after the attention did not run once on each position")
        if not recorded[place].is_unmodified():
            raise CannotReplayError("the output of a module was changed in place")
        value = attention.batch_first(recorded[place].value.reshape(*size, -1))
        return gather_rows(value, self._pairs.batch, self._pairs.out)

    def _first(self, norm: Norm, scale: Tensor, module: nn.Module, composed: bool) -> FirstLinear:
        weight, constant = matrix(module), module(norm.beta[None])
        assert weight is not None  # narrows the type: the structure names linear modules only
        base = (self._in_clean_pass(module, 1) - constant) / scale
        weight = weight.to(self._dtype)
        both = None
        if composed:
            into_norm = self.projection if self.scale is None else self.projection * self.scale
            directions = norm.direction(into_norm).to(self._dtype)  # (head, d_head, d)
            both = (directions @ weight).to(base.dtype)
        result = base.new_empty(self._longest, base.shape[1])
        return FirstLinear(module, weight.T, both, base, constant, result)

    def _later(self, module: nn.Module) -> LaterLinear:
        weight = matrix(module)
        assert weight is not None  # as above
        if self._dtype != torch.bfloat16:
            bias = module.bias if isinstance(module.bias, Tensor) else None
            return LaterLinear(module, weight.T, bias, None)
        inputs, outputs = (self._in_clean_pass(module, place) for place in (0, 1))
        change = inputs.new_empty(self._longest, inputs.shape[1], dtype=self._dtype)
        return LaterLinear(module, weight.T.to(self._dtype), None, (inputs, outputs, change))

    def _runner(self, structure: FeedForwardStructure, modules: FoldedModules) -> PackedPairs:
        """Runs the layer with the norm, the linear modules and the activations answered."""
        forwards: dict[nn.Module, Callable[..., Tensor]] = {modules.norm.module: modules.normed}
        forwards |= {first.module: partial(modules.first, number) for number, first in enumerate(modules.firsts)}
        forwards |= {later.module: partial(modules.later, number) for number, later in enumerate(modules.laters)}
        forwards |= {module: partial(modules.activated, activation) for module, activation in structure.activations}
        if any(map(is_hooked, (structure.projection, *forwards))):
            raise CannotReplayError("a module after the attention has a hook, which would not be called")
        runner = self._projected(structure)
        runner.runner.replace_forwards(forwards)
        return runner


def head_values(problem: ReplayProblem, block: SourceBlock, members: slice | None = None) -> Tensor:
    """The values of all query heads at the sources of a block, or at some of its members, `(member, head, d_head)`."""
    values = problem.site.attention.values.transpose(1, 2)  # (batch, in, key-value head, d_head)
    batch, source = (x if members is None else x[members] for x in (block.batch, block.source))
    return for_query_heads(values[batch, source], problem.site.shape.heads)
