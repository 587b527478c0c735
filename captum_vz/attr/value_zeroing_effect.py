"""What a model's output loses with a token's value: Value Zeroing carried through to a decision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from captum._utils.common import (
    _format_additional_forward_args,
    _format_output,
    _format_tensor_into_tuples,
)
from captum._utils.progress import NullProgress, progress
from torch import Tensor

from captum_vz._engine import LayerRecord, ModelReplay, attention_site, is_half, repeat_examples
from captum_vz.attr._arguments import FeatureGroups, Inputs, as_layers, bind_forward, check_per_eval, tokens_of
from captum_vz.attr._captum import ForwardPassAttribution, logged, warn
from captum_vz.attr._heads import Heads, select_heads
from captum_vz.attr._target import Indices, parse_indices, pick, tensor_of
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional import widen


class ValueZeroingEffect(ForwardPassAttribution):
    r"""How much the model's *output* at `target` loses when a token's value is zeroed.

    .. math:: s_j = o_{\text{target}} - o_{\text{target}}^{\neg j}

    where :math:`o^{\neg j}` is the output of the whole model with :math:`v_j = 0` in all chosen layers at once: what
    changes in a layer runs on through the rest of the model, and in layers above the attention weights change with it.
    The sign is that of Captum's FeatureAblation: positive where the token speaks for the target.

    Two questions, two methods. :class:`~captum_vz.ValueZeroing` asks, in one layer, where the *representation* of a
    token comes from; it knows no class. This asks what the *decision* rests on: a token may be mixed into the
    representation and not matter to the class, or speak against it. It goes beyond the paper (`Mohebbi et al., EACL
    2023 <https://aclanthology.org/2023.eacl-main.245>`_); what is zeroed is the paper's.

    It costs one run of the model, and one on copies of its inputs, a source in each. What cannot have changed is not
    computed again: all that ran before the first of the layers; after it, in the model's linear layers, positions that
    nothing has reached yet, such as those before the source in a causal model.

    Args:
        forward_func: A model, or any function that runs the layers. It treats the examples of its batch apart, and
            returns a tensor with one entry an example in dimension 0, or an object that has one as `logits`.
        layer: A layer (a whole Transformer block) in which values are zeroed; or a list of layers, in all of which they
            are zeroed *together*, for one result.
        device_ids: Needed only if `forward_func` runs a DataParallel model without being one.
        attention: "self", or "cross" for the second attention of a decoder block: sources are the encoder's tokens.
        heads: Zero the value in these (query) heads only, see :class:`~captum_vz.ValueZeroing`.

    >>> from captum_vz import ValueZeroingEffect, find_layers
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> effect = ValueZeroingEffect(model, find_layers(model))
    >>> scores = effect.attribute(inputs, target=(6, right), foil=(6, wrong))
    >>> scores.shape == inputs["input_ids"].shape, inputs.tokens()[scores.argmax()]
    (True, 'pictures')
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any,
        device_ids: list[int] | None = None,
        *,
        attention: str = "self",
        heads: Heads | Sequence[Heads] = None,
    ) -> None:
        super().__init__(forward_func, layer, device_ids)
        self.attention = attention
        self.heads = heads

    @logged
    def attribute(
        self,
        inputs: Inputs,
        target: Any = None,
        additional_forward_args: Any = None,
        feature_mask: Tensor | None = None,
        attribute_to_layer_input: bool = False,
        perturbations_per_eval: int | None = None,
        show_progress: bool = False,
        *,
        foil: Any = None,
    ) -> Any:
        """How much the output at `target` loses with each token's value.

        In half precision the effects are differences of outputs that are rounded to two or three digits, and a warning
        says so: unlike single layers, whole models are not run again in float32.

        Args:
            inputs: What `forward_func` takes: a tensor or a tuple of tensors, passed by position, or a mapping such as
                a tokenizer's output, passed by keyword. Dimension 0 is the batch.
            target: An index into what `forward_func` returned, in any of Captum's forms: a class; `(token, entry)`; a
                list or tensor with one for each example. Or a function of what `forward_func` returned that gives one
                number for each example, called on copies of the batch. None: the output is one number already.
            additional_forward_args: Further arguments for `forward_func`, after `inputs`: a tuple, or one object.
                Tensors with an entry for each example are repeated with the batch.
            feature_mask: Integers `(1 or batch, in)`: tokens with the same number are one feature (a word, a span),
                zeroed together; all of them carry its effect.
            attribute_to_layer_input: Only False: values are zeroed, not a layer's input or output.
            perturbations_per_eval: At most that many sources are zeroed in one run of the model; one copy more is left
                as it is. None lets the engine choose by memory. The numbers are the same for any value.
            show_progress: Whether to show a progress bar, one step for each run of the model.
            foil: The index of the number that is subtracted, in the same forms ("why target rather than foil?").

        Returns:
            `(batch, in)`, in at least float32, signed and not normalised; a tuple with one such tensor if `inputs` is a
            tuple. Padding, which no token sees, is 0.

        Raises:
            RefusedError: Bad arguments; a layer that `forward_func` does not run, or whose attention cannot be read;
                dropout in train mode; an output that is not one number an example at `target`, or not finite; a model
                whose examples depend on what else is in the batch. The model is left as it was.
        """
        if attribute_to_layer_input:
            raise ArgumentError(
                f"{self.get_name()} attributes to source tokens through the layers' attention; "
                "attribute_to_layer_input=True has no meaning here. Leave it False."
            )
        check_per_eval(perturbations_per_eval)
        question = _Question.parse(target, foil)
        layers = as_layers(self.layer)
        device_ids = self.device_ids or getattr(self.forward_func, "device_ids", None)
        masks = FeatureGroups(feature_mask, device_ids)
        model = ModelReplay(layers, device_ids)
        half: list[bool] = []
        ends: list[int | None] = []

        def compute(record: LayerRecord) -> Tensor:
            site = attention_site(record, self.attention)
            if site.windows is not None or site.is_reordered():
                raise UnsupportedLayerError(
                    f"The attention of {record.name} sees the layer's tokens in windows, or in another order, where "
                    f"{self.get_name()} cannot zero values. ValueZeroing has the maps of such layers."
                )
            model.zero_in(site, select_heads(self.heads, record.index, len(layers), site.shape.heads))
            half.append(is_half(record))
            ends.append(site.end_of_inputs(tokens_of(inputs)))
            groups, sources = masks.of(site, ends[-1]), site.source_mask
            if groups is None:
                groups = torch.arange(site.shape.sources, device=sources.device).expand_as(sources)
            return groups.where(sources, -1)

        output, runs = model.run_clean(bind_forward(self.forward_func, inputs, additional_forward_args), compute)
        if any(half):
            warn(
                f"{self.get_name()}: the model runs in half precision, and effects are differences of its rounded "
                "outputs. Load it in float32 to see small ones."
            )
        members = _members([one for _, one in runs])
        batch = len(members)
        question.read(output, batch, 1)
        order = _order(members)
        effects = members.new_zeros(order.shape, dtype=torch.float32)
        at_a_time = min(filter(None, (perturbations_per_eval, max(1, model.copies_that_fit() - 1))))
        steps = list(_steps(order.shape[1], at_a_time))
        title = f"{self.get_name()} attribution"
        with progress(desc=title, total=len(steps)) if show_progress else NullProgress() as bar:
            for start, stop in steps:
                zeroed = members == order.T[start:stop, :, None]
                zeroed = torch.cat([zeroed, torch.zeros_like(zeroed[:1])])
                copied = _copies(inputs, additional_forward_args, len(zeroed), batch)
                output = model.run(bind_forward(self.forward_func, *copied), zeroed)
                numbers = question.read(output, batch, len(zeroed))
                numbers = numbers.unflatten(0, (len(zeroed), batch))
                effects = effects.to(numbers)
                effects[:, start:stop] = (numbers[-1] - numbers[:-1]).T
                bar.update()
        scores = effects.new_zeros(batch, max(int(members.max()), 0) + 1).scatter(1, order.to(effects.device), effects)
        members = members.to(scores.device)
        scores = (scores.gather(1, members.clamp_min(0)) * (members >= 0))[:, : ends[0]]
        return _format_output(isinstance(inputs, tuple), (scores,))


