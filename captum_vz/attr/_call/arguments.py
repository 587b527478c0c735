"""The inputs of `attribute`: how the model is called with them, and which of them the tokens of a layer come from."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from captum_vz._engine import AttentionSite, caches_in, is_out_of_memory, with_own_caches
from captum_vz._private import (
    format_additional_forward_args,
    format_tensor_into_tuples,
    run_forward,
    tree_leaves,
    tree_map,
)
from captum_vz.errors import ArgumentError, RefusedError

# A tensor or a tuple of tensors, as in Captum. Or a mapping, such as a tokenizer's BatchEncoding, passed by keyword.
Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Any]
# The errors that a model may raise on wrong inputs.
MODEL_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)


class Arguments(NamedTuple):
    """The arguments of :meth:`LayerMaps.attribute`, except `target` and `token`."""

    inputs: Inputs
    additional_forward_args: Any = None
    feature_mask: Tensor | None = None
    perturbations_per_eval: int | None = None
    show_progress: bool = False
    run: int | None = None


def check_numbers(given: Any, run: Any) -> None:
    """Refuse a `perturbations_per_eval` that is not a positive integer or None, and a `run` that is no integer."""
    if run is not None and type(run) is not int:
        raise ArgumentError(f"run is {run!r}: pass an integer (0: the first, -1: the last), or None.")
    if given is not None and not (type(given) is int and given >= 1):
        raise ArgumentError(f"perturbations_per_eval is {given!r}: pass an integer of at least 1, or None.")


def bind_forward(forward_func: Callable[..., Any], inputs: Inputs, additional_forward_args: Any) -> Callable[[], Any]:
    """A function that calls `forward_func` with the user's arguments, and with copies of their key-value caches."""
    if isinstance(forward_func, nn.DataParallel) and len(forward_func.device_ids) > 1:
        warnings.warn("DataParallel on several devices: its module is explained, on one device.", stacklevel=3)
        forward_func = forward_func.module
    check_inputs(inputs)
    tokens = token_input(inputs)
    if isinstance(inputs, Mapping):
        if additional_forward_args is not None:
            raise ArgumentError("inputs is a mapping, so put additional_forward_args into it, by their names.")
        tokens = inputs.get("decoder_input_ids") if tokens is None else tokens
        forward = partial(forward_func, **{str(name): value for name, value in inputs.items()})
    else:
        formatted = format_tensor_into_tuples(inputs)
        forward = partial(run_forward, forward_func, formatted, None, additional_forward_args)

    def call() -> Any:
        return forward.func(*with_own_caches(forward.args), **with_own_caches(forward.keywords))

    return ExplainedErrors(tokens)(call if caches_of(inputs, additional_forward_args) else forward)


def check_inputs(inputs: Any) -> None:
    """Refuse inputs other than a tensor, a tuple of tensors or a mapping, and those without a token."""
    advice = "pass a tensor, a tuple of tensors, or a tokenizer's output (tokenizer(text, return_tensors='pt'))"
    if isinstance(inputs, Mapping):
        values = tuple(inputs.values())
        for name in ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids"):
            if inputs.get(name) is not None and not isinstance(inputs[name], (Tensor, Mapping)):
                raise ArgumentError(f"inputs[{name!r}] is of type {type(inputs[name]).__name__}: {advice}.")
    else:
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        wrong = [f"of type {type(value).__name__}" for value in values if not isinstance(value, Tensor)]
        if wrong or not values:
            held = "a tuple with an entry " if isinstance(inputs, tuple) and values else ""
            found = "None" if inputs is None else held + (wrong[0] if wrong else "empty")
            raise ArgumentError(f"inputs is {found}: {advice}.")
    if empty := [tuple(x.shape) for x in values if isinstance(x, Tensor) and 0 in x.shape[:2]]:
        raise ArgumentError(
            f"inputs holds an empty tensor {empty[0]}: there is no token to explain. Pass at least one."
        )


class ExplainedErrors(ContextDecorator):
    """Name the mistake in the inputs by an ArgumentError, if the model fails in the `with` block because of it.

    `tokens` is the input that holds token ids or embeddings. The shape of other inputs is not known.
    """

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    # No generator: one that never starts would swallow an interruption when it is closed.
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RefusedError) or not isinstance(error, MODEL_ERRORS) or is_out_of_memory(error):
            return
        if reason := _too_long(error, self.tokens) or _wrong_ids(error) or _wrong_axes(error, self.tokens):
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ArgumentError(f"forward_func failed ({said[:200]}). {reason}.") from error


