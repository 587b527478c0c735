"""What a layer does with its attention's context: the output projection, the residual connection, the norms after them.

These are found by the inputs and outputs of the layer's submodules in the clean pass, and not by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from captum_vz._engine.capture import AttentionRecord, Step
from captum_vz._engine.numerics import budget_of, first_tensor, once_a_pass
from captum_vz._engine.numerics.tolerance import CannotReplayError, is_close_up_to_tf32, is_same_sum
from captum_vz._engine.structure.modules import Norm, matrix, plain_layer_norm, read_norm
from captum_vz._engine.taps.changes import is_hooked
from captum_vz._private import tree_leaves
from captum_vz.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from captum_vz._engine.structure import AttentionSite

# How many positions are compared. The structure is the same at all positions.
SAMPLE = 16


# A norm with its `scale (batch, out, 1)` in the clean pass, as the linear function `scale * norm.direction(u)`.
FrozenNorm: TypeAlias = tuple[Norm, Tensor]


class AttentionBlock:
    """The parts of a recorded layer around one of its attentions, in float32 if the layer is in half precision.

    `weights` are `(batch, head, out, in)`, hidden states `(batch, out, d)`. The record must hold the layer's steps.
    """

    def __init__(self, site: AttentionSite) -> None:
        self.name = site.layer.name
        self.rows, self.sources = site.target_mask, site.source_mask
        site = _readable(site).in_float32()
        layer, self.attention = site.layer, site.attention
        context = self.attention.context
        assert context is not None  # narrows the type: `_readable` refuses such layers
        self.weights, self._context = site.weights(), context
        self.output = self.attention.batch_first(layer.first_output)
        assert layer.steps is not None  # narrows the type: the method says `needs_steps`
        self._steps = _of_shape(layer.steps, layer.first_output.shape, self.attention)
        self._inputs = _distinct(step.input for step in self._steps)
        self._outputs = _distinct(step.output for step in self._steps)
        given = [x for x in tree_leaves((layer.args, layer.kwargs)) if isinstance(x, Tensor)]
        self._residuals = [self.attention.batch_first(x) for x in given if x.shape == layer.first_output.shape]
        # The residual of a second attention is not the layer's input, but includes the first attention's output.
        self.is_second = self.attention is not layer.attentions[0]
        if self.is_second:
            self._residuals = self._inputs
        self._known_sums: dict[int, tuple[Tensor, list[list[bool]]]] = {}
        self.matrix, self.projected = self._project()

    def _project(self) -> tuple[Tensor, Tensor]:
        """The output projection `(head * d_head, d)` without bias, and its output with bias."""
        found = self._projection()
        if found is None:
            raise UnsupportedLayerError(
                f"The layer {self.name} has no output projection that can be recognised: a submodule whose input is "
                f"the attention's context {tuple(self._context.flatten(2).shape)}. Use ValueZeroing, which needs none."
            )
        module, projected = found
        weight = matrix(module)
        if weight is not None and _is_plain(module):
            return weight, projected

        def project(x: Tensor) -> Tensor:
            output = first_tensor(module(x))
            assert output is not None  # narrows the type: it returned a tensor for the context
            return output

        context = self._context.flatten(2)
        width = context.shape[-1]
        bias = project(context.new_zeros(1, width))
        if weight is None:
            weight = project(torch.eye(width, dtype=context.dtype, device=context.device)) - bias
        given, returned = (x.flatten(0, 1)[self._sample] for x in (context, projected))
        if not is_close_up_to_tf32(given @ weight + bias, returned):
            raise UnsupportedLayerError(
                f"The layer {self.name} hands its attention's context to a {type(module).__name__}, which is "
                "not linear. Use ValueZeroing, which needs no linear output projection."
            )
        return weight, projected

    def _projection(self) -> tuple[nn.Module, Tensor] | None:
        """The submodule that is given the context and returns something else, and what it returns."""
        attention, output = self.attention, first_tensor(self.attention.output)
        if attention.projection is not None:
            return None if output is None else (attention.projection, attention.batch_first(output))
        steps = [(s.module, s.given, s.output) for s in self._steps if s.given is not None and s.output is not None]
        # Mostly the context is what the attention returned, so that nothing has to be compared.
        for module, given, returned in steps if attention.replaceable else []:
            if given.value is output and matrix(module) is not None:
                return module, returned
        for module, given, returned in steps:
            same = given.is_unmodified() and _holds(given.value, self._context)
            if same and not _holds(returned, self._context):
                return module, returned
        return None

    def residual(self) -> Tensor:
        """The vectors that the layer adds to the attention's output.

        They are the layer's input, or for a second attention the sum after the first one. UnsupportedLayerError: no
        such sum is found.
        """
        return self._residuals[self._of_residual]

    def norm_after(self) -> tuple[FrozenNorm, Tensor] | None:
        """The norm of the sum of residual and attention, with its output (post-norm). None for pre-norm layers.

        A pre-norm layer has a norm there too, but adds the sum itself to its output or hands it to its next attention.
        UnsupportedLayerError: the layer does neither.
        """
        of_input, of_output = self._sums_with_residuals[self._of_residual]
        for module, given, normed in self._norms:
            if of_input[_place(given, self._inputs)] and self._leads_on(normed):
                norm = self._read_norm(module, given, normed)
                if norm is not None:
                    return norm, normed
        if any(of_output[1:]) or self._leads_on(self.residual() + self.projected):
            return None
        raise UnsupportedLayerError(
            f"The layer {self.name} does something to the sum of its residual and its attention's output that is not "
            "recognised, neither a norm (post-norm) nor another sum (pre-norm). Pass include='residual'."
        )

    def norm_at_end(self, normed: Tensor) -> FrozenNorm:
        """The norm at the end of the layer, whose input is `normed` plus the feed-forward's output.

        UnsupportedLayerError: there is no such norm.
        """
        sums, is_output = self._sums_with(normed), self._sums_with_residuals[-1][1]
        for module, given, returned in reversed(self._norms):
            if is_output[1 + _place(returned, self._outputs)] and any(sums[_place(given, self._inputs)][1:]):
                norm = self._read_norm(module, given, returned)
                if norm is not None:
                    return norm
        raise UnsupportedLayerError(
            f"The layer {self.name} does not end in a norm that can be recognised, of the feed-forward's output plus "
            "the output of the norm after the attention. Pass include='layer_norm'."
        )

    @cached_property
    def _of_residual(self) -> int:
        """The number of the residual among the candidates."""
        for number, (is_input, is_output) in enumerate(self._sums_with_residuals[:-1]):
            if any(is_input) or any(is_output):
                return number
        raise UnsupportedLayerError(
            f"The layer {self.name} has no residual connection that can be recognised: the sum of its input and its "
            "attention's output, without a scale, gate or norm. Pass include='attention', which needs none."
        )

    @cached_property
    def _norms(self) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """The modules that may be norms, with input and output. Others have no epsilon, or have submodules."""
        return [
            (one.module, one.input, one.output)
            for one in self._steps
            if one.input is not None and one.output is not None and not list(one.module.children())
            if any("eps" in name for name in vars(one.module).copy())
        ]

    def _read_norm(self, module: nn.Module, given: Tensor, returned: Tensor) -> FrozenNorm | None:
        """The norm that a submodule applied, or None if it did something else."""
        norm = plain_layer_norm(module) if _is_plain(module) else None
        if norm is not None:
            return norm, norm.normed_and_scale(given)[1]
        try:
            norm = read_norm(module, self._sampled[id(given)], self._sampled[id(returned)])
        except CannotReplayError:
            return None
        return norm, norm.scale(given)

    @property
    def _sample(self) -> Tensor:
        return once_a_pass(_sample_of, self.rows)

    @cached_property
    def _sampled(self) -> dict[int, Tensor]:
        """All tensors of the layer at the sampled positions, `(n, d)` each, by id."""
        tensors = [*self._residuals, *self._inputs, *self._outputs, self.output, self.projected]
        tensors = list({id(x): x for x in tensors}.values())
        rows = torch.stack(tensors).flatten(1, 2).index_select(1, self._sample)
        return {id(x): row for x, row in zip(tensors, rows, strict=True)}

    @cached_property
    def _sums_with_residuals(self) -> list[tuple[list[bool], list[bool]]]:
        """For each candidate's sum with the attention's output, and for zero last, what equals it.

        These are: which inputs of steps equal the sum; whether the layer's output equals the sum, and the sum plus each
        output of a step. All are read from the device at once.
        """
        at, inputs, outputs = self._sampled, self._inputs, self._outputs
        projected, output = at[id(self.projected)], at[id(self.output)]
        zero = torch.zeros_like(projected)
        values = torch.stack([*(at[id(x)] + projected for x in self._residuals), zero])
        found = torch.stack([*(at[id(x)] for x in inputs), output, *[output] * len(outputs)])
        added = torch.stack([*[zero] * len(inputs), zero, *(at[id(x)] for x in outputs)])
        equal = _are_sums(found, values[:, None], added).tolist()
        return [(one[: len(inputs)], one[len(inputs) :]) for one in equal]

    def _sums_with(self, value: Tensor) -> list[list[bool]]:
        """Which inputs of steps, and the layer's output last, equal `value`, and `value` plus each output of a step."""
        if id(value) not in self._known_sums:
            at = self._sampled
            found = torch.stack([*(at[id(x)] for x in self._inputs), at[id(self.output)]])
            row = at[id(value)] if id(value) in at else value.flatten(0, 1)[self._sample]
            added = torch.stack([torch.zeros_like(row), *(at[id(x)] for x in self._outputs)])
            at_once = budget_of(row.device).items_in_chunk(added, added.numel())
            equal = [_are_sums(few[:, None], row, added) for few in found.split(at_once)]
            self._known_sums[id(value)] = value, (equal[0] if len(equal) == 1 else torch.cat(equal)).tolist()
        return self._known_sums[id(value)][1]

    def _leads_on(self, value: Tensor) -> bool:
        """Whether the layer returns `value`, or hands `value` plus a submodule's output to a submodule."""
        # It depends on the answers before which value is meant, so this cannot be read together with them.
        *of_inputs, of_output = self._sums_with(value)
        return of_output[0] or any(any(one[1:]) for one in of_inputs)


