"""Attribute the tokens of a generated text to its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import find_layers
from captum_vz._names import known_name
from captum_vz.errors import UnsupportedLayerError
from captum_vz.generation.prompts import completed, read_prompts
from captum_vz.generation.result import GenerationAttribution
from captum_vz.generation.texts import FinishedText, device_of, entries_of, finish_texts
from captum_vz.methods import METHODS, Method, Question, as_method, name_of
from captum_vz.result.words import Section, TokenText
from captum_vz.subjects import Subject, check_order, parts_of

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
        method: Any of the forms of :func:`~captum_vz.study.as_method`: a name of :data:`~captum_vz.study.METHODS`, a
            class of this package, or of Captum that explains inputs, a `functools.partial` of one, a function of
            (model, layers) that returns a method, the method itself, or a function of a batch. In a model with an
            encoder, a class computes maps of the cross-attention, and :class:`~captum_vz.ALTIPlus` includes the
            encoder. A method that was made with `attention="self"`, and a rollout of one stack, are then refused,
            because their sources are not the tokens of the prompt.
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
    if isinstance(method, str):
        known_name("method", method, METHODS)
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    subject = Subject(model, model, find_layers(model, "decoder" if both else None), tokenizer)
    made = as_method(method).of(subject)
    made = replace(made, options={**made.options, **(method_options or {})})
    found = [_attributed(made, name_of(method), subject, text) for text in texts]
    return found if several else found[0]


def _attributed(method: Method, name: str, subject: Subject, text: FinishedText) -> GenerationAttribution:
    scores, tokenizer = scores_of(method, subject, text), subject.tokenizer
    return GenerationAttribution.of(
        name,
        method,
        scores,
        method.layer_names(scores.shape[-1]),
        TokenText.of(tokenizer, text.conditions, _sections(text)),
        TokenText.of(tokenizer, text.generated),
        tokenizer.decode(list(text.generated), skip_special_tokens=True),
        partial(_joint, method, subject, text),
    )


def _sections(text: FinishedText) -> tuple[Section, ...]:
    """The sections of the prompt, and the decoder's start as a section of its own."""
    sections = text.prompt.sections
    if not text.encoder_decoder:
        return sections
    source = len(text.prompt.ids)
    return (*(sections or (("source", 0, source),)), ("decoder", source, len(text.conditions)))


def _joint(method: Method, subject: Subject, text: FinishedText, member: list[int]) -> Tensor | None:
    """The scores `(n, groups + n, layers)` of groups of prompt tokens. None: the method has no joint form.

    A rollout takes the mean of a group's rows. The last prompt token has the row of the first new token, and is a
    group of its own until the layers are joined.
    """
    if not method.takes_features:
        return None
    new, groups = len(text.generated), max(member) + 1
    alone = groups if method.joins else member[-1]
    columns = [*member[:-1], alone]
    sources = columns + [groups + 1 + step for step in range(new - 1)]
    if text.encoder_decoder:  # the sources of cross-attention are the encoder's tokens
        sources = member[: len(text.prompt.ids)]
    whole = scores_of(method, subject, text, torch.tensor([sources]))
    first = [columns.index(group) if group in columns else -1 for group in range(groups)]
    scores = whole[:, [max(place, 0) for place in first]]
    scores[:, [group for group, place in enumerate(first) if place < 0]] = 0
    if alone == groups:  # the last prompt token returns to its group
        scores[:, member[-1]] += whole[:, len(member) - 1]
    return torch.cat([scores, whole[:, len(member) :]], dim=1)


def scores_of(method: Method, subject: Subject, text: FinishedText, features: Tensor | None = None) -> Tensor:
    """The scores of all given and generated tokens for each generated token, `(n, m + n, layers)`.

    The last column is 0, because no token follows the last generated token.

    Args:
        method: The method.
        subject: The model.
        text: The finished text.
        features: The feature of each source token, `(1, in)`. None: each token is its own feature.
    """
    device, steps, given = device_of(subject.model), len(text.generated), len(text.conditions)
    places = list(range(text.first, text.first + steps))
    question = Question(
        text.inputs(device, steps),
        places,
        list(zip(places, text.generated, strict=True)),
        attention="cross" if text.encoder_decoder else "self",
        grows=True,
        row_by_row=not text.grows_alike,
    )
    found = method.scores(subject, question, None if features is None else features.to(device))
    of_encoder = text.encoder_decoder and found.shape[-1] == len(text.prompt.ids)
    wanted = found.shape[-1] if of_encoder else given + steps - 1
    if found.shape[-1] != wanted:
        raise UnsupportedLayerError(
            f"The rows of {method.title} have {found.shape[-1]} columns, but the text has {wanted} tokens: the model "
            "adds tokens, or merges them. Such models cannot be explained token by token."
        )
    scores = found.new_zeros(steps, given + steps, len(found))
    scores[:, :wanted] = found.permute(1, 2, 0)
    if (scores[:, given:] != 0)[torch.ones(steps, steps).triu().bool()].any():
        raise UnsupportedLayerError(
            "The model is not causal: rows of generated tokens depend on later tokens, so that one pass over the "
            "finished text differs from the passes of its generation. Pass a causal model."
        )
    return scores
