"""The effect of a token's value on the output of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from captum_vz._engine import (
    LAYER_ERRORS,
    SHORT_OF_MEMORY,
    ModelReplay,
    is_out_of_memory,
    is_reproduced,
    keeps_examples_apart,
)
from captum_vz._private import NullProgress, progress
from captum_vz.attr._base.runs import run_clean
from captum_vz.attr._call import (
    Attention,
    ForwardPassAttribution,
    Heads,
    Values,
    check_one_of,
    logged,
    values_of_layers,
    warn,
)
from captum_vz.attr._call.arguments import Arguments, Inputs, bind_forward, by_input, check_numbers, examples_of
from captum_vz.attr._call.output import Question
from captum_vz.attr._call.target import WantedTokens
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError
from captum_vz.functional.interventions import Intervention, get_intervention


class ValueZeroingEffect(ForwardPassAttribution):
    r"""How much the model's *output* at `target` decreases when the value of a token is set to zero.

    .. math:: s_j = o_{\text{target}} - o_{\text{target}}^{\neg j}

    where :math:`o^{\neg j}` is the output of the whole model with :math:`v_j = 0` in all selected layers at once. The
    change of a layer passes through the rest of the model, and attention weights of later layers change as well. As in
    Captum's FeatureAblation, a score is positive if the token supports the target.

    :class:`~captum_vz.ValueZeroing` explains the *representation* of a token in one layer, without a class.
    ValueZeroingEffect explains the *decision* of the model. A token can change the representation without an effect on
    the class, or can oppose the class. The paper zeroes the same values (`Mohebbi et al., EACL 2023
    <https://aclanthology.org/2023.eacl-main.245>`_). The effect on the output is an extension.

    The model runs once on its inputs. Then the model runs on copies of the inputs, with one source zeroed in each copy.
    For 32 tokens, this takes about as long as 25 forward passes. Modules that ran before the first selected layer are
    not run again. In later linear layers, positions that cannot have changed are skipped, such as the positions before
    the source in a causal model.

    The copies share a batch, so a model that decides by the whole batch (an early exit, a norm, experts of limited
    capacity) would give other numbers for them. So copies share a batch only in a model of transformers without
    experts, and in a function that runs such a model once and nothing else. Of a function, the source with the largest
    effect also runs alone. If its number differs, or the function fails on copies, no copies share a batch. Any other
    model, and an intervention of your own, run with one example and one zeroed source at a time, as Captum's
    FeatureAblation does. On a CPU this takes two to four times as long for short texts, on a GPU longer.

    Args:
        forward_func: A model, or a function that runs the layers. The examples of a batch must not affect each other.
            The output is a tensor whose dimension 0 is the batch, or an object that has such a tensor as `logits`.
        layer: The layer (a whole Transformer block) in which values are zeroed, or a list of layers. In a list, values
            are zeroed in all layers *together*, and `attribute` returns one result. None: all layers of the model.
        device_ids: Not used.
        attention: "self", or "cross" for the cross-attention of a decoder block. Its sources are the encoder's tokens.
            Or the attention module of the layer; for several layers, a list of such modules.
        heads, values, intervention: See :class:`~captum_vz.ValueZeroing`.
        rows: "all": no token is given the value of the source. "target": one token is not given it, and all others are.
            This is the token that `target` or `token` names. Its effects are those of *edges*, from the source to it.
        by_layer: Whether values are zeroed in one layer at a time. The result has an axis of layers. With
            `rows="target"`, it says in which layer the token reads what its decision needs. With
            `intervention="knockout"`, it is attention knockout (`Geva et al., EMNLP 2023
            <https://aclanthology.org/2023.emnlp-main.751>`_).
        window: With `by_layer`, how many layers around each layer lose values together. At the ends there are fewer.

    >>> from captum_vz import ValueZeroingEffect
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    >>> effect = ValueZeroingEffect(model)
    >>> scores = effect.attribute(inputs, target=(6, right), foil=(6, wrong))
    >>> scores.shape == inputs["input_ids"].shape, inputs.tokens()[scores.argmax()]
    (True, 'pictures')
    >>> edges = ValueZeroingEffect(model, rows="target", by_layer=True)
    >>> edges.attribute(inputs, target=(6, right), foil=(6, wrong)).shape  # (batch, layers, in)
    torch.Size([1, 4, 11])
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        layer: Any = None,
        device_ids: list[int] | None = None,
        *,
        attention: Attention = "self",
        heads: Heads | Sequence[Heads] = None,
        values: Values = None,
        intervention: str | Intervention = "zero",
        rows: Literal["all", "target"] = "all",
        by_layer: bool = False,
        window: int = 1,
    ) -> None:
        super().__init__(forward_func, layer, device_ids)
        get_intervention(intervention)
        self.intervention = intervention
        self.values = values
        self.attention = attention
        self.heads = heads
        self.rows = rows
        self.by_layer = by_layer
        self.window = window

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
        token: Any = None,
        run: int | None = None,
    ) -> Any:
        """How much the output at `target` decreases when each token's value is zeroed.

        In half precision, the effects are differences of outputs that are rounded to two or three digits. A warning
        says so, because whole models are not run again in float32.

        Args:
            inputs: The inputs of `forward_func`. A tensor or a tuple of tensors is passed by position, a mapping (a
                tokenizer's output) by keyword. Dimension 0 is the batch.
            target: An index into the output of `forward_func`, in any of Captum's forms: a class, or `(token, entry)`.
                A list or tensor has one index for each example. Or a function that takes the output for copies of the
                batch and returns one number for each example. None: the output is one number for each example.
            additional_forward_args: Further arguments for `forward_func`, after `inputs`: a tuple, or one object.
                Tensors with an entry for each example are repeated with the batch.
            feature_mask: Integers `(1 or batch, in)`. Tokens with the same number form one feature (a word, a span) and
                are zeroed together. All tokens of a feature have its effect.
            attribute_to_layer_input: Must be False, because values are zeroed, not a layer's input or output.
            perturbations_per_eval: The largest number of sources that are zeroed in one run of a model of transformers.
                One more copy runs with no value zeroed. None: as many as fit in memory. The effects are the same.
            show_progress: Whether to show a progress bar, with one step for each run of the model.
            foil: The index of the number that is subtracted, in the same forms ("why target rather than foil?").
            token: With `rows="target"`, the output token that is not given the values: an int, or a list with one for
                each example. None: the first index of `target`.
            run: The input whose values are zeroed, of several, see :meth:`LayerMaps.attribute`.

        Returns:
            `(batch, in)`, or `(batch, layers, in)` with `by_layer`. In at least float32, signed and not normalised.
            Padding is 0, because no token attends to padding. If `inputs` is a tuple, a tuple with one tensor for each
            input. The input that is as long as the sources has all scores, with `run` the text of this number. Others
            (a mask, a decoder's ids) have zeros.

        Raises:
            RefusedError: Wrong arguments. A layer that `forward_func` does not run, or whose attention cannot be read.
                Dropout in train mode. An output that is not finite, or not one number for each example at `target`.
                Several examples that depend on each other. The model is unchanged after an error.
        """
        self._check_layer_input(attribute_to_layer_input)
        check_numbers(perturbations_per_eval, run)
        check_one_of("rows", self.rows, "all", "target")
        if type(self.window) is not int or self.window < 1 or (self.window > 1 and not self.by_layer):
            raise ArgumentError(
                f"window is {self.window!r}: pass the number of layers that lose values together, an integer of at "
                "least 1, and by_layer=True with it."
            )
        question = Question.parse(target, foil)
        wanted = self._wanted(token, target)
        layers = self._layers()
        model = ModelReplay(layers, values_of_layers(self.values, layers), get_intervention(self.intervention))
        given = Arguments(inputs, additional_forward_args, feature_mask, run=run)
        output, members, end, dtypes = run_clean(
            self.get_name(), model, self.forward_func, given, self.attention, self.heads
        )
        batch = len(members)
        clean, order = question.read(output, batch).detach(), _order(members)

        def forward_on(examples: Sequence[int]) -> Callable[[], Any]:
            return bind_forward(self.forward_func, *examples_of(inputs, additional_forward_args, examples, batch))

        # Two runs agree up to the rounding of the least precise numbers in the model.
        dtype = max([clean.dtype, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)
        windows = _windows(len(layers), self.window, order.device) if self.by_layer else None
        rows = None if wanted is None else _rows_of(wanted, model, output, self.get_name())
        numbers = ZeroedNumbers(model, forward_on, question, members, order, clean, dtype, windows, rows)
        title = f"{self.get_name()} attribution" if show_progress else None
        own = isinstance(self.intervention, Intervention) and self.intervention.reads_others
        at_most, note = min(filter(None, (perturbations_per_eval, max(1, model.copies_that_fit() - 1)))), None
        if not own and keeps_examples_apart(self.forward_func):
            numbers.check_apart(question.read_each(output, range(batch), batch).detach())
            effects, note = numbers.effects(at_most, title)
        elif not own and keeps_examples_apart(model.only_module):
            effects, note = numbers.effects_of_function(at_most, title)
        else:
            effects = numbers.effects_alone(title)
        if note:
            warn(f"{self.get_name()}: {note}.")
        effects = effects.unflatten(1, (-1, order.shape[1]))  # (batch, layers or 1, column)
        members, order = (one.to(effects.device)[:, None].expand(-1, effects.shape[1], -1) for one in (members, order))
        scores = effects.new_zeros(*effects.shape[:2], max(int(members.max()), 0) + 1).scatter(2, order, effects)
        scores = (scores.gather(2, members.clamp_min(0)) * (members >= 0))[..., :end]
        return by_input([scores if self.by_layer else scores[:, 0]], inputs, run)[0]

    def _wanted(self, token: Any, target: Any) -> WantedTokens | None:
        """The output tokens that are not given values. None: all."""
        if self.rows == "all":
            if token is not None:
                raise ArgumentError(
                    f'token is {token!r}, which only rows="target" reads: all tokens lose the values here. Leave it '
                    f'out, or pass rows="target" to {type(self).__name__}.'
                )
            return None
        wanted = WantedTokens.parse(token, None if callable(target) or token is not None else target)
        rows = [wanted.rows] if isinstance(wanted.rows, int) else wanted.rows
        if not isinstance(rows, list) or not all(isinstance(row, int) for row in rows):
            raise ArgumentError(
                f'rows="target" needs one output token of each example, and token is {token!r}. Pass token= an int or '
                "a list with one for each example, or a target that begins with the position of a token."
            )
        return wanted


def _rows_of(wanted: WantedTokens, model: ModelReplay, output: Any, name: str) -> Tensor:
    """The position of one output token of each example, `(batch,)`."""
    runs = model.recorded
    if any(run.attention.inline is not None for run in runs):
        raise UnsupportedLayerError(
            f'{name} with rows="target" changes what one token is given, but a layer computes its attention in its own '
            'code, where only values can be changed for all tokens. Pass rows="all".'
        )
    batch, tokens = runs[0].output.shape[:2]
    wanted.check(output, tokens, name)
    found = wanted.positions(batch, tokens, runs[0].output.device)
    assert found is not None  # not all rows are wanted
    return found[:, 0]


def _windows(layers: int, window: int, device: torch.device) -> Tensor:
    """Which layers lose values for the sake of each layer, `(layer, layer)`."""
    place = torch.arange(layers, device=device)
    away = place - place[:, None]
    return (away >= -((window - 1) // 2)) & (away <= window // 2)


def _order(members: Tensor) -> Tensor:
    """The groups of each example, `(batch, copy)`. Groups that an example lacks fill its row up to the longest."""
    numbers = torch.arange(int(members.max()) + 1, device=members.device)
    there = (members[:, :, None] == numbers).any(1)
    return there.int().argsort(dim=1, descending=True, stable=True)[:, : int(there.sum(1).max())]


@dataclass(frozen=True)
class ZeroedNumbers:
    """The numbers of a model that lost some values."""

    model: ModelReplay  # after its clean pass
    forward: Callable[[Sequence[int]], Callable[[], Any]]  # the user's call for some examples of the batch
    question: Question  # which numbers of an output are explained
    members: Tensor  # the group of each source, `(batch, in)`
    order: Tensor  # the groups of each example, `(batch, column)`
    clean: Tensor  # the numbers of the clean pass, `(batch,)`
    dtype: torch.dtype  # the least precise dtype that numbers of the model are rounded to
    windows: Tensor | None  # the layers that lose values for each layer, `(layer, layer)`; None: all layers together
    rows: Tensor | None  # the output token of each example that is not given the values, `(batch,)`; None: all tokens

    def effects(self, at_most: int, title: str | None) -> tuple[Tensor, str | None]:
        """How much the numbers fall for each column, `(batch, column)`, and a warning if memory was short.

        A column is a group. By layer, there are as many columns for each layer as there are groups.

        `at_most` groups are zeroed in one run, on copies of the batch, which must not affect each other.
        """
        return self._in_steps(self._on_copies, at_most, title)

    def effects_of_function(self, at_most: int, title: str | None) -> tuple[Tensor, str | None]:
        """The same of a function that runs a model once. One source of each example runs alone too.

        A function may decide by the whole batch, or take one example only. Then it has the effects that it has alone.
        """
        with suppress(AssertionError, *LAYER_ERRORS):
            effects, note = self.effects(at_most, title)
            columns = effects.abs().argmax(1)
            alone = torch.stack([self._alone(example, column) for example, column in enumerate(columns.tolist())])
            in_batch = self.clean.to(effects) - effects.gather(1, columns[:, None])[:, 0]
            if self._agree(alone.to(effects), in_batch):
                return effects, note
        return self.effects_alone(title), None

    def effects_alone(self, title: str | None) -> Tensor:
        """The same of a model whose examples may affect each other: one run for each example and group.

        RefusedError: The model does not repeat its output. Or an example alone has another number than in the batch.
        """
        batch = len(self.members)
        self.model.run(self.forward(range(batch)), torch.zeros_like(self.members, dtype=torch.bool)[None])
        clean = torch.stack([self._alone(example, None) for example in range(batch)])
        self.check_apart(clean)

        def run(column: int, _: int) -> Tensor:
            return (clean - torch.stack([self._alone(example, column) for example in range(batch)]))[:, None]

        return self._in_steps(run, 1, title)[0]

    def check_apart(self, alone: Tensor) -> None:
        """Check that the examples have the numbers of the clean pass without each other too, `(batch,)`.

        RefusedError: they have others.
        """
        for example, (found, expected) in enumerate(zip(alone.to(self.clean), self.clean, strict=True)):
            if not self._agree(found, expected):
                raise RefusedError(
                    f"The output at target is {found.item():.6g} for example {example} if no other example is in its "
                    f"batch, and {expected.item():.6g} in the whole batch. So the examples of a batch affect each "
                    "other: an early exit, a norm, a scale or a router sees all of them. Pass one example at a time."
                )

    def _agree(self, found: Tensor, expected: Tensor) -> bool:
        """Whether two runs gave the same numbers, `()` or `(batch,)`."""
        # A number may be a difference of large numbers, whose own size does not bound its error.
        return is_reproduced(*(torch.stack([x, torch.ones_like(x)], -1).to(self.dtype) for x in (found, expected)))

    def _in_steps(
        self, run: Callable[[int, int], Tensor], at_most: int, title: str | None
    ) -> tuple[Tensor, str | None]:
        """The effects `run(start, stop) (batch, column)` of all columns, and a warning if memory was short."""
        found, count = list[Tensor](), self.order.shape[1] * (1 if self.windows is None else len(self.windows))
        start, size = 0, at_most
        with NullProgress() if title is None else progress(desc=title, total=-(-count // at_most)) as bar:
            while start < count:
                stop = min(start + size, count)
                try:
                    found.append(run(start, stop))
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or stop - start == 1:
                        raise
                    size = (stop - start) // 2
                else:
                    start = stop
                    bar.update()
        return torch.cat(found, 1), SHORT_OF_MEMORY if size < at_most else None

    def _on_copies(self, start: int, stop: int) -> Tensor:
        zeroed = torch.stack([self._zeroed(column) for column in range(start, stop)])
        zeroed = torch.cat([zeroed, torch.zeros_like(zeroed[:1])])
        copies, batch = zeroed.shape[:2]
        examples = [*range(batch)] * copies
        output = self.model.run(self.forward(examples), zeroed, rows=self.rows)
        numbers = self.question.read_each(output, examples, batch).detach().unflatten(0, (copies, batch))
        return (numbers[-1] - numbers[:-1]).T

    def _alone(self, example: int, column: int | None) -> Tensor:
        """The number `()` of one example that runs alone, with one of its groups zeroed (None: no group)."""
        zeroed = self._zeroed(column or 0)[None, example : example + 1]
        if column is None:
            zeroed = torch.zeros_like(zeroed)
        rows = None if self.rows is None else self.rows[example : example + 1]
        output = self.model.run(self.forward([example]), zeroed, alone=example, rows=rows)
        return self.question.read_each(output, [example], len(self.members))[0].detach()

    def _zeroed(self, column: int) -> Tensor:
        """The sources that are zeroed for one column, `(batch, in)`; by layer `(batch, layer, in)`."""
        layer, group = divmod(column, self.order.shape[1])
        zeroed = self.members == self.order[:, group, None]
        return zeroed if self.windows is None else zeroed[:, None] & self.windows[layer][:, None]
