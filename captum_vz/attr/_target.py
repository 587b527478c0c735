"""`target`: the output tokens whose rows are wanted, in every form that Captum takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenTarget:
    """The rows of a map `(batch, out, in)` that `target` names.

    Attributes:
        rows: None: all; an int or a slice: that row, or those, of every example; a list: one row an example, or, of a
            single example, several.
        rest: What `target` picks from each row: () the whole row; with a list of rows, one tuple an example.
    """

    rows: int | slice | list[int] | None
    rest: Any = ()

    @classmethod
    def parse(cls, target: Any) -> TokenTarget:
        """Understand None, int, tuple, list of int, list of tuples or an integer tensor, as Captum does."""
        if isinstance(target, Tensor):
            integers = not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
            assert integers and (target.numel() == 1 or target.dim() == 1), (
                f"target is a tensor {tuple(target.shape)} of {target.dtype}: pass one integer, or one an example. "
                "It names output tokens by their positions."
            )
            target = int(target.item()) if target.numel() == 1 else target.tolist()
        if target is None or _is_int(target):
            return cls(target)
        if isinstance(target, tuple) and len(target) in (1, 2) and (_is_int(target[0]) or isinstance(target[0], slice)):
            return cls(target[0], target[1:])
        if isinstance(target, list) and target and all(map(_is_int, target)):
            return cls(target, [()] * len(target))
        if (
            isinstance(target, list)
            and target
            and all(isinstance(t, tuple) and len(t) in (1, 2) and _is_int(t[0]) for t in target)
            and len({len(t) for t in target}) == 1
        ):
            return cls([t[0] for t in target], [t[1:] for t in target])
        raise AssertionError(
            f"target is {target!r}: it names output tokens, by an int, a tuple (out,) or (out, in), a list with one of "
            "these, all of one form, for each example, or a tensor of integers."
        )

    @property
    def names_source(self) -> bool:
        """Whether it picks from the rows."""
        return any(self.rest) if isinstance(self.rows, list) else self.rest != ()

    def places(self, batch: int, tokens: int, device: torch.device) -> Tensor | None:
        """The positions of the wanted rows, `(batch, row)`, or None for all."""
        if self.rows is None:
            return None
        if isinstance(self.rows, slice):
            return torch.arange(tokens, device=device)[self.rows].expand(batch, -1)
        rows = self.rows if isinstance(self.rows, list) else [self.rows] * batch
        assert len(rows) == batch or batch == 1, (
            f"target has {len(rows)} entries, one an example, but the batch has {batch}."
        )
        for row in rows:
            assert -tokens <= row < tokens, (
                f"target {row} is out of range: it names an output token, and the map has {tokens} of them, "
                f"positions {-tokens} to {tokens - 1}."
            )
        return torch.tensor(rows, device=device).reshape(batch, -1) % tokens

    def rows_of(self, maps: Tensor) -> Tensor:
        """The wanted rows `(batch, row, in)` of a map `(batch, out, in)`."""
        return rows_at(maps, self.places(maps.shape[0], maps.shape[1], maps.device))

    def select(self, rows: Tensor) -> Tensor:
        """What `target` asks for, of the wanted rows `(batch, row, in)`."""
        if isinstance(self.rows, list):
            if not any(self.rest):
                return (rows[:, 0] if len(self.rows) == len(rows) else rows).contiguous()
            flat = rows.flatten(0, 1)
            return torch.stack([_pick(row, rest) for row, rest in zip(flat, self.rest, strict=True)])
        return _pick(rows[:, 0] if isinstance(self.rows, int) else rows, self.rest).contiguous()


def rows_at(maps: Tensor, places: Tensor | None) -> Tensor:
    """The rows `(batch, row, in)` of a map `(batch, out, in)` at `places` `(batch, row)`; None: all of them."""
    return maps if places is None else maps.gather(1, places[..., None].expand(-1, -1, maps.shape[2]))


def _pick(rows: Tensor, rest: tuple[Any, ...]) -> Tensor:
    for source in rest:
        assert isinstance(source, slice) or (_is_int(source) and -rows.shape[-1] <= source < rows.shape[-1]), (
            f"target names source {source!r}, which is out of range: there are {rows.shape[-1]} source tokens."
        )
        rows = rows[..., source]
    return rows


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