def _members(groups: list[Tensor]) -> Tensor:
    """The group of each source, `(batch, in)`, -1 for what is padding in all layers."""
    shapes = {tuple(one.shape) for one in groups}
    if len(shapes) != 1:
        raise ArgumentError(
            f"The layers' attentions have different examples and sources: {sorted(shapes)}. Values can be zeroed "
            "together only where their tokens are the same: pass layers of one stack."
        )
    return torch.stack([one.to(groups[0].device) for one in groups]).amax(0)


def _order(members: Tensor) -> Tensor:
    """The groups that each example has, `(batch, copy)`: as many as the one with most; others are filled up."""
    numbers = torch.arange(int(members.max()) + 1, device=members.device)
    there = (members[:, :, None] == numbers).any(1)
    return there.int().argsort(dim=1, descending=True, stable=True)[:, : int(there.sum(1).max())]


def _steps(count: int, at_most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, at_most):
        yield start, min(start + at_most, count)


def _copies(inputs: Any, additional_forward_args: Any, copies: int, batch: int) -> tuple[Any, Any]:
    """The arguments of the user's call for copies of the batch, one after the other."""
    if isinstance(inputs, Mapping):
        return {name: repeat_examples(value, copies, batch) for name, value in inputs.items()}, None
    copied = tuple(repeat_examples(value, copies, batch) for value in _format_tensor_into_tuples(inputs))
    further = _format_additional_forward_args(additional_forward_args)
    return copied, None if further is None else tuple(repeat_examples(value, copies, batch) for value in further)


