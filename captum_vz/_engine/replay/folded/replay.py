"""The folded replay: a faster form of packed pairs, in which first linear modules act on sources and not on pairs.

Zeroing source j takes `u_ij = sum_h a_hij f_h(j)` from the residual stream `p_i`, with `f_h(j) = W_O^h v_j^h`. For the
first matrix W of the feed-forward and the norm n before it,

    W n(p_i - u_ij) = s(p_i - u_ij) (W g(p_i) - sum_h a_hij W g(f_h(j))) + W beta

where s is the norm's scale, g its linear part and beta its bias. So W_O and W multiply the vectors `f_h(j)`, one for
each source and head. A pair costs a sum over heads, the activation and the last matrix. If the layer multiplies the
attention's output by a layer scale, W multiplies `scale * f_h(j)`. All else is the layer's own code.

Nothing depends on this room: without it, `PackedReplay` gives the same maps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from captum_vz._engine.numerics.budget import budget_of, has_fast_bfloat16, is_out_of_memory
from captum_vz._engine.numerics.tensors import gather_rows
from captum_vz._engine.numerics.tolerance import (
    TOO_LITTLE_LEFT,
    CannotReplayError,
    check_folded,
    folded_bound,
    is_cancelled,
)
from captum_vz._engine.replay.base import ReplayChunk, ReplayProblem, fill_neighbours
from captum_vz._engine.replay.folded.kernels import add_sums
from captum_vz._engine.replay.folded.layer import FoldedLayer, head_values
from captum_vz._engine.replay.folded.plan import PairChunk, PairTable, plan_chunks
from captum_vz._engine.replay.packed import PackedPairs, packed_pairs
from captum_vz.functional.interventions import ZeroValue


class FoldedReplay:
    """Packed pairs whose first linear modules act on sources. For usual layers, and for enough pairs."""

    name = "folded pairs"

    def fits(self, problem: ReplayProblem) -> bool:
        """Whether values are zeroed, and there are enough pairs to pay for reading the layer's structure."""
        if not isinstance(problem.intervention, ZeroValue):
            return False
        largest = max((x.numel() for x in problem.site.layer.parameters if x.dim() == 2), default=1)
        # In bfloat16 the later matrices cost little too, so twice as many rows must be saved.
        enough = budget_of(problem.output.device).rows_to_save(largest * (2 if _in_bfloat16(problem) else 1))
        if len(problem.targets) * problem.members.shape[1] <= enough:
            return False
        if problem.site.attention.weights is None:
            return True  # it fails, with the reason
        return _rows_saved(problem, _pair_table(problem))[0] > enough

    def __call__(self, problem: ReplayProblem) -> Iterator[ReplayChunk]:
        warnings, name = problem.site.layer.warnings, problem.site.layer.name
        wanted, in_bfloat16 = problem.bfloat16_changes, _in_bfloat16(problem)
        if wanted and not in_bfloat16:
            warnings.append(f"matmul_precision='medium' has no effect: {problem.output.device} has no fast bfloat16")
        try:
            yield from _replay(problem, in_bfloat16)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if in_bfloat16:
                warnings.append(f"matmul_precision='medium' has no effect on {name}: there is too little memory")
            raise CannotReplayError("there is too little memory") from error
        except CannotReplayError:
            if in_bfloat16:
                warnings.append(f"matmul_precision='medium' has no effect on {name}: its structure is not supported")
            raise


def _in_bfloat16(problem: ReplayProblem) -> bool:
    return problem.bfloat16_changes and has_fast_bfloat16(problem.output.device)


def _pair_table(problem: ReplayProblem) -> PairTable:
    targets, heads = problem.targets, problem.heads.nonzero().flatten()
    neighbours = budget_of(problem.output.device).neighbours
    active = fill_neighbours(problem.active, problem.members[targets.batch], neighbours)
    weights = problem.weights if problem.heads.all() else problem.weights[..., heads]
    return PairTable(targets.batch, targets.out, weights, heads, problem.members, active)


