"""What the layers of a decoder add to a logit: the terms that ALTI-Logit is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from captum_vz._engine.capture.embeddings import first_module_holding
from captum_vz._engine.capture.records import AttentionRecord, LayerRecord
from captum_vz._engine.decomposition.attention_block import AttentionBlock
from captum_vz._engine.decomposition.readout import Readout
from captum_vz._engine.decomposition.vectors import decompositions
from captum_vz._engine.numerics.tensors import first_tensor
from captum_vz.attr._arguments import as_layers
from captum_vz.attr._target import TokenTarget, rows_at
from captum_vz.attr.layer_alti import LayerALTI, alti_of_attention

# Vocabulary entries: one for all; one for each example; or one for each position, (batch, out).
Entries: TypeAlias = int | Sequence[int] | Tensor


@dataclass(frozen=True)
class Step:
    """What happens along the entries' directions in one run of a layer, at the wanted rows: `(batch, row)` each.

    Attributes:
        given: Of the residual stream before the layer.
        sources: Of the vector of each source, `(batch, row, in)`.
        projected: Of the attention's output, all sources and the bias.
        output: Of the residual stream behind the layer.
        scale: One over the last norm's deviation, were this the last layer.
        constant: What is added to the logit behind the last norm.
        there: Which rows are no padding; all else is 0 for those that are.
    """

    given: Tensor
    sources: Tensor
    projected: Tensor
    output: Tensor
    scale: Tensor
    constant: Tensor
    there: Tensor

    def to(self, device: torch.device) -> Step:
        """The same, on another device: layers may be spread over several."""
        return Step(**{name: value.to(device) for name, value in vars(self).items()})


class Updates(LayerALTI):
    """ALTI's maps in one call, with what the layers add to logits beside them."""

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        norm: Literal["l1", "l2"],
        readout: Readout,
        wanted: TokenTarget,
        entries: dict[str, Entries],
    ) -> None:
        super().__init__(self._keep, layer, norm=norm)
        self.explained = forward_func
        self.readout = readout
        self.wanted = wanted
        self.entries = entries
        self.output: Any = None
        self.steps: list[Step] = []
        self.left_out: list[nn.Module] = []  # what comes before the given layers

    def _keep(self, *args: Any, **kwargs: Any) -> Any:
        with first_module_holding(as_layers(self.layer), self._look):
            self.output = self.explained(*args, **kwargs)
        return self.output

    def _look(self, model: nn.Module) -> None:
        self.left_out = _before(model, as_layers(self.layer))

    def _layer_map(
        self,
        index: int,
        recording: LayerRecord,
        call: AttentionRecord,
        rows: Tensor | None,
        groups: Tensor | None,
        at_most: int | None,
    ) -> Tensor:
        name = recording.name
        assert not getattr(recording.layer, "_is_replica", False), (
            "ALTILogit runs in one thread: pass the module that DataParallel wraps."
        )
        assert len(recording.calls) == 1, (
            f"The layer {name} has a second attention, to an encoder: ALTILogit explains decoders "
            "only. ALTIPlus explains encoder-decoders."
        )
        parts = AttentionBlock(recording, call)
        assert parts.norm_after() is None, (
            f"The layer {name} norms the sum of its residual and its attention's output (post-norm), so that what it "
            f"adds does not reach the logits as it is: ALTILogit explains pre-norm decoders."
        )
        step = self._step(parts)
        self.steps.append(step.to(self.steps[0].there.device) if self.steps else step)
        return alti_of_attention(parts, rows, groups, self.norm)

    def _step(self, parts: AttentionBlock) -> Step:
        batch, tokens, _ = parts.output.shape
        rows = self.wanted.places(batch, tokens, parts.output.device)
        if rows is None:
            rows = torch.arange(tokens, device=parts.output.device).expand(batch, -1)
        there = parts.rows.gather(1, rows)
        directions, constants = [], []
        for name, value in self.entries.items():
            chosen = _chosen(name, value, rows, tokens, there, self.readout.matrix.shape[1])
            direction, constant = self.readout.along(chosen, parts.output)
            directions.append(direction)
            constants.append(constant)
        direction, constant = (one[0] - one[1] if len(one) == 2 else one[0] for one in (directions, constants))
        wide = rows[..., None].expand_as(direction)

        def along(value: Tensor) -> Tensor:
            return (value.gather(1, wide) * direction).sum(-1) * there

        sources: list[Tensor] = []
        examples = iter(direction)
        for some in decompositions(parts, "attention", rows, None):
            few = torch.stack([next(examples) for _ in some.weights])
            sources.append((some.weights * torch.einsum("bjkd,bid->bijk", some.vectors, few)).sum(-1))
        return Step(
            along(parts.residual()),
            torch.cat(sources),
            along(parts.projected),
            along(parts.output),
            self.readout.norm.scale(parts.output.gather(1, wide))[..., 0],
            constant * there,
            there,
        )

    def check(self) -> None:
        """Refuse layers that do not make up the whole model: their logits have to be the model's own."""
        assert not self.left_out, (
            f"The stack that holds the layers begins with {len(self.left_out)} of type "
            f"{type(self.left_out[0]).__name__} that are left out, and what they add would count as the embedding: "
            "pass all layers, in the order in which they run; captum_vz.find_layers(model) gives them."
        )
        logits = self.output if isinstance(self.output, Tensor) else getattr(self.output, "logits", None)
        logits = first_tensor(self.output) if logits is None else logits
        last, tokens = self.steps[-1], self.steps[-1].sources.shape[2]
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(self.output).__name__
        assert isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[1] == tokens, (
            f"forward_func gave {found}: expected logits (batch, {tokens}, entries), one row a token."
        )
        batch = len(logits)
        rows = self.wanted.places(batch, tokens, logits.device)
        at_rows = rows_at(logits, rows)
        if rows is None:
            rows = torch.arange(tokens, device=logits.device).expand(batch, -1)
        there = last.there.to(logits.device)
        own = [
            at_rows.gather(2, _chosen(name, value, rows, tokens, there, logits.shape[2])[..., None])[..., 0]
            for name, value in self.entries.items()
        ]
        expected = (own[0] - own[1] if len(own) == 2 else own[0]) * there
        explained = (last.output * last.scale + last.constant).to(logits.device)
        size = at_rows.abs().amax() * torch.finfo(logits.dtype).eps ** 0.5
        assert ((explained - expected).abs() <= size).all(), (
            "The last layer's output, normed and unembedded, does not give the model's own logits (they differ by "
            f"{(explained - expected).abs().max().item():.1e}): pass all layers, the norm behind them as `final_norm` "
            "and the linear module behind that as `unembedding`. Models that scale or cap their logits are not "
            "explained by ALTILogit."
        )
        for number, (one, following) in enumerate(pairwise(self.steps)):
            apart = ((one.output - following.given) * one.scale).abs().to(size.device)
            assert (apart <= size).all(), (
                f"Run {number + 1} of the layers is not given what run {number} returned: pass all layers, in the "
                "order in which they run."
            )


