"""The runs of layers in one call: which of them are related, and the clean pass before values are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import (
    LAYER_ERRORS,
    AttentionSite,
    LayerRecord,
    ModelReplay,
    ReturnedTensor,
    attention_site,
    check_no_dropout,
    first_tensor,
    given_states,
    is_half,
    random_states,
)
from captum_vz._private import modules_of
from captum_vz.attr._call import Attention, Heads, attentions_of_layers, select_heads, warn
from captum_vz.attr._call.arguments import Arguments, begins_with_padding, bind_forward, caches_of, end_of_inputs
from captum_vz.attr._call.further_calls import model_of, stack_of
from captum_vz.attr._call.target import FeatureGroups
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError


class Runs:
    """The runs of layers in one call of a forward function. All runs are related, or the user chooses related runs.

    The call is repeated if it is not clear which runs are related, or if the user chooses those of the input `run`.
    """

    output: Any = None  # what the pass returned, if scores depend on it; None: they do not
    _attention_module: nn.Module | None = None  # an explained layer that is named after attention
    _padded = 0  # how many examples begin with padding that may count as positions
    _last: ReturnedTensor | None = None  # what the layer that ran last returned
    _draws = False  # whether random numbers were drawn before the last layer returned

    def __init__(self, forward: Callable[[], Any], layers: Sequence[nn.Module], run: int | None) -> None:
        self._forward = forward
        self._layers = layers
        self._unclear: set[int] = set()
        self._led: set[int] = set()  # the layers that led to it
        self._random = random_states()
        self.warnings: list[str] = []  # about random numbers and padding, known after `checked`
        self.chosen = None if run is None else self._choose(run)  # the recorded runs of each layer; None: all

    def note(self, record: LayerRecord) -> None:
        """Note a run of a layer.

        The run is related to an earlier run if each layer in between was given the output of the layer before it.
        """
        if record.index == len(self._layers) - 1:  # to compare takes longer than most of what is done for a layer
            self._draws = self._draws or self._random != random_states()
        if record.name.lower().endswith(("attention", "attn")):
            self._attention_module = self._layers[record.index]
        output = first_tensor(record.output)
        led = self._led if self._last is not None and record.is_given(self._last) else set()
        if record.number and record.index not in led:
            self._unclear.add(record.index)
        self._led = {record.index} | led
        self._last = None if output is None else ReturnedTensor(output)

    def note_padding(self, site: AttentionSite) -> None:
        """Note examples that begin with padding."""
        self._padded = self._padded or begins_with_padding(site)

    @contextmanager
    def checked(self, whole_blocks: bool = False) -> Iterator[None]:
        """Refuse unrelated runs at the end of a `with` block, unless `run` chooses some. Warn of random numbers.

        With `whole_blocks`, also refuse attention modules inside of blocks.

        A failing `with` block is checked too, because arguments that fit one of several inputs do not fit the others.
        """
        try:
            yield
        except Exception:
            self._refuse_unrelated()
            raise
        finally:
            self._last = None
        self._refuse_unrelated()
        if self._draws or (self.output is not None and self._random != random_states()):
            self._note_random_numbers()
        if self._padded and (table := table_of_positions(self._model())):
            self.warnings.append(
                f"{self._padded} example(s) begin with padding, which the model counts as positions if {table} counts "
                "them from the first token: pad on the right; captum_vz.verify compares the two"
            )
        if whole_blocks and self._attention_module is not None:
            refuse_attention_module(self._model(), self._attention_module)

    def _model(self) -> nn.Module:
        """The outermost module that contains the first layer, or this layer."""
        with suppress(*LAYER_ERRORS):  # a function may run once only
            return model_of(None, self._forward, self._layers[0])
        return self._layers[0]

    def _note_random_numbers(self) -> None:
        """Refuse dropout in train mode, and warn of other random numbers."""
        model = self._model()
        check_no_dropout(model)
        trained = next((name or type(model).__name__ for name, one in model.named_modules() if one.training), None)
        self.warnings.append(
            "random numbers were drawn before the layers had run, so what is shown is that of this draw. "
            + (f"{trained} is in train mode: call model.eval(). " if trained else "")
            + "If they order or choose the tokens (ViTMAE's patches), rows and columns are in that order"
        )

    def _refuse_unrelated(self) -> None:
        if self.chosen is not None or not self._unclear:
            return
        clean = given_states(self._forward, self._layers, None)
        for index in sorted(self._unclear):
            count = len(clean[index])
            if len(next(self._chains(clean[index], index))) < count:
                raise RefusedError(
                    f"forward_func ran {self._name(index)} {count} times, on inputs that are not related (the texts "
                    "of a bi-encoder, the parts of a batch). Pass run=0 for the first of these, run=-1 for the last."
                )

    def _name(self, index: int) -> str:
        return f"layer {index} ({type(self._layers[index]).__name__})"

    def _choose(self, run: int) -> list[list[int]]:
        chains = [
            list(self._chains(clean, index))
            for index, clean in enumerate(given_states(self._forward, self._layers, None))
        ]
        counts = sorted({len(one) for one in chains})
        if len(counts) > 1 or not -counts[0] <= run < counts[0]:
            raise ArgumentError(
                f"run is {run}, but forward_func runs the layers on {' or '.join(map(str, counts))} input(s) that are "
                "not related. Pass an index below this number."
            )
        return [one[run] for one in chains]

    def _chains(self, clean: list[Tensor | None], index: int) -> Iterator[list[int]]:
        """The related runs of a layer with the inputs `clean`. Noise in a chain's first run changes its other runs."""
        rest = list(range(len(clean)))
        while rest:
            first, *later = rest
            found = given_states(self._forward, self._layers, (index, first))[index] if later else clean
            found = found + [None] * (len(clean) - len(found))  # the call may fail or end early on other numbers
            moved = [run for run, states in enumerate(clean) if _differ(states, found[run])]
            if moved and moved[0] <= first:
                raise RefusedError(
                    f"forward_func ran {self._name(index)} several times, and a second call gave it other numbers, so "
                    "it is unknown which runs are related. Pass a forward_func that computes the same in each call."
                )
            # A run on another number of tokens is a chain of its own, as when a model generates token by token.
            chain = [first, *(run for run in later if run in moved and _size(clean[run]) == _size(clean[first]))]
            yield chain
            rest = [run for run in rest if run not in chain]


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is not other
    return not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _size(states: Tensor | None) -> tuple[int, ...]:
    return () if states is None else tuple(states.shape)


