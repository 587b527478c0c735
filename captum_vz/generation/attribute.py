"""Attribute the tokens of a generated text to its prompt."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from captum.attr import Attribution
from torch import Tensor, nn

from captum_vz._engine import find_layers
from captum_vz._names import known_name
from captum_vz.attr import (
    ALTILogit,
    ALTIPlus,
    LayerMaps,
    MapAggregation,
    ModelFreeAttribution,
    TokenAttribution,
    ValueZeroingEffect,
)
from captum_vz.attr._call.layers import check_class, check_function, is_captums, unwrapped
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.generation.prompts import Section, completed, read_prompts
from captum_vz.generation.result import GenerationAttribution
from captum_vz.generation.texts import FinishedText, device_of, entries_of, finish_texts
from captum_vz.generation.words import TokenText
from captum_vz.study.methods import METHODS
from captum_vz.study.scoring import GateScores
from captum_vz.subjects import check_order, parts_of

#: Methods that explain a logit with several runs of the model.
OF_LOGIT = (ValueZeroingEffect, TokenAttribution, GateScores)
#: Captum generates as many tokens by default.
MAX_NEW_TOKENS = 25


def attribute_generation(
    model: Any,
    prompt: Any,
    method: Any = "value-zeroing-rollout",
    max_new_tokens: int | None = None,
    *,
    tokenizer: Any = None,
    generated: Any = None,
    prompt_length: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    seed: int | None = None,
    method_options: dict[str, Any] | None = None,
    residual: float | str | None = 0.5,
    **generate_kwargs: Any,
) -> Any:
    r"""How much each generated token depends on each token of its prompt, in each layer.

    .. math:: M_{tjl} = (R_l)_{m + t - 2,\, j}, \qquad t = 1 \dots n

    where :math:`R_l` is the method's map of layer l. The prompt has m tokens. New token t is predicted at the position
    before it, so the row of the first new token is the row of the last prompt token. The model is causal: one pass over
    the finished text, without its last token, gives the same rows as one pass for each step. Each text runs alone and
    without padding.

    Layer maps are computed for the n rows of generated tokens only. A rollout needs all rows of the layers, because
    each row of a layer is a mixture of rows of the layer before. Methods that explain a logit with several runs of the
    model (gradients, ValueZeroingEffect, LayerAttentionGradient), and methods with `per_receptive_field`, are called
    for each new token. So are all methods if the model's positions depend on the length of the text (dynamic NTK,
    LongRoPE), and the text is so long that they do.

    Args:
        model: A model with `generate`, as :func:`captum_vz.explain` takes it: a name, a folder, a model with
            `tokenizer`, a pair of both, or a pipeline.
        prompt: A text. Chat messages, which become ids by the tokenizer's chat template. Token ids, a list or tensor.
            A tokenizer's output. What `generate` returned, with `prompt_length`. Or a list of texts, of chats or of
            lists of ids, or a tensor of ids with several rows: a batch.
        method: A name in :data:`~captum_vz.study.METHODS`. Or a class with maps or rows: a layer method, a rollout,
            :class:`~captum_vz.ALTILogit`, :class:`~captum_vz.ValueZeroingEffect`, or a class of Captum that explains
            inputs. Or a function of (model, layers) that returns such a method, such as a `functools.partial`. Or the
            method itself. In a model with an encoder, a class computes maps of the cross-attention, and
            :class:`~captum_vz.ALTIPlus` includes the encoder. A method that was made with `attention="self"`, and a
            rollout of one stack, are then refused, because their sources are not the tokens of the prompt.
        max_new_tokens: The largest number of new tokens. None: 25, unless `max_length` is passed.
        tokenizer: The tokenizer of a model that is passed alone. Captum's `TokenizerLike` is enough. None: prompts are
            ids, and tokens are shown by their ids.
        generated: The new tokens, which are then not generated: a text, ids, or for a batch a list of them. A text is
            added to a prompt text as it is, so begin it with a space unless it continues the last word. For a model
            with an encoder, what `generate` returned.
        prompt_length: The number of tokens, padding included, that are the prompt. The other tokens are generated.
        attention_mask: 0 for the padding of prompts that are tensors, `(batch, tokens)`.
        seed: The seed of sampling. The random state of torch is put back. None: the state of torch is used.
        method_options: Further arguments for the method's `attribute`, such as `perturbations_per_eval`.
        residual: What a rollout that is given by its name adds to each map for the residual connection, see
            :func:`~captum_vz.study.compare`. A class or an object has a `residual` of its own.
        generate_kwargs: Further arguments for `model.generate`: `do_sample`, `num_beams` (the chosen text is
            attributed), `eos_token_id`, `past_key_values` or `cache` (of the first tokens of the prompt), and so on.
            Arguments that change the inputs of the model, such as `inputs_embeds`, are refused.

    Returns:
        A :class:`GenerationAttribution`. A list of them for a batch, or with `num_return_sequences`.

    Raises:
        RefusedError: Wrong arguments. Prompts that hold padding without a mask. A model that is not causal. The errors
            of the method.

    >>> from captum_vz import ValueZeroing
    >>> found = attribute_generation("causal", "the pictures of some hat", ValueZeroing, max_new_tokens=3)
    >>> found.text, found.scores.shape, found.prefix.shape  # (n, m, layers) and (n, n, layers)
    ('were not boring', torch.Size([3, 6, 3]), torch.Size([3, 3, 3]))
    """
    check_order("attribute_generation", prompt)
    model, tokenizer = parts_of(model, tokenizer)
    if max_new_tokens is not None:
        generate_kwargs["max_new_tokens"] = max_new_tokens
    elif generated is None and prompt_length is None and not {"max_length", "generation_config"} & set(generate_kwargs):
        generate_kwargs["max_new_tokens"] = MAX_NEW_TOKENS
    tokenizer = completed(tokenizer)
    prompts, several = read_prompts(tokenizer, prompt, attention_mask, prompt_length)
    generate_kwargs = {**entries_of(prompt, model), **generate_kwargs}
    texts, several = finish_texts(model, tokenizer, prompts, generated, several, seed, generate_kwargs)
    method, options = _named(method, method_options or {}, residual)
    ready = build_method(method, model, tokenizer)
    found = [_attributed(ready, model, tokenizer, text, options) for text in texts]
    return found if several else found[0]


def _named(method: Any, options: dict[str, Any], residual: Any) -> tuple[Any, dict[str, Any]]:
    """What a registered name stands for, and the options of `attribute`. Anything else is returned as it is."""
    if not isinstance(method, str):
        return method, options
    name = known_name("method", method, [name for name, one in METHODS.items() if one.generative is not None])
    row = METHODS[name].with_residual(residual)
    return row.generative, {**row.options, **options}


def _attributed(
    method: Any, model: Any, tokenizer: Any, text: FinishedText, options: dict[str, Any]
) -> GenerationAttribution:
    rows = rows_of(method, text, device_of(model), **options)
    given = len(text.conditions)
    return GenerationAttribution(
        rows.scores[:, :given],
        rows.scores[:, given:],
        TokenText.of(tokenizer, text.conditions, _sections(text)),
        TokenText.of(tokenizer, text.generated),
        rows.layers,
        type(method).__name__,
        tokenizer.decode(list(text.generated), skip_special_tokens=True),
        partial(_joint, method, device_of(model), text, options),
    )


def _sections(text: FinishedText) -> tuple[Section, ...]:
    """The sections of the prompt, and the decoder's start as a section of its own."""
    sections = text.prompt.sections
    if not text.encoder_decoder:
        return sections
    source = len(text.prompt.ids)
    return (*(sections or (("source", 0, source),)), ("decoder", source, len(text.conditions)))


