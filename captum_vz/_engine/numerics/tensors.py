"""Operations on tensors and nested arguments, what a pass computes once, and how much is computed at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from captum_vz._private import tree_leaves, tree_map

T = TypeVar("T")
# A result that no layer asks for is kept for this many more layers, because two kinds of layers may alternate.
KEPT_LAYERS = 2


class ResultsOfPass:
    """What `once_a_pass` computed in a pass. What the next layers do not use is dropped: each may have its own mask."""

    def __init__(self) -> None:
        # Each result with the number of the layer that asked last, and the tensors, so that no other has their ids.
        self._known: dict[Any, tuple[Any, int, list[Tensor]]] = {}
        self._layer = 0
        self.of_kinds: dict[Any, Any] = {}  # what is found once for all layers of a kind, by kind

    def of(self, compute: Callable[..., T], given: tuple[Any, ...], tensors: list[Tensor]) -> T:
        """What `compute(*given)` returns, or returned."""
        key = compute, *[(id(x), x._version) if isinstance(x, Tensor) else x for x in given]
        result: T = self._known[key][0] if key in self._known else compute(*given)
        self._known[key] = result, self._layer, tensors
        return result

    def forget(self) -> None:
        """Drop all results. A layer with code of the user's may write into a shared mask without torch counting it."""
        self._known.clear()

    def end_layer(self) -> None:
        """Called when a layer has returned."""
        self._layer += 1
        for key in [key for key, (_, last, _) in self._known.items() if last + KEPT_LAYERS < self._layer]:
            del self._known[key]


# None: no pass runs, or a layer is run again.
results_of_pass: ContextVar[ResultsOfPass | None] = ContextVar("captum_vz_results", default=None)


def once_a_pass(compute: Callable[..., T], *given: Any) -> T:
    """Return `compute(*given)`, or what it returned earlier in this pass.

    For what depends on masks and sizes alone, which the layers of a model share. Tensors are the same if they are one
    object into which nothing was written. The result must not be written into.
    """
    results = results_of_pass.get()
    tensors = [x for x in given if isinstance(x, Tensor)]
    if results is None or any(x.is_inference() for x in tensors):  # without a version counter, writes are not seen
        return compute(*given)
    return results.of(compute, given, tensors)


def version(x: Tensor) -> int | None:
    """Return how often a tensor was written to, or None for inference tensors, which have no version counter."""
    return None if x.is_inference() else x._version


class VersionedTensor:
    """A tensor of the clean pass. The layer's own code may write into it later."""

    def __init__(self, value: Tensor) -> None:
        # Inference tensors have no version counter, so they are cloned.
        self.value = value.clone() if value.is_inference() else value
        self._version = version(self.value)

    def is_unmodified(self) -> bool:
        """Whether nothing was written into the tensor since."""
        return version(self.value) == self._version

    def is_seen_in(self, found: Tensor) -> bool:
        """Whether `found` is a view of the tensor with the same numbers in the same order. No number is read."""
        value = self.value
        same_place = found.numel() == value.numel() and found.dtype == value.dtype and found.device == value.device
        in_order = found is value or (found.is_contiguous() and value.is_contiguous())
        return same_place and in_order and found.data_ptr() == value.data_ptr() and self.is_unmodified()


class ReturnedTensor(VersionedTensor):
    """The output of a layer, and a copy of it, because models may write into their tensors later."""

    def __init__(self, value: Tensor) -> None:
        super().__init__(value)
        self.copy = self.value if value.is_inference() else value.clone()


class setting:  # noqa: N801 - read as a function
    """Gives a context variable a value inside a `with` block."""

    # No generator: an interrupted generator ends later, when another value may be set.
    def __init__(self, variable: ContextVar[Any], value: Any) -> None:
        self.variable, self.value = variable, value

    def __enter__(self) -> None:
        self.outer = self.variable.get()
        self.variable.set(self.value)

    def __exit__(self, *error: object) -> None:
        self.variable.set(self.outer)


# Lets `once_a_pass` compute each time inside a `with` block.
forgetting = partial(setting, results_of_pass, None)


