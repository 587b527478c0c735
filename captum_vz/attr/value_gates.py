"""A forward function with a number for each source token, which scales the token's value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import ModelGates, find_layers, is_hooked_by_captum, is_reproduced, keeps_examples_apart
from captum_vz._private import modules_of, tree_leaves, tree_map
from captum_vz.attr._base.runs import run_clean
from captum_vz.attr._call import Attention, Described, Heads, Values, as_layers, check_forward_func, values_of_layers
from captum_vz.attr._call.arguments import MODEL_ERRORS, Arguments, bind_forward, examples_of
from captum_vz.attr._call.output import tensor_of
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional.interventions import Intervention, get_intervention

# How many inputs a model is known on. What is known of one input is small.
MOST_KNOWN = 64


class ValueGates(Described):
    r"""A `forward_func` for *any* class of Captum: the model's output as a function of one gate for each source token.

    .. math:: f(g), \qquad c_i = \sum_j g_j \alpha_{ij} v_j

    in all selected layers at once. A gate of 1 leaves the value of the token, 0 zeroes it, and numbers between scale
    it. With another intervention, a gate goes from what replaces the value to the value, see :meth:`Intervention.
    gated_values <captum_vz.functional.Intervention.gated_values>`. The output is differentiable in the gates.

    The gates are the `inputs` of Captum's `attribute`, ones, and the inputs of the model are `additional_forward_args`.
    Captum's baseline 0 zeroes values. Each class of Captum then computes its own kind of score:

    - `FeatureAblation`: :class:`~captum_vz.ValueZeroingEffect`.
    - `ShapleyValues`, `ShapleyValueSampling`, `KernelShap`: Shapley values of tokens. They share the effect of all
      values, f(1) - f(0), and a redundant word gets its part.
    - `IntegratedGradients`: the path from no values to all values. Scores sum to f(1) - f(0) if f is continuous. It
      is not with the intervention "knockout", which divides by the sum of what is left, nor if experts are chosen.
    - `Saliency`, `InputXGradient`: the slope at the model as it is.

    The values are those of the paper (`Mohebbi et al., EACL 2023 <https://aclanthology.org/2023.eacl-main.245>`_). The
    gates are an extension.

    The first call on some inputs finds the attentions and the padding, checks them as
    :class:`~captum_vz.ValueZeroingEffect` does, and takes a few forward passes. What it finds is kept for further calls
    with the same numbers in the inputs. Such a call takes about two forward passes. A model of transformers without
    experts runs on the whole batch. Any other model or function runs on one row of gates at a time, because the rows of
    a batch might affect each other. Nothing of a call remains on the model.

    Args:
        forward_func: A model, or a function that runs the layers, see :class:`~captum_vz.ValueZeroingEffect`.
        layer: The layer (a whole Transformer block) whose values are gated, or a list of layers that share the gates.
            None: all layers that `captum_vz.find_layers(forward_func)` finds.
        device_ids: Not used.
        attention, heads, values: See :class:`~captum_vz.ValueZeroingEffect`.
        intervention: What a gate of 0 does to a source, see :class:`~captum_vz.ValueZeroing`.
        run: The input whose values are gated, of several, see :meth:`LayerMaps.attribute`.

    >>> from captum.attr import IntegratedGradients
    >>> from captum_vz import ValueGates, find_layers
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> inputs = tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt")
    >>> gated = ValueGates(model, find_layers(model))
    >>> gates = torch.ones(inputs["input_ids"].shape)
    >>> are = tokenizer.convert_tokens_to_ids("are")
    >>> scores = IntegratedGradients(gated).attribute(gates, target=(6, are), additional_forward_args=inputs)
    >>> change = gated(gates, inputs)[0, 6, are] - gated(0 * gates, inputs)[0, 6, are]
    >>> torch.allclose(scores.sum().float(), change, atol=1e-2)
    True
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
        run: int | None = None,
    ) -> None:
        get_intervention(intervention)
        self.forward_func = forward_func
        self.layer = layer
        self.device_ids = device_ids
        self.attention = attention
        self.heads = heads
        self.values = values
        self.intervention = intervention
        self.run = run
        self._options: tuple[Any, ...] = ()  # with which `_known` was found
        self._known: dict[bytes, _Known] = {}

    def __call__(self, gates: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the model with gated values, in the grad mode of the caller.

        Args:
            gates: `(batch, in)`, one number for each source token. Gates of padding have no effect.
            args: The inputs of `forward_func`. Or one mapping (a tokenizer's output), whose entries are passed by
                keyword. A single example is repeated for each row of `gates`.
            kwargs: Further arguments of `forward_func`.

        Returns:
            The tensor that `forward_func` returns, its `logits`, or its `last_hidden_state`.

        Raises:
            RefusedError: Gates of another shape. No such tensor. The errors of :class:`~captum_vz.ValueZeroingEffect`.
                The model is unchanged after an error.
        """
        found = tensor_of(output := self._output(gates, args, kwargs, exact=True))
        if found is None:
            raise ArgumentError(
                f"forward_func gave an object of type {type(output).__name__} without logits: pass a forward_func that "
                "returns a tensor."
            )
        return found

    def forward(self, gates: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What `forward_func` itself returns, with gated values. Captum's `LLMAttribution` calls this.

        `gates` may have fewer columns than the model has tokens. Further tokens, such as generated ones, keep their
        values. See :func:`captum_vz.generation.gated_input`.
        """
        return self._output(gates, args, kwargs, exact=False)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model. Captum's `LLMAttribution` asks for its device, and lets it generate."""
        if name.startswith("__") or name == "forward_func":
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.forward_func, name)

    def prepare_inputs_for_generation(self, input_ids: Tensor, gates: Tensor, **_: Any) -> dict[str, Any]:
        """The arguments of `forward` for Captum's `LLMAttribution`: the whole text in each step, without a cache."""
        return {"input_ids": input_ids, "gates": gates, "use_cache": False}

    def _update_model_kwargs_for_generation(self, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return model_kwargs

    def _output(self, gates: Any, args: tuple[Any, ...], kwargs: dict[str, Any], exact: bool) -> Any:
        if not isinstance(gates, Tensor) or gates.dim() != 2 or gates.is_complex() or not gates.numel():
            shown = f"{tuple(gates.shape)}" if isinstance(gates, Tensor) else f"of type {type(gates).__name__}"
            if isinstance(gates, tuple):
                shown += ", as DeepLift passes it, which explains modules only (take IntegratedGradients)"
            raise ArgumentError(f"gates is {shown}: pass one number for each source token, (batch, source tokens).")
        counts = not gates.is_floating_point() and bool((gates.abs() > 1).any())
        gates = gates if gates.is_floating_point() else gates.to(torch.get_default_dtype())
        call = Call.of(self.forward_func, args, kwargs, len(gates))
        given = tree_leaves((call.inputs, call.further, call.named))
        if counts or any(_are_ids(gates, leaf) for leaf in given):
            raise ArgumentError(
                "gates holds token ids: pass one number for each source token, such as torch.ones(ids.shape), and the "
                "ids as additional_forward_args."
            )
        call.bound()  # which checks the inputs
        model: Any = self.forward_func
        layers = as_layers(find_layers(model) if self.layer is None else self.layer)
        check_forward_func(self.forward_func, layers)
        options = layers, self.attention, self.heads, self.values, self.intervention, self.run
        if options != self._options:
            self._options, self._known = options, {}
        key, first, rows = call.distinct()
        if _is_read([self.forward_func] if isinstance(self.forward_func, nn.Module) else layers):
            key = None if key is None else key + bytes(str(rows), "ascii")
            first = rows = [*range(len(gates))]
        known = None if key is None else self._known.get(key)
        try:
            return self._gated(known or self._find(key, call, layers, first), gates, call, rows, exact)
        except RefusedError:
            if known is None:
                raise
        # The model may have changed since.
        self._known.clear()
        return self._gated(self._find(key, call, layers, first), gates, call, rows, exact)

    def _find(self, key: bytes | None, call: Call, layers: list[nn.Module], first: list[int]) -> _Known:
        """What a clean pass over the distinct examples of a call shows."""
        one = call.examples(first)
        given = values_of_layers(self.values, layers)
        model = ModelGates(layers, given, get_intervention(self.intervention))
        arguments = Arguments(one.inputs, one.further, run=self.run)
        output, members, end, dtypes = run_clean(
            "Value Gates", model, one.given_named, arguments, self.attention, self.heads
        )
        tokens = members >= 0
        model.check_ones(one.bound(), tokens)
        if len(tokens) > 1 and not self._keeps_apart():
            # Two runs agree up to the rounding of the least precise numbers in the model.
            _check_apart(model, one, tokens, output, max(dtypes, key=lambda dtype: torch.finfo(dtype).eps))
        known = _Known(model, tokens, end)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        # A function may hold another mask in the next call, which no call of an attention function would show.
        if key is not None and (isinstance(self.forward_func, nn.Module) or model.seen is not None):
            self._known[key] = known
        return known

    def _gated(self, known: _Known, gates: Tensor, call: Call, rows: list[int], exact: bool) -> Any:
        tokens, columns = known.tokens, gates.shape[1]
        sources = tokens.shape[1] if known.end is None else known.end
        other_batch = len(tokens) != len(set(rows))
        if other_batch or (columns != sources if exact else columns > sources):
            batch = len(tokens) if other_batch else len(gates)
            raise ArgumentError(
                f"gates is {tuple(gates.shape)}, but the layer's attention has {batch} example(s) of {sources} source "
                f"tokens: pass one number for each, torch.ones({batch}, {sources})."
            )
        gates = gates.to(tokens.device)
        gates = torch.cat([gates, gates.new_ones(len(gates), tokens.shape[1] - columns)], 1)
        places = torch.tensor(rows, device=tokens.device)
        gates = torch.where(tokens[places], gates, 1)
        if len(gates) == 1 or self._keeps_apart():
            return known.model.run_gated(call.bound(), gates, None if len(tokens) == len(gates) else places)
        if _is_read(known.model.outermost):
            raise RefusedError(
                "A layer method of Captum reads a module on the whole batch, but each row of gates runs alone. Pass a "
                "model of transformers without experts to ValueGates, or internal_batch_size=1 to attribute."
            )
        alone = [_run_alone(known.model, call, gates, places, row) for row in range(len(gates))]
        return tree_map(lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *alone)

    def _keeps_apart(self) -> bool:
        """Whether the examples of a batch cannot affect each other, so that they may share a run."""
        own = isinstance(self.intervention, Intervention) and self.intervention.reads_others
        return not own and keeps_examples_apart(self.forward_func)


def _is_read(roots: Sequence[nn.Module]) -> bool:
    """Whether a layer method of Captum keeps or replaces the output of a module, for the whole batch."""
    return any(is_hooked_by_captum(module) for root in roots for module in modules_of(root))


def _run_alone(model: ModelGates, call: Call, gates: Tensor, places: Tensor, row: int) -> Any:
    """The output for one example of the batch, which runs without the others."""
    only = slice(row, row + 1)
    try:
        return model.run_gated(call.examples([row]).bound(), gates[only], places[only])
    except ArgumentError:
        raise
    except (RefusedError, *MODEL_ERRORS) as error:
        raise RefusedError(
            f"forward_func fails on one example alone ({type(error).__name__}: {error}). If it holds a tensor with one "
            "entry for each example, pass this tensor after the gates."
        ) from error


def _check_apart(model: ModelGates, call: Call, tokens: Tensor, output: Any, dtype: torch.dtype) -> None:
    """Check that each example alone has the output that it has in the batch. `tokens` is `(batch, in)`.

    RefusedError: it has another one.
    """
    ones, places = torch.ones(tokens.shape, device=tokens.device), torch.arange(len(tokens), device=tokens.device)
    for row, expected in enumerate([] if (found := tensor_of(output)) is None else found.split(1)):
        with torch.no_grad():
            one = tensor_of(_run_alone(model, call, ones, places, row))
        pair = [x.detach().reshape(1, -1).to(dtype) for x in (one, expected) if x is not None]
        if len(pair) < 2 or pair[0].shape != pair[1].shape or not is_reproduced(*pair):
            raise RefusedError(
                f"The output for example {row} is another one if it runs alone. So the examples of a batch affect each "
                "other: an early exit, a norm, a scale or a router sees all of them. Pass one example at a time."
            )


@dataclass(frozen=True)
class _Known:
    """What is known of a model on some distinct examples."""

    model: ModelGates  # with its attentions
    tokens: Tensor  # which sources are no padding, `(example, in)`
    end: int | None  # where padding begins that the model itself added; None: it added none


@dataclass(frozen=True)
class Call:
    """One call of the user's function on a batch of examples."""

    function: Callable[..., Any]
    inputs: Any  # the first argument, or a mapping of all arguments by their names
    further: tuple[Any, ...] | None  # the arguments after the first
    batch: int  # the number of examples
    named: dict[str, Any] = field(default_factory=dict)  # the keyword arguments of a call that has positional ones too

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Call:
        """The call `function(*args, **kwargs)`. A mapping is passed by keyword. A single example is repeated."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            kwargs = {**args[0], **kwargs}
            args = ()
        one = args[0] if args else None
        if isinstance(one, str) or (isinstance(one, Tensor) and one.dim() == 1 and len(one) != batch):
            shown = repr(one) if isinstance(one, str) else f"of shape {tuple(one.shape)}"
            raise ArgumentError(
                f"The input after the gates is {shown}: pass (batch, tokens) or a tokenizer's output. KernelShap and "
                "Lime take additional_forward_args=(inputs,), because they pass on the entries of anything else."
            )
        repeated: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(partial(_repeated, batch=batch), (args, kwargs))
        args, kwargs = repeated
        if not args and kwargs:
            return cls(function, kwargs, None, batch)
        return cls(function, args[0] if args else None, args[1:] or None, batch, kwargs)

    @property
    def given_named(self) -> Callable[..., Any]:
        """The function with `named`, its keyword arguments, if it also has positional ones."""
        return partial(self.function, **self.named) if self.named else self.function

    def bound(self) -> Callable[[], Any]:
        """A function without arguments that makes the call. ArgumentError: the inputs have a wrong form."""
        return bind_forward(self.given_named, self.inputs, self.further)

    def examples(self, rows: list[int]) -> Call:
        """The call for some examples of the batch."""
        if rows == [*range(self.batch)]:
            return self
        inputs, further = examples_of(self.inputs, self.further, rows, self.batch)
        return Call(self.function, inputs, further, len(rows), examples_of(self.named, None, rows, self.batch)[0])

    def distinct(self) -> tuple[bytes | None, list[int], list[int]]:
        """A key of the distinct examples; where in the batch each is first; and which of them each example equals.

        The key is None if the call holds an object whose content is unknown.
        """
        whole, each, known = blake2b(), [blake2b() for _ in range(self.batch)], True
        inputs = dict(self.inputs) if isinstance(self.inputs, Mapping) else self.inputs
        whole.update(f"{[*inputs] if isinstance(inputs, dict) else ''} {[*self.named]} ".encode())
        for leaf in tree_leaves((inputs, self.further, self.named)):
            if isinstance(leaf, Tensor):
                of_batch = bool(leaf.dim()) and len(leaf) == self.batch
                whole.update(f"{leaf.dtype} {tuple(leaf.shape[of_batch:])} {of_batch} ".encode())
                for state, row in zip(each if of_batch else [whole], leaf if of_batch else [leaf], strict=True):
                    state.update(_bytes(row))
            else:
                known = known and isinstance(leaf, (str, bool, int, float, type(None)))
                whole.update(f"{type(leaf)} {leaf!r} ".encode())
        keys = [state.digest() for state in each]
        first = {key: keys.index(key) for key in keys}
        order = {key: place for place, key in enumerate(first)}
        whole.update(b"".join(first))
        return whole.digest() if known else None, [*first.values()], [order[key] for key in keys]


def _are_ids(gates: Tensor, given: Any) -> bool:
    """Whether gates are the token ids `given`, or a multiple of them, as on the path of integrated gradients."""
    if not isinstance(given, Tensor) or given.is_floating_point() or given.shape != gates.shape:
        return False
    ids = given.to(gates)
    varied = bool((ids != ids[:, :1]).any()) and bool(gates.abs().max() > 1)
    return varied and is_reproduced(gates * ids.sum(1, True), ids * gates.sum(1, True))


def _repeated(value: Any, batch: int) -> Any:
    """A tensor of one example, once for each example of the batch."""
    one = isinstance(value, Tensor) and value.dim() and len(value) == 1
    return value.expand(batch, *value.shape[1:]) if one else value


def _bytes(x: Tensor) -> bytes:
    x = x.detach().contiguous().reshape(-1)
    return x.cpu().view(torch.uint8).numpy().tobytes() if x.numel() else b""