def _joint(method: Any, device: Any, text: FinishedText, options: dict[str, Any], member: list[int]) -> Tensor | None:
    """The scores `(n, groups + n, layers)` of groups of prompt tokens. None: the method has no joint form.

    A rollout takes the mean of a group's rows. The last prompt token has the row of the first new token, and is a
    group of its own until the layers are joined.
    """
    if isinstance(method, (ALTILogit, ALTIPlus, TokenAttribution, ModelFreeAttribution)):
        return None
    new, groups = len(text.generated), max(member) + 1
    alone = groups if isinstance(method, MapAggregation) else member[-1]
    columns = [*member[:-1], alone]
    sources = columns + [groups + 1 + step for step in range(new - 1)]
    if text.encoder_decoder:  # the sources of cross-attention are the encoder's tokens
        sources = member[: len(text.prompt.ids)]
    rows: Rows = rows_of(method, text, device, torch.tensor([sources]), **options)
    first = [columns.index(group) if group in columns else -1 for group in range(groups)]
    scores = rows.scores[:, [max(place, 0) for place in first]]
    scores[:, [group for group, place in enumerate(first) if place < 0]] = 0
    if alone == groups:  # the last prompt token returns to its group
        scores[:, member[-1]] += rows.scores[:, len(member) - 1]
    return torch.cat([scores, rows.scores[:, len(member) :]], dim=1)


class Rows(NamedTuple):
    """The scores of all given and generated tokens for each generated token.

    Attributes:
        scores: `(n, m + n, layers)`. The last column is 0, because no token follows the last generated token.
        layers: The names of the layers.
    """

    scores: Tensor
    layers: tuple[str, ...]