def first_tensor(output: Any) -> Tensor | None:
    """Return a module's output, or the first element of tuples, lists and mappings at any depth, if it is a tensor."""
    while isinstance(output, (tuple, list, Mapping)) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output if isinstance(output, Tensor) else None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or outputs, in their order."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments of a layer that may be hidden states: its own first, then those of other layers."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    return [x for x in given if x.is_floating_point() and x.dim() > 2]


def map_each(change: Callable[[Any], Any], arguments: Any) -> Any:
    """Apply `change` to each leaf of a layer's arguments."""
    changed: dict[int, Any] = {}  # so that states passed as queries and as values stay one object

    def once(value: Any) -> Any:
        if id(value) not in changed:
            changed[id(value)] = change(value)
        return changed[id(value)]

    return tree_map(once, arguments)


def gather_rows(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return `x[first, second]` for indices that are not negative, in a fraction of the time of plain indexing."""
    row = first * x.shape[1] + second
    return x.flatten(0, 1).index_select(0, row.flatten()).unflatten(0, row.shape)


def for_query_heads(shared: Tensor, heads: int, dim: int = 1) -> Tensor:
    """Repeat key-value heads along `dim`, because several of the `heads` query heads may share one."""
    if heads == shared.shape[dim]:
        return shared
    return shared.index_select(dim, once_a_pass(_heads_shared, heads, shared.shape[dim], shared.device))


def _heads_shared(heads: int, shared: int, device: torch.device) -> Tensor:
    return torch.arange(heads, device=device) // (heads // shared)


def mask_as_bool(mask: Tensor) -> Tensor:
    """Return an attention mask as booleans, True where a source is visible.

    Integer masks hold 1 for a visible source. Floating-point masks are added to the scores: models hide a source with
    a number between -10000 and the smallest number of the dtype. Position biases stay far above these numbers.
    """
    return mask > -9e3 if mask.is_floating_point() else mask.bool()


def repeat_examples(value: Any, copies: int, batch: int) -> Any:
    """Repeat the `batch` examples of a tensor, `copies` times in a row. Any other value is returned unchanged."""
    if not isinstance(value, Tensor) or not value.dim() or len(value) != batch:
        return value
    return value.repeat(copies, *[1] * (value.dim() - 1))


def clone_tensor(value: Any) -> Any:
    """Return a clone of a tensor. Any other value is returned unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def first_numbers(output: Any) -> Tensor | None:
    """Return the first floating-point tensor of a nested output that is not a scalar, or None."""
    return next((x for x in tensors_in(output) if x.dim() and x.is_floating_point()), None)


def inference_mode(on: bool) -> AbstractContextManager[Any]:
    """Switch inference mode on or off in a `with` block. It is not entered where it changes nothing."""
    # After an interruption torch may leave it late, and then it also sets whether gradients are computed.
    return nullcontext() if torch.is_inference_mode_enabled() == on else torch.inference_mode(on)


# Strengths of the crowd's noise, relative to the values that it replaces. An expert that is not chosen at one strength
# is chosen at its opposite. NaN marks every value that depends on the crowd.
PROBE_STRENGTHS = (64.0, -64.0, torch.nan)
# Strengths of the rows under test: in this order before the crowd, in the reverse order after it.
SMALL_STRENGTHS = (0.0, 1.0, -1.0, 8.0, -8.0)


def with_noise(x: Tensor, strengths: Tensor) -> Tensor:
    """Replace row i of `x (n, ..., features)` by noise of relative strength `strengths[i]`; 0 leaves it unchanged."""
    strengths = strengths.to(x).view(-1, *[1] * (x.dim() - 1))
    return torch.where(strengths == 0, x, noise_like(x, 1.0) * strengths)


def noise_like(x: Tensor, strength: float) -> Tensor:
    """Return normal noise of `strength` times the largest entry of `x (..., d)`, one vector for all positions."""
    return strength * max_abs(x) * fixed_normal(x.new_empty(x.shape[-1:])).expand_as(x)


def max_abs(x: Tensor) -> Tensor:
    """Return the largest absolute value among the finite entries of a tensor, or 1 if all of them are zero."""
    size = x.nan_to_num(0, 0, 0).abs().amax()
    return size.where(size > 0, 1)


def fixed_normal(x: Tensor) -> Tensor:
    """Return standard normal numbers in the shape of `x`, the same in each call and on each device."""
    generator = torch.Generator("cpu").manual_seed(0)  # the user's generator must not advance
    return torch.randn(x.shape, generator=generator, device="cpu").to(x)


def nudged(x: Tensor, share: float | None = None) -> Tensor:
    """Add normal noise to each position of `x (..., d)`, of `share` or `eps**0.5` times its mean absolute value."""
    size = x.abs().mean(-1, keepdim=True)  # at a position of zeros, the mean over all positions is used
    share = torch.finfo(x.dtype).eps ** 0.5 if share is None else share
    return x + share * size.where(size > 0, size.mean()) * fixed_normal(x)


def replaced(x: Tensor, other: Tensor, chosen: Tensor) -> Tensor:
    """Replace `x (..., d)` by `other` at the positions where `chosen (...)` is True."""
    return torch.where(chosen.view(*chosen.shape, *[1] * (x.dim() - chosen.dim())), other, x)


def binary_digits(x: Tensor, tokens_first: bool = False) -> list[Tensor]:
    """Mark the positions of `x (batch, ..., d)` whose index has a 1 as each binary digit, bool `x.shape[:-1]`."""
    places = x.shape[:1] if tokens_first or x.dim() == 2 else x.shape[1:-1]
    index = torch.arange(places.numel(), device=x.device).view(*places, *[1] * tokens_first).expand(x.shape[:-1])
    return [(index >> digit) % 2 == 1 for digit in range((places.numel() - 1).bit_length())]


def is_changed(found: Tensor, clean: Tensor) -> Tensor:
    """Return where two runs of the same code differ, to the last bit. NaN in both runs is no difference."""
    return (found != clean) & ~(found.isnan() & clean.isnan())


@dataclass(frozen=True)
class Budget:
    """The constants of one type of device."""

    # Bytes of the widest activation of one chunk. On a CPU a chunk should stay in the cache, but each costs as much as
    # thirty rows more, in calls whose time does not grow with the rows.
    chunk_bytes: int
    # Bytes of the largest output of any module on all copies of a model's inputs together. On a CPU, twice as many were
    # slower for large batches, and half as many split one sentence for a large vocabulary.
    copies_bytes: int
    # How many neighbouring groups of sources share their targets, so that one product serves them all. A CPU computes
    # no pair whose weight is zero. Elsewhere a few such pairs cost less than a call for each group.
    neighbours: int
    # What the some hundreds of calls of the folded replay cost besides its products, in operations that the device
    # could do meanwhile, for each first matrix of the feed-forward.
    folding_calls: float

    def items_in_chunk(self, like: Tensor, numbers: int) -> int:
        """How many items of `numbers` numbers fit in one chunk, at least one. `like` gives the dtype."""
        return max(1, self.chunk_bytes // (numbers * like.element_size()))


SHORT_OF_MEMORY = "memory was too short for a usual chunk, so smaller chunks were computed"
# How torch words its errors where it has no class for them: on a CPU, in cuBLAS, and on other devices.
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")

# By device type. The CPU's constants are measured. Those of other devices are estimates by operation counts.
BUDGETS = {"cpu": Budget(chunk_bytes=12 << 20, copies_bytes=128 << 20, neighbours=1, folding_calls=4.6e8)}
OTHER_DEVICES = Budget(chunk_bytes=256 << 20, copies_bytes=1 << 30, neighbours=16, folding_calls=2e11)


def budget_of(device: torch.device) -> Budget:
    """The budget of a device."""
    return BUDGETS.get(device.type, OTHER_DEVICES)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short. It says nothing of the layer that was run."""
    worded = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    return worded or isinstance(error, (torch.OutOfMemoryError, MemoryError))