def _before(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """What a module's list of layers holds before the first of `layers`."""
    first = layers[0]
    for stack in model.modules():
        if isinstance(stack, (nn.ModuleList, nn.Sequential)) and any(one is first for one in stack):
            before = [one for one in takewhile(lambda one: one is not first, stack) if one not in layers]
            # A Sequential may hold the embedding before its layers.
            return before if isinstance(stack, nn.ModuleList) else [one for one in before if type(one) is type(first)]
    return []


def _chosen(name: str, value: Entries, rows: Tensor, tokens: int, there: Tensor, count: int) -> Tensor:
    """The entries at the wanted rows, `(batch, row)`."""
    each = torch.as_tensor(value, device=rows.device)
    batch, shape = len(rows), tuple(each.shape)
    shown = f"a tensor {shape} of {value.dtype}" if isinstance(value, Tensor) and shape else repr(value)
    assert not each.is_floating_point() and each.dtype != torch.bool and shape in ((), (batch,), (batch, tokens)), (
        f"{name} is {shown}: pass a vocabulary entry, one for each of the {batch} examples, or integers "
        f"({batch}, {tokens}), one for each position."
    )
    each = (each[:, None] if each.dim() == 1 else each).expand(batch, tokens).gather(1, rows)
    each = each.long()  # small integers would wrap around where they are compared
    strange = each[((each < 0) | (each >= count)) & there]
    assert not len(strange), (
        f"{name} {int(strange[0])} is out of range: it names one of {count} vocabulary entries, 0 to {count - 1}."
    )
    return each.where(there, 0)