def build_method(method: Any, model: Any, tokenizer: Any) -> Any:
    """The method of a class, or of a function of the model and its layers. An instance is returned as it is.

    A class of Captum becomes a :class:`~captum_vz.TokenAttribution`. In a model with an encoder, a class with the
    argument `attention` gets "cross", and methods without maps from the encoder are refused.
    """
    if isinstance(method, Attribution):
        return _checked(method, model)
    kind: Any = unwrapped(method)
    of_class = inspect.isclass(kind)
    if of_class and issubclass(kind, TokenAttribution):
        check_class(partial(method, tokenizer=tokenizer))
        return method(model, tokenizer=tokenizer)
    if of_class:
        check_class(method)
    if of_class and issubclass(kind, ModelFreeAttribution):
        return _checked(method(causal=True), model)
    if of_class and is_captums(kind):
        return TokenAttribution(model, method, tokenizer)
    if not callable(method):
        raise ArgumentError(
            f"method is of type {type(method).__name__}: pass a name such as 'value-zeroing', a class such as "
            "ValueZeroing, a function of (model, layers), or a method that was made of them."
        )
    if not of_class:
        check_function(method, "two arguments, the model and its layers", 2)
    options: dict[str, Any] = {}
    if _has_encoder(model):
        layers = find_layers(model, "decoder")
        if of_class and issubclass(kind, ALTIPlus):
            layers = [*find_layers(model, "encoder"), *layers]
        elif of_class:
            _check_sources(kind, getattr(method, "keywords", {}).get("attention", "cross"))
            options["attention"] = "cross"
    else:
        layers = find_layers(model)
    return _checked(method(model, layers, **options), model)


def rows_of(method: Any, text: FinishedText, device: Any, feature_mask: Tensor | None = None, **options: Any) -> Rows:
    """The rows of the generated tokens: from one pass over the finished text, or one call for each step.

    Methods that explain a logit with several runs of the model, or whose scores depend on the length of the text, are
    called for each step with the text so far.

    Args:
        method: What :func:`build_method` returned.
        text: The finished text.
        device: The device of the inputs.
        feature_mask: The feature of each source token, `(1, in)`. None: each token is its own feature.
        options: Further arguments of the method's `attribute`.
    """
    if feature_mask is not None:
        options["feature_mask"] = feature_mask.to(device)
    if _in_one_pass(method, text):
        steps = len(text.generated)
        found = _called(method, text, device, steps, options)
        maps = found if isinstance(found, list) else [found]
        scores = torch.stack([_columns(one[0].detach().cpu(), method, text, steps) for one in maps], dim=-1)
        _check_causal(scores, method, text)
    else:
        rows = []
        for step in range(1, len(text.generated) + 1):
            found = _called(method, text, device, step, _so_far(options, text, step))
            maps = found if isinstance(found, list) else [found]
            rows.append(
                torch.stack([_columns(one[0][None].detach().cpu(), method, text, step)[0] for one in maps], dim=-1)
            )
        scores = torch.stack(rows)
    return Rows(scores, _names(method, scores.shape[-1]))


def _called(method: Any, text: FinishedText, device: Any, steps: int, options: dict[str, Any]) -> Any:
    """The result of one call: the rows of all steps `(1, n, in)`, or the row of the last step `(1, in)`."""
    inputs = text.inputs(device, steps)
    next_token = text.generated[steps - 1]
    if isinstance(method, ALTILogit):
        new = range(steps) if _in_one_pass(method, text) else range(steps - 1, steps)
        target = [text.first + step for step in new], [text.generated[step] for step in new]
        found = method.attribute(inputs, target=[target], **options)
        return found if _in_one_pass(method, text) else found[:, 0]
    if isinstance(method, OF_LOGIT):
        return method.attribute(inputs, target=(text.first + steps - 1, next_token), **options)
    if _explains_output(method):
        options = {"target": (text.first + steps - 1, next_token), **options}
    rows: Any = slice(text.first, text.first + steps) if _in_one_pass(method, text) else text.first + steps - 1
    if isinstance(method, MapAggregation):
        options = {"all_layers": True, **options}
    return method.attribute(inputs, token=rows, **options)


def _in_one_pass(method: Any, text: FinishedText) -> bool:
    """Whether rows of the finished text equal rows of the text so far."""
    several_runs = isinstance(method, OF_LOGIT) or _explains_output(method)
    return text.grows_alike and not several_runs and not getattr(method, "per_receptive_field", False)


def _explains_output(method: Any) -> bool:
    """Whether a method has maps of a number of the output, or joins such maps."""
    return bool(getattr(getattr(method, "maps", method), "explains_output", False))