@dataclass(frozen=True)
class _Question:
    """The number of each example that is explained."""

    target: Indices | Callable[[Any], Any]
    foil: Indices

    @classmethod
    def parse(cls, target: Any, foil: Any) -> _Question:
        if callable(target):
            if foil is not None:
                raise ArgumentError("target is a function, so foil has no meaning: let the function subtract it.")
            return cls(target, None)
        return cls(parse_indices(target), parse_indices(foil, "foil"))

    def read(self, output: Any, batch: int, copies: int) -> Tensor:
        """The numbers of copies of the batch, one after the other, `(copies * batch,)`."""
        examples = batch * copies
        if callable(self.target):
            numbers = self.target(output)
            name = "target gave"
        else:
            found = tensor_of(output)
            if found is None:
                raise ArgumentError(
                    f"forward_func gave an object of type {type(output).__name__} without logits: pass a target that "
                    "takes it and gives one number for each example, or a forward_func that returns a tensor."
                )
            numbers = pick(found, _repeated(self.target, copies))
            name = f"forward_func gave {tuple(found.shape)}, and target {self.target!r} picks"
            if self.foil is not None:
                numbers = numbers - pick(found, _repeated(self.foil, copies), "foil")
        shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        if not (isinstance(numbers, Tensor) and numbers.dim() and len(numbers) == numbers.numel() == examples):
            raise ArgumentError(
                f"{name} {shape} for {examples} examples: one number for each example is explained. For classes "
                "(batch, classes) pass a class as target, for classes of tokens a tuple (token, class)."
            )
        if not numbers.isfinite().all():
            raise RefusedError(f"{name} numbers that are not finite (NaN or infinity).")
        return widen(numbers.detach().reshape(-1))


def _repeated(indices: Indices, copies: int) -> Indices:
    return indices * copies if isinstance(indices, list) else indices