def _sample_of(rows: Tensor) -> Tensor:
    """The positions that are compared, in `(batch * out)`: no padding, unless all positions are padding."""
    rows = rows.flatten()
    steps = torch.arange(SAMPLE, device=rows.device) * rows.sum() // SAMPLE  # the number of rows is not read
    return rows.argsort(descending=True, stable=True)[steps]


def _are_sums(found: Tensor, value: Tensor, added: Tensor) -> Tensor:
    """Whether `found` is `value + added` up to the order of summation, for `(..., n, d)` as `(...)`."""
    return is_same_sum(found, value + added, value.abs() + added.abs()).all(-1)


def _distinct(values: Iterable[Tensor | None]) -> list[Tensor]:
    return list({id(x): x for x in values if x is not None}.values())


def _place(value: Tensor, values: Sequence[Tensor]) -> int:
    return next(place for place, one in enumerate(values) if one is value)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module of a known class does nothing but what its class says."""
    return "forward" not in vars(module) and not is_hooked(module)


def _readable(site: AttentionSite) -> AttentionSite:
    """The site. UnsupportedLayerError: its vectors cannot be known."""
    name, attention = site.layer.name, site.attention
    if attention.weights is None:
        site.weights()  # raises an error
    if attention.calls != 1 or attention.context is None:
        raise UnsupportedLayerError(
            f"The attention of {name} is computed in {attention.calls} parts, which norm-based methods do not support. "
            "Use ValueZeroing."
        )
    if site.layer.hooks:
        hooks = ", ".join(getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in site.layer.hooks)
        advice = "Use ValueZeroing, or make it a forward_pre_hook of the next layer."
        raise UnsupportedLayerError(f"A hook on the layer {name} changes its output ({hooks}). {advice}")
    return site


def _of_shape(steps: Iterable[Step], shape: torch.Size, attention: AttentionRecord) -> list[Step]:
    """Steps whose tensors are `(batch, out, d)`, or None if the layer's output has another size."""
    changed: dict[int, Tensor] = {}

    def once(value: Tensor | None) -> Tensor | None:
        if value is None or value.shape[-1:] != shape[-1:] or value.numel() != shape.numel():
            return None
        if id(value) not in changed:  # a tensor of several steps stays one tensor
            same = value if value.shape == shape else value.reshape(shape)
            changed[id(value)] = attention.batch_first(same)
        return changed[id(value)]

    return [replace(step, input=once(step.input), output=once(step.output)) for step in steps]


def _holds(value: Tensor, context: Tensor) -> bool:
    """Whether `value` equals a context `(batch, out, head, d_head)`, batch or tokens first, heads concatenated."""
    if value.numel() != context.numel() or value.shape[-1] != context.shape[2] * context.shape[3]:
        return False
    flat = context.flatten(2)
    layouts = [flat, flat.transpose(0, 1)]
    return any(is_close_up_to_tf32(value.reshape(-1, flat.shape[-1]), layout.flatten(0, 1)) for layout in layouts)