def _wrong_ids(error: BaseException) -> str | None:
    """The mistake in the ids that torch's embedding was given when the error was raised. None: no mistake."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is embedding.__code__:
            ids, size = frame.f_locals["input"], len(frame.f_locals["weight"])
            if ids.is_floating_point():
                return f"An Embedding was given {ids.dtype}. Pass token ids as integers, or embeddings as inputs_embeds"
            if ids.numel() and (ids.min() < 0 or ids.max() >= size):
                return (
                    f"An Embedding of {size} entries was given ids from {ids.min()} to {ids.max()}. Pass ids of the "
                    "model's own tokenizer, and no more tokens than the model has positions"
                )
    return None


def _too_long(error: BaseException, tokens: Any) -> str | None:
    """That there are more tokens than positions, if an error was raised in a model whose config names their number."""
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        return None
    count = tokens.shape[1 if tokens.is_floating_point() else -1]  # ids of choices are (batch, choices, tokens)
    configs = [getattr(one, "config", None) for one in _modules(error)]
    fields = {name: value for one in configs if one is not None for name, value in vars(one).items()}
    limits = [fields[name] for name in fields if re.fullmatch(r"max_(\w+_)?position\w+|n_positions|max_seq_len", name)]
    below = [limit for limit in limits if type(limit) is int and limit < count]
    if not below:
        return None
    return (
        f"The inputs have {count} tokens, but the model has {max(below)} positions. Pass fewer tokens, such as "
        "tokenizer(text, truncation=True, return_tensors='pt')"
    )


def _wrong_axes(error: BaseException, tokens: Any) -> str | None:
    """The mistake in the axes of token ids `(batch, tokens)` or embeddings `(batch, tokens, d)`. None: no mistake."""
    if not isinstance(tokens, Tensor):
        return None
    # Sound has the axes (batch, samples), and ids of choices (batch, choices, tokens).
    modules = _modules(error)
    is_text = all(getattr(one, "main_input_name", "input_ids") in ("input_ids", "inputs_embeds") for one in modules)
    of_text = is_text and bool(modules) and "MultipleChoice" not in type(modules[0]).__name__
    axes = 3 if tokens.is_floating_point() else 2
    if tokens.dim() <= 1 or (of_text and tokens.dim() < axes):
        names = "(batch, tokens, d)" if tokens.dim() == 2 else "(batch, tokens)"
        return f"inputs is {tuple(tokens.shape)}, without an axis for the batch. Pass {names}, such as inputs[None]"
    if of_text and tokens.dim() > axes == 2:
        return f"inputs is {tuple(tokens.shape)}, but token ids have two axes. Pass (batch, tokens)"
    return None


def _modules(error: BaseException) -> list[nn.Module]:
    """The modules in which an error was raised, the outermost first."""
    modules = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    return [one for one in modules if isinstance(one, nn.Module)]


def caches_of(inputs: Any, further: Any) -> list[Any]:
    """The key-value caches of transformers in the arguments of a call."""
    return caches_in((dict(inputs) if isinstance(inputs, Mapping) else inputs, further))


def examples_of(inputs: Any, additional_forward_args: Any, examples: Sequence[int], batch: int) -> tuple[Any, Any]:
    """The arguments of the user's call for some examples of the batch, in this order. Examples may come twice."""

    def pick(value: Any) -> Any:
        if is_names(value):
            return [value[example] for example in examples]
        of_batch = isinstance(value, Tensor) and value.dim() and len(value) == batch
        return value[torch.tensor(examples, device=value.device)] if of_batch else value

    def is_names(value: Any) -> bool:  # PEFT's adapter_names
        return isinstance(value, list) and len(value) == batch and all(isinstance(one, str) for one in value)

    if isinstance(inputs, Mapping):
        return {name: tree_map(pick, value, is_leaf=is_names) for name, value in inputs.items()}, None
    further = format_additional_forward_args(additional_forward_args)
    return tree_map(pick, (format_tensor_into_tuples(inputs), further), is_leaf=is_names)