def _rows_saved(problem: ReplayProblem, pairs: PairTable) -> tuple[float, bool]:
    """How many rows of products with a first matrix folding saves, and whether it should compose two matrices.

    Folding saves one row for each pair. A pair costs a sum over its group's vectors. Each vector costs a row, because
    the first matrix multiplies it. To compose is to multiply the attention's projection with the first matrix, once.
    This costs a row for each feature of each head, and a vector then costs `depth / width` of a row. All targets run
    twice more, to check them.
    """
    width, depth = problem.output.shape[-1], problem.site.attention.values.shape[-1]  # features of a vector, of a head
    heads, members = len(pairs.heads), pairs.members
    counts = torch.zeros(members.shape[:2], dtype=torch.float32, device=members.device)  # pairs of each group
    counts.index_add_(0, pairs.batch, pairs.active.to(counts))
    vectors = ((members >= 0).sum(-1) * heads * counts.ne(0)).to(counts)
    total, folded, sums = torch.stack([counts.sum(), vectors.sum(), (vectors * counts).sum() / width]).tolist()
    saved = total - sums - 2 * len(pairs.batch)
    composed = folded * depth / width + heads * depth
    return saved - min(composed, folded), composed < folded


def _replay(problem: ReplayProblem, in_bfloat16: bool) -> Iterator[ReplayChunk]:
    """All pairs, a chunk at a time. The next chunk overwrites the last one.

    CannotReplayError: a chunk does not reproduce the clean outputs, or what the packed replay gives.
    """
    if problem.site.attention.weights is None:
        raise CannotReplayError("its attention weights cannot be read")
    pairs = _pair_table(problem)
    composed = _rows_saved(problem, pairs)[1]
    blocks = plan_chunks(pairs, problem.chunk_rows, problem.max_groups)
    layer = FoldedLayer(
        problem, pairs, blocks, composed, in_bfloat16, packed_pairs(problem), partial(PackedPairs, problem.site)
    )
    rounding = folded_bound(layer.outputs, torch.zeros_like(layer.outputs))
    probes = zip(layer.probes, layer.probe_bounds, strict=True)
    for block in blocks:
        values = head_values(problem, block)[:, pairs.heads]
        vectors = (values.transpose(0, 1) @ layer.projection).transpose(0, 1).flatten(0, 1)  # (member * head, d)
        if layer.modules is not None:
            layer.modules.fold(vectors if layer.scale is None else vectors * layer.scale, values)
        for chunk in block.chunks:
            output, count, (probe, bound) = _run(layer, pairs, chunk, vectors), chunk.pairs, next(probes)
            expected = torch.cat([layer.outputs[chunk.clean], probe[None]])
            check_folded(output[count:], expected, torch.cat([rounding[chunk.clean], bound[None]]))
            target, group, output = chunk.target[:count], chunk.group[:count], output[:count]
            if pairs.active is not problem.active:  # neighbours ran along
                kept = problem.active[target, group]
                target, group, output = target[kept], group[kept], output[kept]
            yield ReplayChunk(target, group, output, layer.outputs, target)


def _run(layer: FoldedLayer, pairs: PairTable, chunk: PairChunk, vectors: Tensor) -> Tensor:
    """The layer's output for the rows of a chunk, `(row, d)`."""
    batch, out = (x.index_select(0, chunk.target) for x in (pairs.batch, pairs.out))
    members = gather_rows(pairs.members, batch, chunk.group).clamp_min(0)
    shares = gather_rows(pairs.weights, chunk.target[:, None], members).flatten(1).neg_()
    shares[chunk.pairs : -1], shares[-1] = 0, -1
    changed = torch.index_select(layer.base, 0, chunk.target, out=layer.changed[: len(chunk.target)])
    for span, rows, share in zip(chunk.spans, chunk.by_span(changed), chunk.by_span(shares), strict=True):
        add_sums(rows, share, vectors[span.vectors])
    if layer.modules is None or layer.runner is None:
        if is_cancelled(changed, layer.base.index_select(0, chunk.target))[: chunk.pairs].any():
            raise CannotReplayError(TOO_LITTLE_LEFT)
        return changed
    layer.modules.chunk, layer.modules.shares = chunk, shares
    layer.modules.expected = layer.norm_input(changed, chunk.target)
    return layer.runner.run(batch, out, changed)
