"""Which tokens are wanted, by `token` or the first index of `target`, and which belong together, by `feature_mask`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from captum_vz._engine import AttentionSite, Readings, once_a_pass
from captum_vz.attr._call.output import Indices, Question, as_int, check_indices, parse_indices, tensor_of
from captum_vz.errors import ArgumentError
from captum_vz.functional import widen
from captum_vz.functional.groups import numbered

TOKEN_FORMS = (
    "an int (this position in every example), a list or 1-D tensor of ints (one position for each example), a tensor "
    "(batch, k) or a list of lists (k positions for each example), or a slice"
)


@dataclass(frozen=True)
class WantedTokens:
    """The rows of a map `(batch, out, in)` that `token` or `target` names."""

    # None: all rows. An int or a slice: the same rows of every example. A list: one row, or one list, for each example.
    rows: int | slice | list[int] | list[list[int]] | None = None
    target: Indices = None  # the index of the output from which `rows` were read. None: `rows` were passed as `token`
    name: str = "token"  # the argument that names the rows
    token: Any = None  # the argument `token` itself
    question: Question | None = None  # the explained numbers. None: the method explains tokens

    @classmethod
    def parse(cls, token: Any, target: Any) -> WantedTokens:
        """Read the rows from `token`, or from the first index of `target`."""
        if target is None:
            return cls(_parse_token(token), token=token)
        if token is not None:
            raise ArgumentError(
                f"Both token={token!r} and target={target!r} were passed, which both name output tokens. Pass one."
            )
        indices = parse_indices(target)
        each = indices if isinstance(indices, list) else [indices or ()]
        first = [one[0] for one in each if one and isinstance(one[0], int)]
        if len(first) != len(each):
            raise ArgumentError(
                f"target is {target!r}, whose first index is no output token. Pass several as token=: {TOKEN_FORMS}."
            )
        return cls(first if isinstance(indices, list) else first[0], indices, "target")

    def positions(self, batch: int, tokens: int, device: torch.device) -> Tensor | None:
        """The positions of the wanted rows, `(batch, row)`. None: all rows.

        A position from `target` that is out of range becomes 0. `check` refuses the position when the output is known.
        """
        if self.rows is None:
            return None
        if isinstance(self.rows, slice):
            chosen = torch.arange(tokens, device=device)[self.rows]
            if not len(chosen):
                raise ArgumentError(f"{self.name} is {self.rows!r}, which selects none of the {tokens} output tokens.")
            return chosen.expand(batch, -1)
        rows = torch.tensor(self.rows if isinstance(self.rows, list) else [self.rows] * batch)
        if len(rows) != batch:
            raise ArgumentError(
                f"{self.name} has {len(rows)} entries, but the batch has {batch} examples. Pass one for each."
            )
        outside = (rows < -tokens) | (rows >= tokens)
        if outside.any() and self.target is None:
            raise ArgumentError(
                f"{self.name} {int(rows[outside][0])} is out of range. Pass a position of the {tokens} output tokens, "
                f"from {-tokens} to {tokens - 1}."
            )
        return rows.masked_fill(outside, 0).reshape(batch, -1).to(device) % tokens

    def rows_of(self, maps: Tensor) -> Tensor:
        """The wanted rows `(batch, row, in)` of a map `(batch, out, in)`."""
        return gather_rows(maps, self.positions(maps.shape[0], maps.shape[-2], maps.device))

    def select(self, rows: Tensor) -> Tensor:
        """The wanted rows `(batch, row, in)` as returned: `(batch, in)` with one row for each example.

        Maps of heads have an axis of heads after the batch.
        """
        one = isinstance(self.rows, int) or (isinstance(self.rows, list) and isinstance(self.rows[0], int))
        return (rows[..., 0, :] if one else rows).contiguous()

    def check(self, output: Any, tokens: int, name: str) -> None:
        """Refuse a `target` that is out of range, and an output without an axis of `tokens`."""
        if self.target is None:
            return
        found = tensor_of(output)
        if found is None:
            raise ArgumentError(
                f"forward_func returned a {type(output).__name__} without logits or last_hidden_state, which target "
                "cannot index. Pass token=, or a forward_func that returns a tensor."
            )
        if found.ndim < 2 or found.shape[1] != tokens or (found.ndim == 2 and tokens == 1):
            raise ArgumentError(
                f"forward_func returned shape {tuple(found.shape)}, which has no axis of the layer's {tokens} output "
                f"tokens, and {name} explains tokens. Pass token=, or take ValueZeroingEffect for the class."
            )
        check_indices(tuple(found.shape), self.target, "target")

    def check_without_output(self, name: str) -> None:
        """Refuse a `target` that may name a class, in methods that do not run the model."""
        if self.target is None:
            return
        each = self.target if isinstance(self.target, list) else [self.target]
        if any(len(one) < 2 for one in each):
            raise ArgumentError(
                f"target is {self.target!r}, which may name a class, but {name} explains tokens. Pass token=."
            )


def gather_rows(maps: Tensor, positions: Tensor | None) -> Tensor:
    """The rows `(batch, row, in)` of a map `(batch, out, in)` at `positions (batch, row)`. None: all rows.

    Maps of heads have an axis of heads after the batch.
    """
    if positions is None:
        return maps
    places = positions[..., None].expand(-1, -1, maps.shape[-1])
    return maps.gather(-2, places if maps.dim() == 3 else places[:, None].expand(-1, maps.shape[1], -1, -1))


def _parse_token(token: Any) -> Any:
    if token is None or isinstance(token, slice):
        return token
    each = token.tolist() if isinstance(token, (Tensor, np.ndarray)) else token
    if as_int(each) is not None or isinstance(each, list):
        with suppress(ValueError, TypeError):  # lists of several lengths, or of anything else
            rows, parts = np.array(each), np.array(each, dtype=object)  # among integers, numpy reads True as 1
            if rows.dtype.kind in "iu" and rows.ndim <= 2 and rows.size and None not in map(as_int, parts.flat):
                return rows.tolist()
    raise ArgumentError(f"token is {token!r}, which names no output tokens: pass {TOKEN_FORMS}.")


PADDED_TARGET = "the target token of an example is padding, so its row is zero"


@dataclass(frozen=True)
class Wanted:
    """The rows and groups that a method computes in one layer."""

    site: AttentionSite  #: the attention that is explained
    rows: Tensor | None  #: the positions of the wanted output tokens, `(batch, row)`; None: all tokens
    groups: Tensor | None  #: the group of each source, `(batch, in)`, numbered from 0; None: each token is a group
    max_groups: int | None = None  #: how many groups are changed at a time (`perturbations_per_eval`); None: what fits
    end: int | None = None  #: where padding begins that the model appended to the inputs; None: it appended none
    leaf: Tensor | None = None  #: the leaf of the graph, in methods that need gradients; None: there is no graph
    question: Question | None = None  #: the explained numbers; None: the method explains tokens
    steps: Callable[[int], Any] | None = None  #: begins a progress bar of so many steps, within the layer; None: no bar

    def pool(self, scores: Tensor) -> Tensor:
        """Scores `(batch, out, in)` as `(batch, row, group)`: the wanted rows, sums of groups, 0 for padding.

        Scores of heads `(batch, head, out, in)` become `(batch, head, row, group)`.
        """
        if scores.dim() == 4:
            return torch.stack([self.pool(one) for one in scores.unbind(1)], 1)
        there = self.site.target_mask[:, :, None] & self.site.source_mask[:, None, :]
        return self.pool_sources(gather_rows(scores * there, self.rows))

    def pool_sources(self, scores: Tensor) -> Tensor:
        """Scores `(batch, row, in)` as `(batch, row, group)`: the sum over the sources of each group."""
        if self.groups is None:
            return scores
        pooled = scores.new_zeros(*scores.shape[:2], int(self.groups.max()) + 1)
        return pooled.scatter_add(2, self.groups[:, None, :].expand_as(scores), scores)

    def finish(self, scores: Tensor, normalize: bool, readings: Readings) -> Tensor:
        """The map `(batch, row, in)` of scores `(batch, row, group)`. `readings` warns of zero rows when it is read.

        Scores of heads `(batch, head, row, group)` give maps of heads. Rows that are zero in all heads are named.
        """
        scores = widen(scores) if normalize else scores
        total, by_head = scores.sum(-1, keepdim=True), scores.dim() == 4
        zero = total == 0
        self._note_zero_rows(total.sum(1) == 0 if by_head else zero, scores.dtype, readings)
        scores = scores / (total + zero) if normalize else scores  # as `normalize_rows` does
        return torch.stack([*map(self._spread, scores.unbind(1))], 1) if by_head else self._spread(scores)

    def _spread(self, scores: Tensor) -> Tensor:
        """Scores `(batch, row, group)` as a map of the call's sources, `(batch, row, in)`."""
        scores = scores.detach() if scores.requires_grad else scores
        if self.groups is not None:
            spread = scores.gather(2, self.groups[:, None, :].expand(-1, scores.shape[1], -1))
            scores = spread * self.site.source_mask[:, None, :]
        if self.end is not None:
            scores = scores[:, : self.end if self.rows is None else None, : self.end]
        dropped = self.site.dropped_sources
        return pad(scores, (dropped, 0)) if dropped else scores

    def _note_zero_rows(self, zero: Tensor, dtype: torch.dtype, readings: Readings) -> None:
        """Warn of wanted rows that are padding, and of tokens whose rows are zero."""
        # The record of the layer must not outlive the layer's run, so no function holds it.
        layer, (tokens, all_real) = self.site.layer, once_a_pass(_real_rows, self.site.target_mask, self.rows)
        if not all_real:
            if self.rows is not None:
                readings.add((zero[..., 0] & ~tokens).sum(), partial(_warn_of_padding, layer.warnings))
            zero = zero[..., 0] & tokens
        readings.add(zero.sum(), partial(_warn_of_zeros, layer.warnings, layer.index, layer.name, dtype))