def token_input(inputs: Inputs) -> Any:
    """The input that holds the tokens: ids `(batch, tokens)` or embeddings `(batch, tokens, d)`. None: no tokens."""
    if isinstance(inputs, Mapping):
        return inputs.get("input_ids", inputs.get("inputs_embeds"))
    return inputs[0] if isinstance(inputs, tuple) and inputs else inputs


def tokens_of(inputs: Inputs) -> int | None:
    """The number of tokens in the inputs, padding included. None if the inputs hold no tokens."""
    text = token_input(inputs)
    return text.shape[1] if isinstance(text, Tensor) and text.dim() in (2, 3) else None


def end_of_inputs(site: AttentionSite, inputs: Inputs, token: Any = None) -> int | None:
    """The number of tokens in the inputs if the model appends padding. None: it appends none.

    The layer's record is given a warning for padding that no mask hides, and for tokens that the inputs lack. An
    attention with other examples than the inputs, such as one part of a batch, is refused.
    """
    text, found, end = token_input(inputs), site.shape.batch, site.end_of_inputs(tokens_of(inputs))
    if not isinstance(text, Tensor):
        return end
    # Ids, embeddings and images have an axis of examples. Packed patches have none, and choices (of an answer) two.
    known = text.dim() in (3, 4) if text.is_floating_point() else text.dim() == 2
    known = known and site.streams is None  # streams may come before the examples
    if known and found not in text.shape[: 2 if site.attention.tokens_first else 1]:
        raise ArgumentError(
            f"The attention of {site.layer.name} has {found} example(s), but inputs has {len(text)}: expected the "
            "same. Pass a forward_func that gives the layer the whole batch, or one example at a time."
        )
    if site.layer.index == 0 and (not isinstance(inputs, tuple) or len(inputs) == 1):
        site.layer.warnings.extend(_seen_padding(site, inputs, text))
    more = known and max(site.shape.out, site.shape.sources + site.dropped_sources) > text.shape[1]
    if more and text.dim() < 4 and end is None:
        site.layer.warnings.extend(_added_tokens(site, inputs, text, token))
    return end


