"""Scores of the tokens of several inputs, such as a text and an image, with one tensor for each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from captum_vz._engine import AttentionHandler, is_out_of_memory, layer_hooks, repeated
from captum_vz._private import tree_leaves
from captum_vz.attr._base.runs import Runs
from captum_vz.attr._call.arguments import MODEL_ERRORS, Inputs, bind_forward
from captum_vz.attr._call.further_calls import model_of, stack_of
from captum_vz.errors import ArgumentError

REMEDY = "Pass the inputs as a mapping, which returns one tensor for all tokens"


def by_input(
    scores: Sequence[Tensor],
    forward_func: Callable[..., Any],
    inputs: Inputs,
    further: Any,
    sources: Sequence[tuple[nn.Module, int | None]],
    *,
    tokens_first: bool = False,
    run: int | None = None,
    named: bool = False,
) -> list[Any]:
    r"""Scores in the form of Captum's input methods: a tuple with one tensor for each input, if `inputs` is a tuple.

    .. math:: \text{scores}_k = (s_j)_{j \in S_k}, \qquad S_k = \{j : k = \min\{k' : x_{k'} \text{ changes token } j\}\}

    Noise in one input at a time shows which tokens come from this input. The tokens are those that the first layer of
    the stack is given, before attention mixes them. A token that no input changes, such as `[CLS]` before the patches
    of an image, belongs to the input of the next token. Masks own a token only if nothing else changes it. Together,
    the tensors have all scores once.

    Args:
        scores: Results `(batch, ..., in)` of the same sources.
        forward_func: The user's function.
        inputs: The inputs of `attribute`.
        further: The further arguments of `attribute`.
        sources: (a layer of the stack that has the sources, None). Or (a layer, the number of its sources), if these
            are the sources of cross-attention. Several such pairs, if sources of several stacks follow each other.
        tokens_first: Whether the layer's tensors are `(tokens, batch, d)`.
        run: The argument `run` of `attribute`.
        named: Whether the user named the attention, so that its sources may be the layer's own tokens or others.

    Returns:
        The scores as they are, unless `inputs` is a tuple. Otherwise, each is a tuple. An input with the axis of all
        tokens (ids, a mask) has an entry for each of these, and 0 for tokens of others. Any other input has an entry
        for each of its own tokens, in the order of the layer. Shorter examples end with 0.

    Raises:
        ArgumentError: It is unknown which tokens come from which input. Two inputs hold the same ids. An input changes
            the tokens of a later one besides its own. The model fails with noise in an input.
    """
    if not isinstance(inputs, tuple):
        return list(scores)
    if len(inputs) == 1:
        return [(one,) for one in scores]
    batch, count = len(scores[0]), scores[0].shape[-1]
    axis = 1 if tokens_first else 0
    given = [_Given(forward_func, inputs, further, layer, axis, cross, run, named) for layer, cross in sources]
    owners = torch.cat([one.owners(batch) for one in given], 1)
    if owners.shape[1] > count:
        owners = owners[:, :count]  # padding that the model appends
    elif owners.shape[1] < count:  # a prefix, which belongs to what follows
        owners = torch.cat([owners[:, :1].expand(-1, count - owners.shape[1]), owners], 1)
    return [tuple(_share(one, owners == k, x) for k, x in enumerate(inputs)) for one in scores]


def _share(scores: Tensor, own: Tensor, x: Tensor) -> Tensor:
    """The scores of one input's tokens, which are `own (batch, in)`."""
    own = own.to(scores.device)
    kept = scores * own.reshape(len(own), *[1] * (scores.dim() - 2), -1)
    if x.dim() == (3 if x.is_floating_point() else 2) and x.shape[1] == own.shape[1]:
        return kept
    order = own.int().argsort(dim=1, descending=True, stable=True)[:, : int(own.sum(1).max())]
    return kept.gather(-1, order.reshape(len(own), *[1] * (scores.dim() - 2), -1).expand(*kept.shape[:-1], -1))


class _Begun(Exception):  # noqa: N818 - no error: it ends a call of the user's function
    """What a layer is given is known."""


