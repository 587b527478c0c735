"""The runs of layers in one call: which of them are related, and the clean pass before values are changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_vz._engine import (
    LAYER_ERRORS,
    LayerPass,
    LayerRecord,
    ModelReplay,
    ReturnedTensor,
    attention_site,
    check_no_dropout,
    find_layers,
    first_module_holding,
    first_tensor,
    given_states,
    is_half,
    random_states,
)
from captum_vz.attr._base import warn
from captum_vz.attr._call.arguments import Inputs, begins_with_padding, bind_forward, check_no_cache, end_of_inputs
from captum_vz.attr._call.further_calls import LeftPadding, model_of
from captum_vz.attr._call.layers import Attention, Heads, attentions_of_layers, select_heads
from captum_vz.attr._call.target import FeatureGroups
from captum_vz.errors import ArgumentError, RefusedError, UnsupportedLayerError


class Runs:
    """The runs of layers in one call of a forward function. All runs are related, or the user chooses related runs.

    Args:
        forward: The user's call. It is repeated if it is not clear which runs are related, or if a run is chosen.
        layers: The layers.
        run: Which of the unrelated inputs is explained, negative from the last. None: there is only one.

    Attributes:
        chosen: The numbers of the runs of each layer that are recorded. None: all.
        output: What the pass returned, if scores depend on it. None: they do not.
        warnings: The warnings about random numbers, known after :meth:`checked`.
    """

    output: Any = None

    def __init__(self, forward: Callable[[], Any], layers: Sequence[nn.Module], run: int | None) -> None:
        self._forward = forward
        self._layers = layers
        self._names = [f"layer {index} ({type(layer).__name__})" for index, layer in enumerate(layers)]
        self._states = partial(given_states, forward, layers)
        self._unclear: set[int] = set()
        self._attention_modules: dict[int, nn.Module] = {}
        self._last = _Last()
        self._random = random_states()
        self._draws = False  # whether random numbers were drawn before the last layer returned
        self.warnings: list[str] = []
        self.chosen = None if run is None else self._choose(run)

    def note(self, record: LayerRecord) -> None:
        """Note a run of a layer.

        The run is related to an earlier run if each layer in between was given the output of the layer before it.
        """
        if record.index == len(self._layers) - 1:  # to compare takes longer than most of what is done for a layer
            self._draws = self._draws or self._random != random_states()
        if is_attention_module(record):
            self._attention_modules[record.index] = self._layers[record.index]
        last, output = self._last, first_tensor(record.output)
        led = last.led if last.output is not None and record.is_given(last.output) else set()
        if record.number and record.index not in led:
            self._unclear.add(record.index)
        last.led = {record.index} | led
        last.output = None if output is None else ReturnedTensor(output)

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
            self._last = _Last()  # which holds a layer's output
        self._refuse_unrelated()
        if self._draws or (self.output is not None and self._random != random_states()):
            self._note_random_numbers()
        if whole_blocks and self._attention_modules:
            refuse_attention_modules(self._forward, list(self._attention_modules.values()))

    def _note_random_numbers(self) -> None:
        """Refuse dropout in train mode, and warn of other random numbers."""
        model = self._layers[0]
        with suppress(*LAYER_ERRORS):  # a function may run once only
            model = model_of(None, self._forward, model)
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
        clean = self._states(None)
        for index in sorted(self._unclear):
            count = len(clean[index])
            if len(next(self._chains(clean[index], index))) < count:
                raise RefusedError(
                    f"forward_func ran {self._names[index]} {count} times, on inputs that are not related (the texts "
                    "of a bi-encoder, the parts of a batch). Pass run=0 for the first of these inputs, run=-1 for the "
                    "last, or a forward_func that runs the layer once."
                )

    def _choose(self, run: int) -> list[list[int]]:
        chains = [list(self._chains(clean, index)) for index, clean in enumerate(self._states(None))]
        counts = sorted({len(one) for one in chains})
        if len(counts) > 1 or not -counts[0] <= run < counts[0]:
            raise ArgumentError(
                f"run is {run}, but forward_func runs the layers on {' or '.join(map(str, counts))} input(s) that are "
                "not related. Pass an index below this number, and layers that run equally often."
            )
        return [one[run] for one in chains]

    def _chains(self, clean: list[Tensor | None], index: int) -> Iterator[list[int]]:
        """The related runs of a layer with the inputs `clean`. Noise in a chain's first run changes its other runs."""
        rest = list(range(len(clean)))
        while rest:
            first, *later = rest
            found = self._states((index, first))[index] if later else clean
            found = found + [None] * (len(clean) - len(found))  # the call may fail or end early on other numbers
            moved = [run for run, states in enumerate(clean) if _differ(states, found[run])]
            if moved and moved[0] <= first:
                raise RefusedError(
                    f"forward_func ran {self._names[index]} several times, and a second call gave it other numbers. "
                    "So it is unknown which runs are related. Pass a forward_func that computes the same in "
                    "each call, or that runs the layer once."
                )
            # A run on another number of tokens is a chain of its own, as when a model generates token by token.
            chain = [first, *(run for run in later if run in moved and _size(clean[run]) == _size(clean[first]))]
            yield chain
            rest = [run for run in rest if run not in chain]


class _Last(threading.local):
    """The output of the layer that ran last in a thread, and the layers that led to it. Replicas run in threads."""

    def __init__(self) -> None:
        self.output: ReturnedTensor | None = None
        self.led: set[int] = set()


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is not other
    return not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _size(states: Tensor | None) -> tuple[int, ...]:
    return () if states is None else tuple(states.shape)


