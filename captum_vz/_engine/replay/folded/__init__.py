"""The folded replay: a faster form of packed pairs, in which first linear modules act on sources and not on pairs.

Zeroing source j takes `u_ij = sum_h a_hij f_h(j)` from the residual stream `p_i`, with `f_h(j) = W_O^h v_j^h`. For the
first matrix W of the feed-forward and the norm n before it,

    W n(p_i - u_ij) = s(p_i - u_ij) (W g(p_i) - sum_h a_hij W g(f_h(j))) + W beta

where s is the norm's scale, g its linear part and beta its bias. So W_O and W multiply the vectors `f_h(j)`, one for
each source and head. A pair costs a sum over heads, the activation and the last matrix. If the layer multiplies the
attention's output by a layer scale, W multiplies `scale * f_h(j)`. If it norms this output, `FirstLinear` says what W
multiplies, and pairs of which too little is left are replayed one by one. All else is the layer's own code.

Nothing depends on this room: without it, `PackedReplay` gives the same maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.layer_runner import ModuleAnswer
from captum_vz._engine.numerics import budget_of, gather_rows, is_out_of_memory
from captum_vz._engine.numerics.tolerance import (
    CANCELLATION,
    TOO_LITTLE_LEFT,
    CannotReplayError,
    check_folded,
    error_among_changes,
    folded_bound,
    is_within,
    refuse_large_error,
    scale_of,
)
from captum_vz._engine.replay import ReplayChunk, ReplayProblem
from captum_vz._engine.replay.folded.kernels import FeedForwardStructure, FirstLinear, FoldedModules, Trace, add_sums
from captum_vz._engine.replay.folded.plan import (
    NORMED_CALLS,
    SAMPLED_TARGETS,
    PairChunk,
    active_pairs,
    feed_forward,
    output_goes_into_vectors,
    plan_chunks,
    products_saved,
)
from captum_vz._engine.replay.packed import ChunkRunner, PackedPairs, exact_chunks, packed_pairs
from captum_vz._engine.structure.modules import NoNorm, Norm, matrix
from captum_vz._engine.taps.changes import is_hooked
from captum_vz.functional.interventions import ZeroValue

if TYPE_CHECKING:
    from captum_vz._engine.replay.folded.plan import SourceBlock


class FoldedLayer:
    """What the folded replay needs of a layer.

    If `composed`, the attention's projection is multiplied with the first linear modules.
    """

    probes: Tensor  # what the packed replay returns for the last row of each chunk, `(chunk, d)`
    probe_bounds: Tensor  # by how much the folded replay may differ from the probes, `(chunk,)`

    def __init__(self, problem: ReplayProblem, blocks: list[SourceBlock], composed: bool) -> None:
        packed = packed_pairs(problem)
        self._problem, self.heads = problem, problem.heads.nonzero().flatten()
        # The attention weights of the heads that are zeroed, `(target, in, head)`.
        self._weights = problem.weights if problem.heads.all() else problem.weights[..., self.heads]
        sizes = [len(chunk.target) for block in blocks for chunk in block.chunks]
        self._longest = max(sizes)
        self.outputs = problem.clean
        self.changed = self.outputs.new_empty(self._longest, self.outputs.shape[-1])  # a buffer for a chunk
        # The attention's projected output at each target, `(target, d)`. Without `modules`, the clean output.
        self.base = self.outputs
        # By what the layer multiplies the attention's output, `(d,)`, its layer scale. None: by 1.
        self.scale: Tensor | None = None
        # The factor of each vector in a chunk's last row. Library code may norm an output that consists of these
        # vectors, so nothing is taken from it.
        self.share = 1 if problem.library else -1
        # Answers for the norm and the linear modules, and what runs the layer with these answers. None: no module
        # depends on the attention's output, and the layer adds it to the rest.
        self.modules: FoldedModules | None = None
        self.runner: PackedPairs | None = None

        contexts = problem.targets.of(packed.contexts).flatten(1)
        chunks = [(block, chunk) for block in blocks for chunk in block.chunks]
        lost = torch.stack([self._lost(block, chunk) for block, chunk in chunks])
        trace = Trace(packed)
        last = torch.stack([chunk.target[-1] for _, chunk in chunks])
        structure = self._read(trace, contexts[last] + lost * self.share, contexts, last)
        if structure.inner is not None and self.share < 0:
            raise CannotReplayError("a norm of the attention's output is folded in library code only")
        self._clean_input = self._check_residual(trace, structure, contexts, lost[:1])
        projection = structure.weight.unflatten(0, (problem.site.shape.heads, -1))  # (head, d_head, d)
        self.projection = projection if problem.heads.all() else projection[self.heads]
        if not self.projection.abs().amax():  # in a fifth of the time that any() takes
            raise CannotReplayError("the projection of these heads is zero, and rounding would give them a score")
        if structure.norm is not None:
            self.base = structure.projection(contexts)
            scale = structure.norm.scale(self._clean_input)
            inner = None if structure.inner is None else (structure.inner, structure.inner.scale(self.base))
            firsts = [self._first(structure.norm, scale, inner, module, composed) for module in structure.firsts]
            self.modules = FoldedModules(structure.norm, scale, inner, firsts)
            self.runner = self._runner(structure, self.modules)
        elif not problem.library:
            raise CannotReplayError("what the layer's own code does to the attention's output is not checked")

    def run(self, chunk: PairChunk, vectors: Tensor) -> Tensor:
        """The layer's output for the rows of a chunk, `(row, d)`."""
        problem = self._problem
        batch, out = (x.index_select(0, chunk.target) for x in (problem.targets.batch, problem.targets.out))
        members = gather_rows(problem.targets.members, batch, chunk.group).clamp_min(0)
        shares = gather_rows(self._weights, chunk.target[:, None], members).flatten(1).neg_()
        shares[chunk.pairs : -1], shares[-1] = 0, self.share
        changed = torch.index_select(self.base, 0, chunk.target, out=self.changed[: len(chunk.target)])
        for span, rows, share in zip(chunk.spans, chunk.by_span(changed), chunk.by_span(shares), strict=True):
            add_sums(rows, share, vectors[span.vectors])
        if self.modules is None or self.runner is None:
            left, clean = (x[: chunk.pairs].abs().amax(-1) for x in (changed, self.base.index_select(0, chunk.target)))
            if (left < clean / CANCELLATION).any():  # a distance of directions would blow rounding errors up
                raise CannotReplayError(TOO_LITTLE_LEFT)
            return changed
        self.modules.chunk, self.modules.shares = chunk, shares
        if not problem.library:  # other code may clamp what no clean position reaches
            scale = 1 if self.scale is None else self.scale
            rest = (self._clean_input - self.base * scale).index_select(0, chunk.target)
            self.modules.expected = changed * scale + rest
        return self.runner.run(batch, out, changed)

    def _lost(self, block: SourceBlock, chunk: PairChunk) -> Tensor:
        """What the context of a chunk's last row loses, `(head * d_head)`."""
        heads, own = self.heads, chunk.spans[-1].vectors
        members = slice(own.start // len(heads), own.stop // len(heads))
        values = block.head_values(self._problem.site.attention.values, self._problem.site.shape.heads, members).sum(0)
        return torch.zeros_like(values).index_copy(0, heads, values[heads]).flatten()

    def _read(self, trace: Trace, known: Tensor, contexts: Tensor, last: Tensor) -> FeedForwardStructure:
        """Run some clean targets and each chunk's last row, with `known` contexts, and read the structure from them."""
        targets = self._problem.targets
        few = min(len(contexts), SAMPLED_TARGETS)
        clean = torch.linspace(len(contexts) - 1, 0, few, dtype=torch.float64, device=last.device).long()
        target = torch.cat([clean, last])
        given = torch.cat([contexts[clean], known])
        structure: FeedForwardStructure | None = None
        outputs = []
        for part in torch.arange(len(target), device=target.device).split(self._problem.chunk_rows):
            part = torch.cat([part, part[-1:]])
            context = given[part]
            context[-1] = torch.nan
            outputs.append(trace.run(targets.batch[target[part]], targets.out[target[part]], context)[:-1])
            structure = structure or trace.structure(self._problem.site.attention, context)
        assert structure is not None  # narrows the type: each part has a position
        self.probes = torch.cat(outputs)[few:]
        self.probe_bounds = folded_bound(self.probes, self.outputs[last])
        return structure

    def _check_residual(self, trace: Trace, structure: FeedForwardStructure, contexts: Tensor, lost: Tensor) -> Tensor:
        """Check that the residual stream loses at each target what the projection makes of `lost`, times the scale.

        A layer may switch its attention off at some targets. Returns the stream, which the norm is given,
        `(target, d)`. Without a norm, it is the output. Where the attention's output has a norm of its own, it is
        checked there.
        """
        targets, clean, run = self._problem.targets, self.outputs, trace.run
        first = structure.inner or structure.norm
        if first is not None:
            clean = self._in_clean_pass(first.module, 0)
            run = partial(trace.run_until, first.module)
        less = contexts - lost
        parts = torch.arange(len(less), device=less.device).split(self._problem.chunk_rows)
        changed = torch.cat([run(targets.batch[part], targets.out[part], less[part]) for part in parts])
        loss = lost @ structure.weight
        expected = clean - loss
        if (
            structure.norm is not None
            and structure.inner is None
            and not is_within(changed, expected, folded_bound(expected, clean))
        ):
            self.scale = self._layer_scale(structure, structure.norm)
            expected = clean - loss * self.scale
            error, change = ((changed - one).abs().amax(-1) for one in (expected, clean))
            number = torch.finfo(clean.dtype)
            share = error_among_changes(error, change.clamp_min(number.tiny), scale_of(clean))
            refuse_large_error(number.eps, share.item())
        check_folded(changed, expected, folded_bound(expected, clean))
        if structure.inner is None or structure.norm is None:
            return clean
        return self._in_clean_pass(structure.norm.module, 0)

    def _layer_scale(self, structure: FeedForwardStructure, norm: Norm) -> Tensor:
        """The norm's input where the layer's input is zero and the attention's output is one, `(d,)`."""
        replay = self._projected(structure)
        if not replay.runner.states:
            raise CannotReplayError("the layer has no input that could be its residual stream")
        states = replay.runner.states[0]
        replay.runner.arguments = replay.runner.arguments_with(states, torch.zeros_like(states))
        ones = self.outputs.new_ones(1, self.outputs.shape[-1])
        targets = self._problem.targets
        return Trace(replay).run_until(norm.module, targets.batch[:1], targets.out[:1], ones)[0]

    def _projected(self, structure: FeedForwardStructure) -> PackedPairs:
        """Runs the layer with outputs of the attention's projection in the place of contexts."""
        replay = PackedPairs(self._problem.site)
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
        return self._problem.targets.of(attention.batch_first(recorded[place].value.reshape(*size, -1)))

    def _first(
        self, norm: Norm, scale: Tensor, inner: tuple[Norm, Tensor] | None, module: nn.Module, composed: bool
    ) -> FirstLinear:
        weight, constant = matrix(module), module(norm.beta[None])
        assert weight is not None  # narrows the type: the structure names linear modules only
        base = (self._in_clean_pass(module, 1) - constant) / scale
        of_attention = None
        if inner is not None:
            of_attention = norm.direction(inner[0].direction(self.base)) @ weight
            base = base - inner[1] * of_attention
        both = None
        if composed:
            into_norm = self.projection if self.scale is None else self.projection * self.scale
            into_norm = into_norm if inner is None else inner[0].direction(into_norm)
            both = norm.direction(into_norm) @ weight  # (head, d_head, features)
        result = base.new_empty(self._longest, base.shape[1])
        return FirstLinear(module, weight.T, both, base, of_attention, constant, result)

    def _runner(self, structure: FeedForwardStructure, modules: FoldedModules) -> PackedPairs:
        """Runs the layer with the norm, the linear modules and the activations answered."""
        forwards: dict[nn.Module, Callable[..., Tensor]] = {}
        if structure.inner is not None:
            forwards[structure.inner.module] = modules.inner_normed
        if not isinstance(modules.norm, NoNorm):
            forwards[modules.norm.module] = modules.normed
        forwards |= {first.module: partial(modules.first, number) for number, first in enumerate(modules.firsts)}
        forwards |= {module: partial(modules.activated, activation) for module, activation in structure.activations}
        if any(map(is_hooked, (structure.projection, *forwards))):
            raise CannotReplayError("a module after the attention has a hook, which would not be called")
        runner = self._projected(structure)
        runner.runner.replace_forwards(forwards)
        return runner


class FoldedReplay:
    """Packed pairs whose first linear modules act on sources. For usual layers, and for enough pairs."""

    name = "folded pairs"
    only_long = True

    def fits(self, problem: ReplayProblem) -> bool:
        """Whether values are zeroed in a module that is answered as a whole, and enough pairs pay for the structure."""
        layer, attention = problem.site.layer, problem.site.attention
        as_a_whole = attention.replaceable and attention.weights is not None and attention.module is not layer.layer
        if not (isinstance(problem.intervention, ZeroValue) and as_a_whole and attention is layer.attentions[-1]):
            return False
        enough = budget_of(problem.output.device).folding_calls / 2
        enough *= feed_forward(problem)[1] * (NORMED_CALLS if output_goes_into_vectors(problem) else 1)
        return products_saved(problem, active_pairs(problem))[0] > enough

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        try:
            yield from _replay(problem)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise CannotReplayError("there is too little memory") from error


def _replay(problem: ReplayProblem) -> Iterator[ReplayChunk]:
    """All pairs, a chunk at a time. The next chunk overwrites the last one.

    CannotReplayError: a chunk does not reproduce the clean outputs, or what the packed replay gives.
    """
    active = active_pairs(problem)
    composed = products_saved(problem, active)[1]
    blocks = plan_chunks(problem, active, not composed)
    layer = FoldedLayer(problem, blocks, composed)
    rounding = folded_bound(layer.outputs, torch.zeros_like(layer.outputs))
    probes = zip(layer.probes, layer.probe_bounds, strict=True)
    cancelled = []
    for block in blocks:
        values = block.head_values(problem.site.attention.values, problem.site.shape.heads)[:, layer.heads]
        vectors = (values.transpose(0, 1) @ layer.projection).transpose(0, 1).flatten(0, 1)  # (member * head, d)
        if layer.modules is not None:
            folded = vectors[: block.folded * len(layer.heads)]
            layer.modules.fold(folded if layer.scale is None else folded * layer.scale, values[: block.folded])
        for chunk in block.chunks:
            output, count, (probe, bound) = layer.run(chunk, vectors), chunk.pairs, next(probes)
            expected = torch.cat([layer.outputs[chunk.clean], probe[None]])
            check_folded(output[count:], expected, torch.cat([rounding[chunk.clean], bound[None]]))
            target, group, output = chunk.target[:count], chunk.group[:count], output[:count]
            if active is not problem.active:  # neighbours ran along
                kept = problem.active[target, group]
                target, group, output = target[kept], group[kept], output[kept]
            if layer.modules is not None and layer.modules.cancelled is not None:
                which = layer.modules.cancelled if active is problem.active else layer.modules.cancelled[kept]
                cancelled.append(torch.stack([target, group])[:, which])
            yield ReplayChunk(target, group, output, layer.outputs, target)
    if cancelled:
        run = ChunkRunner(problem, PackedPairs(problem.site))
        yield from exact_chunks(problem, run, *torch.cat(cancelled, 1))