def _so_far(options: dict[str, Any], text: FinishedText, step: int) -> dict[str, Any]:
    """The options of a step. The feature mask of the whole text ends where the text of the step ends."""
    mask = options.get("feature_mask")
    if mask is None or (text.encoder_decoder and mask.shape[1] == len(text.prompt.ids)):
        return options
    return {**options, "feature_mask": mask[:, : mask.shape[1] - len(text.generated) + step]}


def _columns(rows: Tensor, method: Any, text: FinishedText, steps: int) -> Tensor:
    """Rows `(n, in)` with a column for each given and each generated token, `(n, m + n)`."""
    given = len(text.conditions)
    of_encoder = text.encoder_decoder and not isinstance(method, ALTIPlus)
    wanted = len(text.prompt.ids) if of_encoder else given + steps - 1
    if rows.shape[1] != wanted:
        raise UnsupportedLayerError(
            f"The rows of {_title(method)} have {rows.shape[1]} columns, but the text has {wanted} tokens: the model "
            "adds tokens, or merges them. Such models cannot be explained token by token."
        )
    columns = rows.new_zeros(len(rows), given + len(text.generated))
    columns[:, :wanted] = rows
    return columns


def _check_causal(scores: Tensor, method: Any, text: FinishedText) -> None:
    """Refuse rows that depend on later tokens, which a growing text does not have."""
    if isinstance(method, ModelFreeAttribution) and not method.causal:
        raise ArgumentError(f"{_title(method)} is not causal: pass {_title(method)}(causal=True).")
    given, steps = len(text.conditions), len(scores)
    later = torch.ones(steps, steps).triu().bool()
    if (scores[:, given:] != 0)[later].any():
        raise UnsupportedLayerError(
            "The model is not causal: rows of generated tokens depend on later tokens, so that one pass over the "
            "finished text differs from the passes of its generation. Pass a causal model."
        )


def _checked(method: Any, model: Any) -> Any:
    """Refuse methods of another model, and methods that take no token ids."""
    if not isinstance(method, Attribution):
        raise ArgumentError(
            f"method returned a {type(method).__name__}: pass a class such as ValueZeroing, or a function of (model, "
            "layers) that returns such a method."
        )
    known = (LayerMaps, MapAggregation, ModelFreeAttribution, ALTILogit, *OF_LOGIT)
    if not isinstance(method, known):
        raise ArgumentError(
            f"{type(method).__name__} takes no token ids: pass the class, such as captum.attr.IntegratedGradients, or "
            "a TokenAttribution."
        )
    if getattr(method, "reduce_heads", "") is None:
        raise ArgumentError(
            f"reduce_heads of {_title(method)} is None, which gives a map for each head, but generated text has one "
            "row for each token: choose a reduction, or one head with heads=."
        )
    if _has_encoder(model) and not isinstance(method, (ALTIPlus, TokenAttribution)):
        _check_sources(type(method), getattr(method, "attention", None))
    forward = getattr(method, "forward_func", None)
    if isinstance(forward, nn.Module) and forward is not model and all(forward is not one for one in model.modules()):
        raise ArgumentError(f"{_title(method)} explains another model than the one given. Make it of this model.")
    return method


def _has_encoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _check_sources(kind: Any, attention: Any) -> None:
    """Refuse a method whose sources are not the tokens of the encoder, which are the prompt.

    Args:
        kind: The class of the method.
        attention: The attention that the method explains.
    """
    name = kind.__name__
    if issubclass(kind, MapAggregation) or "attention" not in inspect.signature(kind).parameters:
        raise ArgumentError(
            f"{name} has no maps from an encoder to its decoder: pass ALTIPlus, ValueZeroing, LayerAttention or "
            "ValueZeroingEffect for a model with an encoder."
        )
    if not (isinstance(attention, str) and attention == "cross"):
        shown = repr(attention) if isinstance(attention, str) else "a module"
        raise ArgumentError(
            f"attention of {name} is {shown}, but only the cross-attention of the decoder has the tokens of the prompt "
            f"as sources. Pass the class {name}, or make the method with attention='cross'."
        )


def _names(method: Any, count: int) -> tuple[str, ...]:
    if isinstance(method, (ALTILogit, *OF_LOGIT)):
        return ("output",)
    if isinstance(method, MapAggregation):
        added = "" if method.residual is None else f", residual {method.residual}"
        return (f"layer 0{added}", *(f"layers 0 to {index}{added}" for index in range(1, count)))
    return tuple(f"layer {index}" for index in range(count))


def _title(method: Any) -> str:
    return type(method).__name__