def _added_tokens(site: AttentionSite, inputs: Inputs, text: Tensor, token: Any) -> list[str]:
    """A warning if `token`, rows and columns also count tokens that the model adds to the inputs, such as a prefix."""
    named: dict[Any, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
    tensors = [x for x in tree_leaves(named or inputs) if isinstance(x, Tensor) and x.dim() > 1]
    lengths, count = {x.shape[1] for x in tensors}, site.shape.out
    # Layers over a decoder's tokens have other tokens. Inputs in a tuple that have other lengths are other sequences.
    others = "decoder_input_ids" in named or len(site.layer.attentions) > 1 or site.attention.tokens_first
    if others or (isinstance(inputs, tuple) and len(lengths) > 1):
        return []
    length, sources = max(lengths), site.shape.sources + site.dropped_sources
    if any(x.is_floating_point() for x in tensors if x is not text):  # an image
        if token is None or text.is_floating_point():
            return []
        length, sources = text.shape[1], count
    elif any(named.get(name) is not None for name in ("cache", "past_key_values")):  # renamed by transformers 5.24
        sources = count
    if max(count, sources) <= length:
        return []
    return [
        f"{site.layer.name} has {count} output tokens and {sources} sources, but inputs has {length} tokens. Rows, "
        "columns and token count those that the model or its cache adds (prompt tuning, a prefix, an image)"
    ]


def begins_with_padding(site: AttentionSite) -> int:
    """How many examples of the first layer's tokens begin with padding, if the call names no positions."""
    record, mask = site.layer, site.target_mask
    # After an encoder or a cache, the inputs hold other tokens as well.
    others = len(record.attentions) > 1 or site.shape.sources + site.dropped_sources != site.shape.out
    count = 0 if record.index or others else int((~mask[:, 0] & mask.any(1)).sum())
    if not count or caches_of(*record.inputs):
        return 0
    inputs, further = record.inputs
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    known = (x for x in tree_leaves((inputs, further)) if isinstance(x, Tensor) and x.shape == mask.shape)
    named = isinstance(inputs, Mapping) and inputs.get("position_ids") is not None
    return 0 if named or any((x.to(mask.device) == positions)[mask].all() for x in known) else count


def _seen_padding(site: AttentionSite, inputs: Inputs, ids: Tensor) -> list[str]:
    """A warning if ids hold padding at an end, by the model's config, and the attention sees it."""
    if isinstance(inputs, Mapping) and inputs.get("attention_mask") is not None:
        return []
    config: Any = next(filter(None, (getattr(m, "config", None) for m in site.layer.layer.modules())), None)
    known = site.target_mask
    # A decoder that reads an encoder has other tokens than the inputs.
    if ids.is_floating_point() or ids.shape != known.shape or len(site.layer.attentions) > 1:
        return []
    return unmasked_padding(ids.to(known.device), config, known)


def unmasked_padding(ids: Tensor, config: Any, known: Tensor | None = None) -> list[str]:
    """A warning if ids `(batch, tokens)` hold padding at an end, by a model's config. `known`: what the model sees."""
    pads = getattr(config, "pad_token_id", None)
    if type(pads) is not int or not (ids[:, [0, -1]] == pads).any():
        return []
    padding = (ids == pads).int()
    runs = [padding.cumprod(1), padding.flip(1).cumprod(1).flip(1)]
    # A single such token at an end may be the end or the beginning of a text.
    least = 2 if pads in (getattr(config, "eos_token_id", None), getattr(config, "bos_token_id", None)) else 1
    ends = torch.stack([run * (run.sum(1, keepdim=True) >= least) for run in runs]).any(0)
    examples = int((ends if known is None else ends & known).any(1).sum())
    if not examples or padding.all(1).any():
        return []
    return [
        f"{examples} example(s) end or begin with padding (id {pads}) that no mask hides, so it counts as tokens: pass "
        "attention_mask"
    ]


def by_input(scores: Sequence[Tensor], inputs: Inputs, run: int | None = None, stacks: Sequence[int] = ()) -> list[Any]:
    """Scores `(batch, ..., in)` as they are. If `inputs` is a tuple, as tuples with one tensor for each input.

    The input that is as long as the scores has all of them, with `run` the text of this number. The scores of other
    inputs are 0. Masks, and inputs with one number for each example, own no scores. `stacks` are the numbers of sources
    of several stacks, if these follow each other.

    ArgumentError: the shapes of the inputs do not show which of them the tokens come from.
    """
    if not isinstance(inputs, tuple):
        return list(scores)
    if len(inputs) == 1:
        return [(one,) for one in scores]
    counts = list(stacks) or [scores[0].shape[-1]]
    texts = [k for k, x in enumerate(inputs) if not _has_no_tokens(x, counts)]
    owners = texts * len(counts) if len(texts) == 1 else [_owner(inputs, texts, count, run) for count in counts]

    def share(one: Tensor, k: int) -> Tensor:
        own = [part for part, owner in zip(one.split(counts, -1), owners, strict=True) if owner == k]
        return torch.cat(own, -1) if own else one.new_zeros(*one.shape[:-1], _tokens(inputs[k]) or 0)

    return [tuple(share(one, k) for k in range(len(inputs))) for one in scores]


def _owner(inputs: tuple[Tensor, ...], texts: list[int], count: int, run: int | None) -> int:
    """The number of the input that `count` tokens come from."""
    lengths = {k: _tokens(inputs[k]) for k in texts}
    known = [] if None in lengths.values() else [k for k in texts if lengths[k] == count]
    chosen = known if run is None else [k for k in known if k in (texts[run : run + 1] or texts[run:])]
    if len(chosen) != 1:
        raise ArgumentError(
            f"inputs holds {len(inputs)} tensors, and their shapes do not show which of them the {count} tokens come "
            "from. Pass the inputs as a mapping, which returns one tensor for all tokens."
        )
    return chosen[0]


def _tokens(x: Tensor) -> int | None:
    """The number of tokens of ids or vectors. None: it is not known, as for an image."""
    return x.shape[1] if x.dim() == (3 if x.is_floating_point() else 2) else None


def _has_no_tokens(x: Tensor, counts: Sequence[int]) -> bool:
    """Whether an input is a mask, or one number for each example. A mask `(batch, 1, out, in)` is added to scores."""
    if x.dim() == 4 and x.is_floating_point():
        return x.shape[1] == 1 and x.shape[-1] in counts
    may_be_mask = x.dim() == 2 or not x.is_floating_point()
    return x.dim() < 2 or (may_be_mask and bool(((x == 0) | (x == 1)).all()))
