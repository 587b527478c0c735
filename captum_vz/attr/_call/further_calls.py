"""What a further call of the model shows: which module it runs, and whether its output has the axis of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_vz._engine import (
    AttentionHandler,
    find_layers,
    first_module_holding,
    first_tensor,
    is_cache,
    is_out_of_memory,
    layer_hooks,
    repeated,
    tokens_in_caches,
)
from captum_vz._private import modules_of, tree_leaves, tree_map, uncompiled
from captum_vz.attr._call.arguments import MODEL_ERRORS, Arguments, bind_forward, caches_of, token_input
from captum_vz.attr._call.output import tensor_of
from captum_vz.attr._call.target import WantedTokens
from captum_vz.errors import ArgumentError, RefusedError


class _Seen(Exception):  # noqa: N818 - no error: it ends a call of the user's function
    """What was looked for has been seen."""


# The noise in a token, as a multiple of the mean absolute value of its entries.
STRENGTH = 8.0


@dataclass(frozen=True)
class LayerTokens:
    """The output tokens of a layer in its last run."""

    layer: nn.Module
    number: int  # how often the layer ran before in the pass
    count: int  # of tokens, without padding that the model appended
    real: Tensor  # which of them are no padding, `(batch, count)`
    tokens_first: bool  # whether the layer's tensors are `(tokens, batch, d)`


def check_target(
    wanted: WantedTokens,
    output: Any,
    tokens: Sequence[LayerTokens],
    forward_func: Callable[..., Any],
    arguments: Arguments,
    name: str,
) -> None:
    """Refuse a `target` unless the first axis that it indexes is the axis of the layers' tokens.

    The axis may be as long by chance: an encoder and its decoder often have equally many tokens. The structure of many
    library models shows what the axis is. Any other `forward_func` is called once more, with noise in the wanted token.
    """
    for count in dict.fromkeys(one.count for one in tokens):
        wanted.check(output, count, name)
    clean = tensor_of(output)
    assert clean is not None  # WantedTokens.check refuses other outputs
    rest = [one for one in tokens if not _is_known(one, forward_func, arguments.inputs, clean)]
    while rest:
        first = rest[0]
        forward = bind_forward(forward_func, *arguments[:2])
        stack = stack_of(first.layer, model_of(forward_func, forward, first.layer))
        own_cache = bool(caches_of(*arguments[:2]))
        noise_after = partial(_is_shown, stack, first, forward, clean, wanted, own_cache)
        alone = not noise_after(len(stack) - 1)
        # The output may not depend on the layers above this one.
        if alone and not noise_after(next(n for n, one in enumerate(stack) if first.layer in modules_of(one))):
            raise ArgumentError(
                f"target is {wanted.target!r}, but it is not shown that axis 1 of the output {tuple(clean.shape)} has "
                f"the tokens of the layer {type(first.layer).__name__}: noise in this token does not change this entry "
                "alone. Pass token= for a row of this layer."
            )
        # All layers of a stack have the same tokens.
        members = [first.layer] if alone else stack
        rest = [one for one in rest if not any(one.layer in modules_of(member) for member in members)]


def _is_known(tokens: LayerTokens, forward_func: Any, inputs: Any, output: Tensor) -> bool:
    """Whether the structure of a model shows that the axis is that of the layer's tokens.

    The model is of transformers, has one stack and no encoder apart from its decoder, and all lengths are equal.
    """
    model = uncompiled(forward_func.module if isinstance(forward_func, nn.DataParallel) else forward_func)
    of_library = isinstance(model, nn.Module) and type(model).__module__.startswith("transformers.models.")
    given = token_input(inputs)
    if not of_library or output.dim() < 3 or not isinstance(given, Tensor) or given.shape[:2] != output.shape[:2]:
        return False
    if getattr(getattr(model, "config", None), "is_encoder_decoder", True):
        return False
    try:
        return any(one is tokens.layer for one in find_layers(model))
    except RefusedError:  # several stacks
        return False


def model_of(forward_func: Any, forward: Callable[[], Any], layer: nn.Module) -> nn.Module:
    """The outermost module that contains a layer. A function is called until it runs this module."""
    if isinstance(forward_func, nn.Module):
        return forward_func

    def show(module: nn.Module) -> None:
        raise _Seen(module)

    def call() -> None:
        with first_module_holding([layer], show):
            forward()

    try:
        repeated(call)
    except _Seen as seen:
        model: nn.Module = seen.args[0]
        return model
    return layer


def stack_of(layer: nn.Module, model: nn.Module) -> list[nn.Module]:
    """The members of the outermost list of modules that contains a layer. Without a list, the layer alone.

    In a Sequential, the members of other classes than the layer's are left out, such as an embedding.
    """
    for kind in (nn.ModuleList, nn.Sequential):
        for members in (_members(one) for one in modules_of(model) if isinstance(one, kind)):
            own = next((one for one in members if layer in modules_of(one)), None)
            if own is not None:
                return [one for one in members if kind is nn.ModuleList or type(one) is type(own)]
    return [layer]


def _members(modules: nn.Module) -> list[nn.Module]:
    """The modules of a list, each once. Lists in it are joined."""
    nested = [_members(one) if isinstance(one, nn.ModuleList) else [one] for one in modules.children()]
    return list(dict.fromkeys(one for several in nested for one in several))


def _is_shown(
    stack: list[nn.Module],
    tokens: LayerTokens,
    forward: Callable[[], Any],
    clean: Tensor,
    wanted: WantedTokens,
    own_cache: bool,
    last: int,
) -> bool:
    """Whether noise in the wanted token changes the wanted entry of the axis, and no other entry.

    The layer `last` of the stack gets the noise: mostly the last one, because the others' tokens are mixed after them.
    """
    rows = wanted.positions(len(clean), tokens.count, clean.device)
    assert rows is not None  # a target names tokens
    chosen = torch.zeros(clean.shape[:2], dtype=torch.bool, device=clean.device).scatter(1, rows, True)
    noise = _NoiseInToken(stack, tokens, chosen, last, own_cache)

    def call() -> Any:
        with layer_hooks(stack, noise.begin, noise.end):
            return forward()

    try:
        noisy = tensor_of(repeated(call))
    except (RefusedError, *MODEL_ERRORS) as error:  # the inputs do not fit
        if is_out_of_memory(error):
            raise
        return False
    if noisy is None or noisy.shape != clean.shape:
        return False
    if not clean.is_floating_point():  # classes, or whether a number is large
        clean, noisy = clean.double(), noisy.double()
    same = (noisy == clean) | (noisy.isnan() & clean.isnan())
    # Only what changes says how large the numbers are: the lowest number of a dtype may stand for a class to leave out.
    rounding = clean.masked_fill(same, 0).nan_to_num(0, 0, 0).abs().amax() * torch.finfo(clean.dtype).eps ** 0.5
    change = (noisy - clean).abs().masked_fill(same, 0).nan_to_num(torch.inf).reshape(*chosen.shape, -1).amax(-1)
    real = tokens.real.to(clean.device) if tokens.real.shape == chosen.shape else torch.ones_like(chosen)
    return torch.equal((change > rounding) & real, chosen & real)


class _NoiseInToken:
    """Adds noise to the `chosen (batch, tokens)` tokens that the layer `last` of a stack returns.

    From the explained layer to this, each layer has to be given what the layer before it returned. ValueError: it is
    not.
    """

    def __init__(self, stack: list[nn.Module], tokens: LayerTokens, chosen: Tensor, last: int, own_cache: bool) -> None:
        self._own_cache = own_cache  # each call has a copy of the caches that the user passed
        place = next(place for place, one in enumerate(stack) if tokens.layer in modules_of(one))
        self._first, self._last = (place, tokens.number), (last, tokens.number)
        self._tokens_first = tokens.tokens_first
        self._chosen = chosen
        self._count: Counter[int] = Counter()
        self._runs: dict[AttentionHandler, tuple[int, int]] = {}
        self._hidden: Tensor | None = None  # what the layer before returned, from the explained layer on

    def begin(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionHandler:
        """Note a run of a layer, and whether it follows the layer before."""
        leaves = tree_leaves((args, kwargs), is_leaf=is_cache)
        if not self._own_cache and not self._count and tokens_in_caches(layer, (args, kwargs)):
            raise ValueError("a cache would be filled twice")
        handler = AttentionHandler()
        self._runs[handler] = index, self._count[index]
        self._count[index] += 1
        if self._hidden is not None:
            shape = self._hidden.shape
            states = (x for x in leaves if isinstance(x, Tensor) and x.shape == shape and x.is_floating_point())
            given = next(states, None)
            # Models may add something to some tokens between two layers.
            if given is None or not (given == self._hidden.to(given)).all(-1).any():
                raise ValueError("a layer is given other tokens than the layer before it returned")
        return handler

    def end(self, handler: AttentionHandler, arguments: Any, output: Any, hooks: Any) -> Any:
        """Add the noise to what the layer returns."""
        run, hidden = self._runs.pop(handler), first_tensor(output)
        if run == self._first or self._hidden is not None:
            self._hidden = None if hidden is None else hidden.clone()
        if run != self._last or self._hidden is None:
            return None
        noisy, self._hidden = self._hidden, None
        tokens = noisy.transpose(0, 1) if self._tokens_first else noisy
        tokens = tokens.flatten(1, -2) if tokens.shape[1] < self._chosen.shape[1] else tokens  # of an image
        batch, count = self._chosen.shape
        if tokens.dim() < 3 or len(tokens) != batch or tokens.shape[1] < count:
            raise ValueError("the last layer returns other tokens")
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens)
        size = tokens.abs().mean(-1, keepdim=True)
        noise = STRENGTH * size.where(size > 0, size.mean()) * noise
        tokens[:, :count][self._chosen.to(tokens.device)] += noise[:, :count][self._chosen.to(tokens.device)]
        return tree_map(lambda x: noisy if x is hidden else x, output)