class _Given:
    """What the first layer of a stack is given, with noise in one of the inputs.

    Args:
        forward_func: The user's function.
        inputs: Its inputs.
        further: Its further arguments.
        layer: A layer of the stack.
        axis: The axis of the examples.
        sources: The number of tokens, if these are the sources of cross-attention.
        run: The number of the explained input, if there are several. None: there is one.
        named: Whether the sources may also be the layer's own tokens.
    """

    def __init__(
        self,
        forward_func: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        further: Any,
        layer: nn.Module,
        axis: int,
        sources: int | None,
        run: int | None,
        named: bool,
    ) -> None:
        self._named = named
        self._bound = partial(bind_forward, forward_func, additional_forward_args=further)
        self._inputs, self._axis, self._sources = inputs, axis, sources
        clean = self._bound(inputs)
        self._layer, self._first = layer, stack_of(layer, model_of(forward_func, clean, layer))[0]
        chosen = None if run is None else Runs(clean, [self._first], run).chosen
        self._run = chosen[0][0] if chosen else 0

    def owners(self, batch: int) -> Tensor:
        """The number of the input that each token comes from, `(batch, tokens)`."""
        clean = self._tokens(self._bound(self._inputs), batch)
        if self._sources is None and self._layer is not self._first:
            self._check(self._tokens(self._bound(self._inputs), batch, self._layer).shape[:2] == clean.shape[:2])
        found = [self._changed(k, clean) for k in range(len(self._inputs))]
        self._check_clear([changed for changed, _ in found], [by_noise for _, by_noise in found])
        masks = torch.tensor(
            [not by_noise and _is_mask(x) for (_, by_noise), x in zip(found, self._inputs, strict=True)]
        )
        changed = torch.stack([one for one, _ in found])
        not_of_masks = changed & ~masks.to(changed.device)[:, None, None]
        changed = not_of_masks.where(not_of_masks.any(0), changed)
        some, first, end = changed.any(0), changed.int().argmax(0), clean.shape[1]
        places = torch.arange(end, device=clean.device).expand_as(some)
        following = places.where(some, end).flip(1).cummin(1).values.flip(1)
        before = places.where(some, -1).cummax(1).values
        return first.gather(1, following.where(following < end, before).clamp_min(0))

    def _check_clear(self, changed: list[Tensor], by_noise: list[bool]) -> None:
        """Refuse if an input changes tokens that may be those of a later input. In equal sets, the first owns all."""
        for k, later in combinations(range(len(changed)), 2):
            one, other, both = self._inputs[k], self._inputs[later], changed[k] & changed[later]
            if not (by_noise[k] and by_noise[later] and both.any()):
                continue
            more = both.any(1) & (changed[k] & ~changed[later]).any(1)
            # Noise in what is read by equal ids is in both inputs.
            alike = one.dtype == other.dtype and one.shape == other.shape and not one.is_floating_point()
            same = alike and torch.equal(one, other.to(one.device))
            owned = torch.stack([torch.zeros_like(both), *changed[:k]]).any(0)
            self._check(not more.any() and not (same and (both & ~owned).any()))

    def _changed(self, k: int, clean: Tensor) -> tuple[Tensor, bool]:
        """Which tokens input k changes, bool `(batch, tokens)`, and whether this was seen by noise in its vectors."""
        x, reads = self._inputs[k], _NoiseInReads(self._inputs[k])

        def with_other(other: Tensor) -> Callable[[], Any]:
            return self._bound((*self._inputs[:k], other, *self._inputs[k + 1 :]))

        def noisy_reads() -> Any:
            with reads:
                return self._bound(self._inputs)()

        if x.is_floating_point():
            found = self._differs(with_other(x + _noise(x)), clean)
            self._check(found is not None)
            return clean.new_zeros(clean.shape[:2], dtype=torch.bool) if found is None else found, True
        # Other ids may not fit the model's other inputs, so what is read by ids gets the noise.
        found = self._differs(noisy_reads, clean)
        if not reads.found and x.dtype != torch.bool:  # reads of compiled code, or of joined ids, are not seen
            found = self._differs(with_other(_other_ids(x)), clean)
        return clean.new_zeros(clean.shape[:2], dtype=torch.bool) if found is None else found, reads.found

    def _differs(self, forward: Callable[[], Any], clean: Tensor) -> Tensor | None:
        """Which tokens are not as in the clean pass. None: the model fails, or has other tokens."""
        try:
            found = self._tokens(forward, len(clean))
        except MODEL_ERRORS as error:
            if is_out_of_memory(error):
                raise
            return None
        return (found != clean).any(-1) if found.shape == clean.shape else None

    def _check(self, is_known: bool) -> None:
        if not is_known:
            raise ArgumentError(
                f"inputs holds {len(self._inputs)} tensors, but it is unknown which tokens of the layer "
                f"{type(self._first).__name__} come from which of them. {REMEDY}."
            )

    def _tokens(self, forward: Callable[[], Any], batch: int, layer: nn.Module | None = None) -> Tensor:
        """The vectors of the tokens that a layer is given, `(batch, tokens, d)`. None: the first layer."""
        given: list[list[Tensor]] = []

        def begin(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionHandler:
            leaves = tree_leaves((args, kwargs))
            given.append([x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 2])
            if len(given) > self._run:
                raise _Begun
            return AttentionHandler()

        def call() -> None:
            with layer_hooks([layer or self._first], begin, lambda *_: None):
                forward()

        with suppress(_Begun):
            repeated(call)
        states = given[self._run] if len(given) > self._run else []
        if self._sources is not None:
            others = states if self._named else states[1:]
            states = [x for x in others if x.dim() == 3 and x.shape[1 - self._axis] == self._sources]
        unclear = self._named and len(states) > 1
        self._check(not unclear and bool(states) and states[0].shape[self._axis] == batch)
        tokens = states[0].transpose(0, self._axis)
        return tokens.flatten(1, -2)


class _NoiseInReads(TorchFunctionMode):
    """Adds noise to what torch's functions read by ids, such as an embedding."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self._ids, self.found = ids, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if not (isinstance(found, Tensor) and found.is_floating_point() and found.dim() > 2):
            return found
        if not any(self._is_ids(x) for x in tree_leaves((args, kwargs))):
            return found
        self.found = True
        return found + _noise(found)

    def _is_ids(self, x: Any) -> bool:
        alike = isinstance(x, Tensor) and x.shape == self._ids.shape and x.dtype == self._ids.dtype
        return alike and torch.equal(x.to(self._ids.device), self._ids)


def _is_mask(x: Tensor) -> bool:
    return not x.is_floating_point() and bool(((x == 0) | (x == 1)).all())


def _other_ids(x: Tensor) -> Tensor:
    """Ids of which each is another one than in `x`, and all are in the vocabulary. Ones and zeros alone stay."""
    values, places = x.unique(return_inverse=True)
    return values.roll(1)[places] if len(values) != 1 else x - int(values > 1)


def _noise(x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    size = x.detach().float().abs().mean()
    return (noise.to(x.device) * (size if size > 0 else 1.0)).to(x.dtype)
