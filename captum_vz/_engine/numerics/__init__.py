"""What a pass computes with: tensors and results that layers share, how much at a time, and attention itself.

Attention is computed as torch documents it. The weights of long texts are computed for wanted rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from captum_vz._private import tree_leaves, tree_map
from captum_vz.functional import widen

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


class Setting:
    """Gives a context variable a value inside a `with` block."""

    # No generator: an interrupted generator ends later, when another value may be set.
    def __init__(self, variable: ContextVar[Any], value: Any) -> None:
        self.variable, self.value = variable, value

    def __enter__(self) -> None:
        self.outer = self.variable.get()
        self.variable.set(self.value)

    def __exit__(self, *error: object) -> None:
        self.variable.set(self.outer)


forgetting = partial(Setting, results_of_pass, None)  # lets `once_a_pass` compute each time inside a `with` block
# Lets attention compute all weights of a long text at once inside a `with` block, because all are used.
_whole_weights: ContextVar[bool] = ContextVar("captum_vz_whole_weights", default=False)
keeping_weights = partial(Setting, _whole_weights)


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


def causal_mask(out: int, sources: int, device: torch.device) -> Tensor:
    """Return the mask that hides what follows a token, bool `(1, 1, out, in)`."""
    return torch.ones(1, 1, out, sources, dtype=torch.bool, device=device).tril()


@dataclass(frozen=True, eq=False)
class RowWeights:
    """The weights `(batch, head, out, in)` of a long text. Rows are computed when they are asked for."""

    query: Tensor  # (batch, head, out, d_head)
    key: Tensor  # (batch, key-value head, in, d_head)
    mask: Tensor | None  # what is added to the scores, or bool, broadcastable to the weights
    scale: float | None  # by what scores are multiplied. None: by the square root of `1 / d_head`
    causal: bool  # whether no token sees a later one

    @property
    def shape(self) -> torch.Size:
        """Batch, heads, rows and sources."""
        return torch.Size((*self.query.shape[:3], self.key.shape[2]))

    @property
    def dtype(self) -> torch.dtype:
        """That of the queries."""
        return self.query.dtype

    @cached_property
    def at_once(self) -> int:
        """How many rows of all examples fit in one chunk."""
        batch, heads, _, sources = self.shape
        like = self.query if self.query.element_size() >= 4 else self.query.new_empty(0, dtype=torch.float32)
        return budget_of(self.query.device).items_in_chunk(like, max(1, batch * heads * sources))

    @property
    def is_long(self) -> bool:
        """Whether the weights do not fit in one chunk. Gradients need all of them."""
        fits = self.mask is None or torch.broadcast_shapes(self.shape, self.mask.shape) == self.shape
        return fits and self.at_once < self.shape[2] and not (torch.is_grad_enabled() or _whole_weights.get())

    def kept(self) -> RowWeights:
        """The same, for a layer that writes over its queries or keys later."""
        return replace(self, query=self.query.clone(), key=self.key.clone())

    def parts(self) -> Iterator[Tensor]:
        """All weights, as many rows as fit in one chunk at a time, in at least float32."""
        for start in range(0, self.shape[2], self.at_once):
            yield self.of(slice(start, start + self.at_once))

    def of(self, rows: slice | Tensor, examples: slice = slice(None)) -> Tensor:
        """The weights of these rows, `(batch, head, row, in)`, in at least float32."""
        query, key = self.query[examples][:, :, rows], self.key[examples]
        mask, (out, sources) = self.mask, self.shape[2:]
        if self.causal:
            place = torch.arange(max(out, sources), device=self.query.device)
            mask = (place[:sources] <= place[:out][rows, None])[None, None]
        elif mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
            mask = mask[examples] if len(mask) > 1 else mask
            mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        return _softmax(query, key, None if mask is None else _finite_bias(mask, widen(query).dtype), self.scale)

    def at(self, batch: Tensor, out: Tensor) -> Tensor:
        """The weights at positions `(batch, out)`, `(n, head, in)`."""
        found = self.query.new_empty(len(batch), self.shape[1], self.shape[3])
        for example in batch.unique().tolist():
            for which in (batch == example).nonzero().flatten().split(self.at_once):
                found[which] = self.of(out[which], slice(example, example + 1))[0].transpose(0, 1).to(found)
        return found


Weights: TypeAlias = Tensor | RowWeights


def all_weights(weights: Weights) -> Tensor:
    """The weights as a tensor, `(batch, head, out, in)`."""
    return by_rows(weights, lambda part: part)


def by_rows(weights: Weights, change: Callable[[Tensor], Tensor]) -> Tensor:
    """What `change` makes of weights `(batch, head, out, in)`, `(batch, head, out, ...)`: of a long text by parts."""
    if isinstance(weights, Tensor):
        return change(weights)
    return torch.cat([change(part.to(weights.dtype)) for part in weights.parts()], dim=2)


def weights_at(weights: Weights, batch: Tensor, out: Tensor) -> Tensor:
    """The weights at positions `(batch, out)`, `(n, head, in)`."""
    return weights[batch, :, out] if isinstance(weights, Tensor) else weights.at(batch, out)


def weighted_values(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None, causal: bool, values: Tensor
) -> tuple[Tensor, Weights]:
    """The context `(batch, out, head, d_head)` and the weights `(batch, head, out, in)`, as torch documents them.

    As in torch's own kernels, a row that sees nothing is zero, and half precision is computed in float32. Without
    `mask`, a mask is made where `causal` is True.
    """
    heads, weights = query.shape[1], RowWeights(query, key, mask, scale, causal)
    if weights.is_long:
        shared = for_query_heads(values, heads)
        context = torch.cat([part @ shared.to(part) for part in weights.parts()], dim=2)
        return context.transpose(1, 2).to(values), weights
    if causal:
        mask = once_a_pass(causal_mask, query.shape[2], key.shape[2], query.device)
    bias = None if mask is None else once_a_pass(_finite_bias, mask, widen(query).dtype)
    whole = _softmax(query, key, bias, scale)
    context = whole @ for_query_heads(values.to(whole), heads)
    return context.transpose(1, 2).to(values), whole.to(query.dtype)


def context_of(weights: Tensor, values: Tensor) -> Tensor:
    """The product of weights and values, `(batch, out, head, d_head)`."""
    return (weights.to(values.dtype) @ for_query_heads(values, weights.shape[1])).transpose(1, 2)


def weights_by_unit_values(compute: Callable[[Tensor], tuple[Tensor, Weights]], values: Tensor, heads: int) -> Tensor:
    """Weights `(batch, head, out, in)` by contexts of values that are one at one source.

    One call shows as many sources as a value has entries.
    """
    sources, width = values.shape[-2:]
    columns = []
    for start in range(0, sources, width):
        units = torch.eye(sources, dtype=values.dtype, device=values.device)[:, start : start + width]
        context, _ = compute(functional.pad(units, (0, width - units.shape[1])).expand_as(values))
        columns.append(context.unflatten(2, (heads, -1)).flatten(3)[..., : units.shape[1]])
    return torch.cat(columns, dim=-1).transpose(1, 2)


def _softmax(query: Tensor, key: Tensor, bias: tuple[Tensor, Tensor | None] | None, scale: float | None) -> Tensor:
    """Weights in at least float32. For `bias` see `_finite_bias`."""
    query, key = widen(query), widen(for_query_heads(key, query.shape[1]))
    # In place, because these are the largest tensors of a long text.
    scores = (query @ key.transpose(-2, -1)).mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is None:
        return scores.softmax(-1)
    added, nothing = bias
    fits = torch.broadcast_shapes(scores.shape, added.shape) == scores.shape
    same = fits and torch.result_type(scores, added) == scores.dtype
    weights = (scores.add_(added) if same else scores + added).softmax(-1)
    return weights if nothing is None else weights.masked_fill(nothing, 0)


def _finite_bias(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """What a mask adds to the scores, and which rows see nothing. None: each row sees something."""
    bias = mask
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    nothing = (bias == -torch.inf).all(-1, keepdim=True)
    # Such a row is made finite: the softmax of nothing but -inf is NaN, and so is its gradient.
    return (bias.masked_fill(nothing, 0), nothing) if nothing.any() else (bias, None)