def is_attention_module(record: LayerRecord) -> bool:
    """Whether a layer calls the attention function itself, or is named after attention."""
    named = record.name.lower().endswith(("attention", "attn"))
    return named or any(one.module is record.layer for one in record.attentions)


def refuse_attention_modules(forward: Callable[[], Any], layers: Sequence[nn.Module]) -> None:
    """Refuse attention modules of a block that can be explained. `forward` is called twice.

    Blocks with three attentions (SAM) cannot be explained, so their attention modules are accepted as layers.

    Raises:
        UnsupportedLayerError: The output of a layer is not yet the output of its block.
    """
    roots: list[nn.Module] = []
    with torch.no_grad(), first_module_holding(layers, roots.append):
        forward()

    @cache  # most layers are in one stack
    def blocks_of(path: str, stack: str | None) -> list[nn.Module]:
        with suppress(RefusedError):
            return find_layers(roots[0].get_submodule(path), stack)
        return []

    for layer in layers:
        block = _block_of(roots[0], layer, blocks_of) if roots else None
        if block is not None and _is_explained(forward, block):
            raise UnsupportedLayerError(
                f"The layer {type(layer).__name__} is the attention module of a {type(block).__name__}. Its output "
                "lacks the feed-forward module and often the residual connection, so its map differs from the map of "
                "the block. Pass the whole block, as captum_vz.find_layers(model) returns it."
            )


def _block_of(root: nn.Module, layer: nn.Module, blocks_of: Callable[..., list[nn.Module]]) -> nn.Module | None:
    """The block of a stack in `root` that contains `layer` as a part, or None."""
    path = next((name for name, module in root.named_modules() if module is layer), "").split(".")
    for depth in range(len(path)):
        for stack in (None, "encoder", "decoder"):
            blocks = blocks_of(".".join(path[:depth]), stack)
            if any(block is layer for block in blocks):
                return None
            for block in blocks:
                if any(part is layer for part in block.modules()):
                    return block
    return None


def _is_explained(forward: Callable[[], Any], block: nn.Module) -> bool:
    def find(record: LayerRecord) -> Tensor:
        attention_site(record, "self", streams=True)
        return torch.empty(0)

    with suppress(RefusedError):
        LayerPass([block], find).run(forward)
        return True
    return False


HALF_PRECISION = "the model runs in half precision: effects are differences of rounded outputs. Load it in float32"


class CleanPass(NamedTuple):
    """What a clean pass shows.

    Attributes:
        output: What `forward_func` returned.
        members: The group of each source, `(batch, in)`. -1 for tokens that are padding in all layers.
        end: Where padding begins that the model itself added. None: it added none.
        dtypes: The dtypes that numbers of the model are rounded to.
        tokens_first: Whether the tensors of the first layer are `(tokens, batch, d)`.
    """

    output: Any
    members: Tensor
    end: int | None
    dtypes: list[torch.dtype]
    tokens_first: bool


def run_clean(
    name: str,
    model: ModelReplay,
    forward_func: Callable[..., Any],
    inputs: Inputs,
    further: Any,
    *,
    masks: FeatureGroups,
    attention: Attention,
    heads: Heads | Sequence[Heads],
    run: int | None,
) -> CleanPass:
    """Run `forward_func` once. `model` then knows where values are changed. `name` is used in errors and warnings.

    Raises:
        RefusedError: See :class:`~captum_vz.ValueZeroingEffect`.
    """
    check_no_cache(inputs, further)
    layers = model.layers
    attentions = attentions_of_layers(attention, layers)
    notes: list[str] = []
    dtypes: list[torch.dtype] = []
    ends: list[int | None] = []
    orders: list[bool] = []

    def compute(record: LayerRecord) -> Tensor:
        runs.note(record)
        record.inputs = inputs, further
        site = attention_site(record, attentions[record.index])
        if site.windows is not None or site.is_reordered():
            raise UnsupportedLayerError(
                f"The attention of {record.name} sees the layer's tokens in windows, or in another order, where "
                f"{name} cannot zero values. Use ValueZeroing for the maps of such layers. If a part of the layer "
                "projects its tokens in their order, name this part, such as values=layer.attn.to_v."
            )
        model.zero_in(site, select_heads(heads, record.index, len(layers), site.shape.heads))
        if not padding and begins_with_padding(site):
            padding.append(LeftPadding(site))
        ends.append(end_of_inputs(site, inputs))
        orders.append(site.attention.tokens_first)
        half = is_half(record)
        notes.extend([*record.warnings, *([HALF_PRECISION] if half else [])])
        dtypes.append(torch.bfloat16 if half else record.first_output.dtype)
        each = torch.arange(site.shape.sources, device=site.source_mask.device).expand_as(site.source_mask)
        return (each if (groups := masks.of(site, ends[-1])) is None else groups).where(site.source_mask, -1)

    forward = bind_forward(forward_func, inputs, further)
    runs, padding = Runs(forward, layers, run), list[LeftPadding]()
    with runs.checked():
        output, groups = model.run_clean(forward, compute, runs.chosen)
        runs.output = output
    notes.extend(runs.warnings)
    notes.extend(said for one in padding for said in one.warnings(forward_func, inputs, further))
    if notes:
        warn(f"{name}: {'; '.join(dict.fromkeys(notes))}.")
    return CleanPass(output, _members([one for _, one in groups]), ends[0], dtypes, orders[0])


def _members(groups: list[Tensor]) -> Tensor:
    shapes = {tuple(one.shape) for one in groups}
    if len(shapes) != 1:
        raise ArgumentError(
            f"The layers' attentions have different examples and sources: {sorted(shapes)}. Values can be zeroed "
            "together only where their tokens are the same: pass layers of one stack."
        )
    return torch.stack([one.to(groups[0].device) for one in groups]).amax(0)
