"""Operations on tensors, and on the nested arguments and outputs of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
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
        self._known: dict[Any, tuple[Any, list[Tensor]]] = {}
        self._last: dict[Any, int] = {}  # the number of the layer that asked last
        self._layer = 0

    def of(self, compute: Callable[..., T], given: tuple[Any, ...], tensors: list[Tensor]) -> T:
        """What `compute(*given)` returns, or returned."""
        key = compute, *((id(x), x._version) if isinstance(x, Tensor) else x for x in given)
        if key not in self._known:
            self._known[key] = compute(*given), tensors  # kept, so that no other tensor has their ids
        self._last[key] = self._layer
        result: T = self._known[key][0]
        return result

    def forget(self) -> None:
        """Drop all results. A layer with code of the user's may write into a shared mask without torch counting it."""
        self._known.clear()
        self._last.clear()

    def end_layer(self) -> None:
        """Called when a layer has returned."""
        self._layer += 1
        for key in [key for key, last in self._last.items() if last + KEPT_LAYERS < self._layer]:
            del self._known[key], self._last[key]


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


class forgetting:  # noqa: N801 - read as a function
    """Lets `once_a_pass` compute each time inside a `with` block."""

    def __enter__(self) -> None:
        self.outer = results_of_pass.get()
        results_of_pass.set(None)

    def __exit__(self, *error: object) -> None:
        results_of_pass.set(self.outer)


def first_tensor(output: Any) -> Tensor | None:
    """Return a module's output, or its first element if it is a tuple, a list or a mapping, at any depth.

    None if the result is not a tensor.
    """
    while isinstance(output, (tuple, list, Mapping)) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output if isinstance(output, Tensor) else None


def alike_tensors(output: Any) -> list[Tensor]:
    """Return a module's first output, and all others of its shape that hold other numbers."""
    first = first_tensor(output)
    if first is None:
        return []
    others = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x is not first and x.shape == first.shape]
    return [first, *(x for x in others if x.is_floating_point() and not x.equal(first))]


def map_each(change: Callable[[Any], Any], arguments: Any) -> Any:
    """Apply `change` to each leaf of a layer's arguments.

    An object that occurs twice (states passed as queries and as values) is changed once, so it stays one object.
    """
    changed: dict[int, Any] = {}

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
    """Repeat a tensor with one entry for each of the `batch` examples: all examples, `copies` times in a row.

    Any other value is returned unchanged.
    """
    if not isinstance(value, Tensor) or not value.dim() or len(value) != batch:
        return value
    return value.repeat(copies, *[1] * (value.dim() - 1))


def clone_tensor(value: Any) -> Any:
    """Return a clone of a tensor. Any other value is returned unchanged."""
    return value.clone() if isinstance(value, Tensor) else value


def first_numbers(output: Any) -> Tensor | None:
    """Return the first floating-point tensor of a nested output that is not a scalar, or None."""
    return next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim() and x.is_floating_point()), None)


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
    """Return noise in the shape of `x (..., features)`, the same vector for all positions.

    The noise is normally distributed, with a standard deviation of `strength` times the largest entry of `x`.
    """
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
    """Add normal noise to each position of `x (..., d)`, of `share` times the mean absolute value of the position.

    `share` is `eps**0.5` of the dtype if it is None. At a position of zeros, the mean over all positions is used.
    """
    size = x.abs().mean(-1, keepdim=True)
    share = torch.finfo(x.dtype).eps ** 0.5 if share is None else share
    return x + share * size.where(size > 0, size.mean()) * fixed_normal(x)


def replaced(x: Tensor, other: Tensor, chosen: Tensor) -> Tensor:
    """Replace `x (..., d)` by `other` at the positions where `chosen (...)` is True."""
    return torch.where(chosen.view(*chosen.shape, *[1] * (x.dim() - chosen.dim())), other, x)


def binary_digits(x: Tensor, tokens_first: bool = False) -> list[Tensor]:
    """Mark the positions of `x (batch, ..., d)` whose index has a 1 as each binary digit, bool `x.shape[:-1]`.

    Two positions differ in at least one digit.
    """
    places = x.shape[:1] if tokens_first or x.dim() == 2 else x.shape[1:-1]
    index = torch.arange(places.numel(), device=x.device).view(*places, *[1] * tokens_first).expand(x.shape[:-1])
    return [(index >> digit) % 2 == 1 for digit in range((places.numel() - 1).bit_length())]


def is_changed(found: Tensor, clean: Tensor) -> Tensor:
    """Return where two runs of the same code differ, to the last bit. NaN in both runs is no difference."""
    return (found != clean) & ~(found.isnan() & clean.isnan())