def _real_rows(tokens: Tensor, rows: Tensor | None) -> tuple[Tensor, bool]:
    """Which wanted rows are no padding, and whether none of them is."""
    wanted = tokens if rows is None else tokens.gather(1, rows)
    return wanted, bool(wanted.all())


def _warn_of_padding(warnings: list[str], count: float) -> None:
    if count:
        warnings.append(PADDED_TARGET)


def _warn_of_zeros(warnings: list[str], index: int, name: str, dtype: torch.dtype, count: float) -> None:
    if count:
        advice = "" if dtype == torch.float64 else ". If their values are tiny, run the model in float64"
        warnings.append(f"{int(count)} rows of layer {index} ({name}) are zero: no source changes these tokens{advice}")


class FeatureGroups:
    """A feature_mask with groups numbered from 0. Each layer gets its part, on its device."""

    def __init__(self, feature_mask: Any) -> None:
        self.mask: Tensor | None = None
        self._known: dict[Any, Tensor] = {}  # by shape and device, one tensor for all layers
        if feature_mask is None:
            return
        mask = numbered(feature_mask)
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point() or mask.is_complex():
            shown = (
                f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"of type {type(mask).__name__}"
            )
            raise ArgumentError(
                f"feature_mask is {shown}: pass integers (1 or batch, source tokens), the same number for tokens that "
                "belong together."
            )
        self.mask = mask.unique(return_inverse=True)[1]

    def check(self, batch: int, sources: int) -> None:
        """Refuse a mask of another shape than `(1 or batch, sources)`."""
        shapes = dict.fromkeys(((1, sources), (batch, sources)))
        if self.mask is not None and self.mask.shape not in shapes:
            raise ArgumentError(
                f"feature_mask is {tuple(self.mask.shape)}, but there are {batch} example(s) of {sources} source "
                f"tokens: pass integers of shape {' or '.join(map(str, shapes))}."
            )

    def of(self, site: AttentionSite, end: int | None = None) -> Tensor | None:
        """The groups of the sources of one attention, `(batch, in)`. Sources after `end` form an extra group."""
        if self.mask is None:
            return None
        batch, _, _, every = site.shape
        dropped, device = site.dropped_sources, site.source_mask.device
        self.check(batch, dropped + (every if end is None else end))
        key = batch, every, dropped, end, device
        if key not in self._known:
            mask = self.mask.to(device)[:, dropped:]
            filled = pad(mask, (0, every - mask.shape[1]), value=int(mask.max()) + 1)
            self._known[key] = filled.expand(batch, every)
        return self._known[key]