def refuse_attention_module(model: nn.Module, layer: nn.Module) -> None:
    """Refuse an attention module of a block, because its output is not yet the output of its block."""
    block = next(one for one in stack_of(layer, model) if layer in modules_of(one))
    if block is not layer:
        raise UnsupportedLayerError(
            f"The layer {type(layer).__name__} is the attention module of a {type(block).__name__}, so its map differs "
            "from the map of the block. Pass the whole block, as captum_vz.find_layers(model) returns it."
        )


def table_of_positions(model: nn.Module) -> str | None:
    """The name of an embedding of positions that may count them from the first token. None: there is none."""
    for name, one in model.named_modules():
        named = isinstance(one, nn.Embedding) and ("pos" in name.lower() or name.endswith("wpe"))
        # With an index of padding, positions are counted from the ids. Others are counted from the mask.
        if named and one.padding_idx is None and "attention_mask" not in signature(one.forward).parameters:
            return name
    return None


HALF_PRECISION = "the model runs in half precision: effects are differences of rounded outputs. Load it in float32"


def run_clean(
    name: str,
    model: ModelReplay,
    forward_func: Callable[..., Any],
    arguments: Arguments,
    attention: Attention,
    heads: Heads | Sequence[Heads],
) -> tuple[Any, Tensor, int | None, list[torch.dtype]]:
    """Run `forward_func` once. `model` then knows where values are changed. `name` is used in errors and warnings.

    Returns what `forward_func` returned. The group of each source, `(batch, in)`, -1 for tokens that are padding in all
    layers. Where padding begins that the model itself added, or None. The dtypes that its numbers are rounded to.
    """
    if caches := caches_of(*arguments[:2]):
        raise ArgumentError(
            f"The inputs hold a key-value cache ({type(caches[0]).__name__}), whose examples cannot be repeated for "
            "copies of the inputs. Pass the whole sequence, without a cache."
        )
    layers, masks = model.layers, FeatureGroups(arguments.feature_mask)
    attentions = attentions_of_layers(attention, layers)
    notes: list[str] = []
    dtypes: list[torch.dtype] = []
    ends: list[int | None] = []

    def compute(record: LayerRecord) -> Tensor:
        runs.note(record)
        record.inputs = arguments[:2]
        site = attention_site(record, attentions[record.index])
        if site.windows is not None or site.is_reordered():
            raise UnsupportedLayerError(
                f"The attention of {record.name} sees the layer's tokens in windows, or in another order, where "
                f"{name} cannot zero values. Pass the part that projects values, such as values=layer.attn.to_v."
            )
        model.zero_in(site, select_heads(heads, record.index, len(layers), site.shape.heads))
        runs.note_padding(site)
        ends.append(end_of_inputs(site, arguments.inputs))
        half = is_half(record)
        notes.extend([*record.warnings, *([HALF_PRECISION] if half else [])])
        dtypes.append(torch.bfloat16 if half else record.first_output.dtype)
        each = torch.arange(site.shape.sources, device=site.source_mask.device).expand_as(site.source_mask)
        return (each if (groups := masks.of(site, ends[-1])) is None else groups).where(site.source_mask, -1)

    forward = bind_forward(forward_func, *arguments[:2])
    runs = Runs(forward, layers, arguments.run)
    with runs.checked():
        output, groups = model.run_clean(forward, compute, runs.chosen)
        runs.output = output
    notes.extend(runs.warnings)
    if notes:
        warn(f"{name}: {'; '.join(dict.fromkeys(notes))}.")
    shapes = {tuple(one.shape) for _, one in groups}
    if len(shapes) != 1:
        raise ArgumentError(f"The layers' attentions have different sources: {sorted(shapes)}. Pass one stack.")
    members = torch.stack([one.to(groups[0][1].device) for _, one in groups]).amax(0)
    return output, members, ends[0], dtypes
