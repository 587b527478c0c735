"""The argument `target`: indices of the output of a model, in Captum's forms, and the numbers at them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from captum_vz._engine import not_finite
from captum_vz._private import tree_map
from captum_vz.errors import ArgumentError, RefusedError
from captum_vz.functional import widen

# One index of the output for each example, without the batch axis. Or one index for all examples.
Indices: TypeAlias = tuple[Any, ...] | list[tuple[Any, ...]] | None


@dataclass(frozen=True)
class Question:
    """The number of each example that is explained: `target`, minus `foil`."""

    target: Indices | Callable[[Any], Any]
    foil: Indices

    @classmethod
    def parse(cls, target: Any, foil: Any) -> Question:
        """Read an index in Captum's forms, or a function of the output, and the index of a foil."""
        if callable(target):
            if foil is not None:
                raise ArgumentError("target is a function, so foil has no meaning: subtract it in the function.")
            return cls(target, None)
        return cls(parse_indices(target), parse_indices(foil, "foil"))

    def read_each(self, output: Any, examples: Sequence[int], batch: int) -> Tensor:
        """The explained numbers of an output whose rows are these examples of the batch, `(len(examples),)`.

        A function as target is given one row at a time, so that no row affects another one. It may count the examples:
        the row stands in the place of each example of the batch.
        """
        if callable(self.target):
            each = enumerate(examples)
            return torch.stack([self.read(_only(output, row, len(examples), batch), batch)[one] for row, one in each])
        target = [self.target[k] for k in examples] if isinstance(self.target, list) else self.target
        foil = [self.foil[k] for k in examples] if isinstance(self.foil, list) else self.foil
        return Question(target, foil).read(output, len(examples))

    def read(self, output: Any, examples: int) -> Tensor:
        """The explained numbers of the examples of an output, `(examples,)`, with their graph."""
        if callable(self.target):
            numbers = self.target(output)
            name = "target gave"
        else:
            found = tensor_of(output)
            if found is None:
                raise ArgumentError(
                    f"forward_func gave a {type(output).__name__} without logits. Pass a target that takes it."
                )
            numbers = pick(found, self.target)
            name = f"forward_func gave {tuple(found.shape)}, and target {self.target!r} picks"
            if self.foil is not None:
                numbers = numbers - pick(found, self.foil, "foil")
        shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
        if not (isinstance(numbers, Tensor) and numbers.dim() and len(numbers) == numbers.numel() == examples):
            raise ArgumentError(
                f"{name} {shape} for {examples} examples. Pass a class, or (token, class), which picks one number for "
                "each example."
            )
        if not numbers.isfinite().all():
            raise RefusedError(f"{name} {not_finite(numbers.dtype)}")
        return widen(numbers.reshape(-1))


def _only(output: Any, row: int, rows: int, batch: int) -> Any:
    """An output with one of its rows in the place of each of `batch` examples."""

    def pick(leaf: Any) -> Any:
        of_rows = isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows
        return leaf[row : row + 1].expand(batch, *leaf.shape[1:]) if of_rows else leaf

    return tree_map(pick, output)


def tensor_of(output: Any) -> Tensor | None:
    """The tensor that `target` indexes: the output itself, its logits or its last hidden state."""
    candidates = (output, getattr(output, "logits", None), getattr(output, "last_hidden_state", None))
    return next((one for one in candidates if isinstance(one, Tensor)), None)


def parse_indices(target: Any, name: str = "target") -> Indices:
    """Read `target` in all of Captum's forms: None, int, tuple, tensor, list of ints, list of tuples."""
    if target is None:
        return None
    # A tuple of one tensor is what Captum's scripts pass as additional_forward_args.
    given = target[0] if isinstance(target, tuple) and len(target) == 1 else target
    if isinstance(given, (Tensor, np.ndarray)):
        each = torch.as_tensor(given)
        if not holds_integers(each) or (each.dim() > 1 and each.numel() > 1):
            raise ArgumentError(
                f"{name} is a tensor {tuple(each.shape)} of {each.dtype}: pass one integer, or a 1-D tensor with one "
                "integer for each example. Pass an attention mask as additional_forward_args=(mask,)."
            )
        return (int(each.item()),) if each.numel() == 1 else [(row,) for row in each.tolist()]
    one = _as_index(target)
    if one is not None:
        return one
    if isinstance(target, list) and target:
        several = [_as_index(entry) for entry in target]
        found = [entry for entry in several if entry is not None]
        if len(found) == len(target) and len({len(entry) for entry in found}) == 1:
            return found
    raise ArgumentError(
        f"{name} is {target!r}, which does not index an output: pass an int, a tuple of ints such as (token, entry), a "
        "list with one of these for each example, or a tensor of ints."
    )


def check_indices(shape: tuple[int, ...], indices: Indices, name: str) -> None:
    """Refuse indices that are out of range for an output of this shape, `(batch, ...)`."""
    if isinstance(indices, list) and len(indices) != shape[0]:
        raise ArgumentError(
            f"{name} has {len(indices)} entries, but the output {shape} has {shape[0]} examples. Pass an entry for "
            "each, or one index for all."
        )
    for index in indices if isinstance(indices, list) else [indices or ()]:
        if len(index) >= len(shape):
            raise ArgumentError(
                f"{name} is {index!r}, but the output {shape} has {len(shape) - 1} axes after the batch. Pass at most "
                "one index for each."
            )
        for axis, (entry, count) in enumerate(zip(index, shape[1:], strict=False), 1):
            if isinstance(entry, int) and not -count <= entry < count:
                raise ArgumentError(
                    f"{name} is {index!r}, which is out of range in axis {axis} of the output {shape}. Pass an index "
                    f"from {-count} to {count - 1}."
                )


def pick(output: Tensor, indices: Indices, name: str = "target") -> Tensor:
    """The entries of an output `(batch, ...)` at `indices`."""
    if indices is None:
        return output
    check_indices(tuple(output.shape), indices, name)
    if isinstance(indices, tuple):
        return output[(slice(None), *indices)]
    return torch.stack([output[(example, *index)] for example, index in enumerate(indices)])


def as_int(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int. None if the value is not an integer."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, Tensor) and not holds_integers(value)):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _as_index(entry: Any) -> tuple[Any, ...] | None:
    """The indices of one example."""
    one = as_int(entry)
    if one is not None:
        return (one,)
    if not isinstance(entry, tuple) or not entry:
        return None
    each = [as_part(part) for part in entry]
    return None if None in each else tuple(each)


def as_part(part: Any) -> int | slice | list[int] | None:
    """One entry of an index: an int, a slice or a list of ints. None if the entry is none of these."""
    if isinstance(part, slice):
        return part
    if isinstance(part, (Tensor, np.ndarray)) and part.ndim == 1:
        part = part.tolist()
    if isinstance(part, list):
        several = [one for one in map(as_int, part) if one is not None]
        return several if several and len(several) == len(part) else None
    return as_int(part)


def holds_integers(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
