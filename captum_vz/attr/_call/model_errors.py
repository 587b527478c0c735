"""Errors of the user's model that its inputs explain, with the mistake named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding

from captum_vz._engine import is_out_of_memory
from captum_vz._private import own_buffers
from captum_vz.errors import ArgumentError, RefusedError

# The errors that a model may raise on wrong inputs.
MODEL_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)


def explain_error(error: Exception, tokens: Any) -> None:
    """Raise ArgumentError, which names the mistake in the inputs, if the model raised `error` because of it.

    `tokens` is the input that holds token ids or embeddings. The shape of other inputs is not known.
    """
    if isinstance(error, RefusedError) or not isinstance(error, MODEL_ERRORS) or is_out_of_memory(error):
        return
    if reason := _wrong_ids(error, tokens) or _too_long(error, tokens) or _wrong_axes(error, tokens):
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ArgumentError(f"forward_func failed ({said[:200]}). {reason}.") from error


def _frames(error: BaseException) -> Iterator[FrameType]:
    """The frames in which an error was raised, the outermost first."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _wrong_ids(error: BaseException, tokens: Any) -> str | None:
    """The mistake in the ids that torch's embedding was given when the error was raised. None: no mistake."""
    for frame in _frames(error):
        if frame.f_code is not embedding.__code__:
            continue
        ids, weight = frame.f_locals["input"], frame.f_locals["weight"]
        if not (isinstance(ids, Tensor) and isinstance(weight, Tensor) and ids.numel() and ids.device.type == "cpu"):
            continue
        if ids.is_floating_point():
            return f"An Embedding was given {ids.dtype}: pass token ids as integers, or embeddings as inputs_embeds"
        low, high, size = int(ids.min()), int(ids.max()), len(weight)
        if low < 0 or high >= size:
            given = isinstance(tokens, Tensor) and tokens.shape == ids.shape and bool((tokens == ids).all())
            if ids.shape[-1] == high - low + 1 and bool((ids.diff() == 1).all()) and low >= 0 and not given:
                return _longer(high - low + 1, size - low, "the model")
            return (
                f"An Embedding of {size} entries was given ids from {low} to {high}: pass ids of the model's own "
                "tokenizer, and no more tokens than the model has positions"
            )
    return None


def _too_long(error: BaseException, tokens: Any) -> str | None:
    """That a model has fewer positions than tokens, if its error names the size of its table of positions."""
    if not isinstance(tokens, Tensor) or tokens.dim() not in ((3,) if tokens.is_floating_point() else (2, 3)):
        return None
    count = tokens.shape[1 if tokens.is_floating_point() else -1]  # ids of choices are (batch, choices, tokens)
    named = {int(number) for number in re.findall(r"\d+", str(error))}
    for module in reversed(_modules(error)):
        for size, allowed in _position_tables(module):
            if size in named and allowed < count:
                return _longer(count, allowed, type(module).__name__)
    return None


def _modules(error: BaseException) -> list[nn.Module]:
    """The modules in which an error was raised, the outermost first."""
    modules = (frame.f_locals.get("self") for frame in _frames(error))
    return [one for one in modules if isinstance(one, nn.Module)]


def _position_tables(module: nn.Module) -> Iterator[tuple[int, int]]:
    """The sizes of a module's tables of positions, and how many tokens each allows. The smallest number comes first."""
    found = []
    for name, one in (*module.named_children(), *own_buffers(module).items(), *vars(module).items()):
        if "pos" not in name.lower():
            continue
        if isinstance(one, nn.Embedding):  # positions of padding come first
            before = 0 if one.padding_idx is None else one.padding_idx + 1
            found.append((one.num_embeddings, one.num_embeddings - before))
        elif isinstance(one, Tensor) and one.dim():
            size = one.shape[0] if one.is_floating_point() else one.shape[-1]
            found.append((size, size))
    config = getattr(module, "config", None)
    fields = {} if config is None else vars(config)
    limits = (value for name, value in fields.items() if re.search("position|seq_len", name))
    found += [(value, value) for value in limits if type(value) is int]
    yield from sorted(found, key=lambda pair: pair[1])


def _longer(count: int, allowed: int, kind: str) -> str:
    return (
        f"The inputs have {count} tokens, but {kind} has {allowed} positions: pass at most {allowed} tokens, such as "
        f"tokenizer(text, truncation=True, max_length={allowed}, return_tensors='pt')"
    )


def _wrong_axes(error: BaseException, tokens: Any) -> str | None:
    """The mistake in the axes of token ids `(batch, tokens)` or embeddings `(batch, tokens, d)`. None: no mistake."""
    if not isinstance(tokens, Tensor):
        return None
    shape = tuple(tokens.shape)
    if tokens.dim() <= 1:
        return f"inputs is {shape}, without an axis for the batch: pass (batch, tokens), such as inputs[None]"
    modules = _modules(error)
    # Sound has the axes (batch, samples), and ids of choices (batch, choices, tokens).
    of_text = {getattr(one, "main_input_name", "input_ids") for one in modules} <= {"input_ids", "inputs_embeds"}
    if not modules or not of_text or "MultipleChoice" in type(modules[0]).__name__:
        return None
    if tokens.dim() == 2 and tokens.is_floating_point():
        return f"inputs is {shape}: embeddings have the axes (batch, tokens, d), so pass one example as inputs[None]"
    if tokens.dim() > 2 and not tokens.is_floating_point():
        return f"inputs is {shape}, but token ids have two axes: pass (batch, tokens)"
    return None
