"""Attribute the tokens of a generated text to its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz._engine import find_layers
from captum_vz._names import known_name
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.generation.prompts import completed, read_prompts
from captum_vz.generation.result import GenerationAttribution
from captum_vz.generation.texts import FinishedText, device_of, entries_of, finish_texts, longest_alike
from captum_vz.methods import METHODS, Method, Question, as_method, name_of
from captum_vz.result.words import TokenText
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
    layer: int | None = None,
    seed: int | None = None,
    method_options: dict[str, Any] | None = None,
    **generate_kwargs: Any,
) -> Any:
    r"""How much each generated token depends on each token of its prompt, in each layer.

    .. math:: M_{tjl} = (R_l)_{m + t - 2,\, j}, \qquad t = 1 \dots n

    where :math:`R_l` is the method's map of layer l. The prompt has m tokens. New token t is predicted at the position
    before it, so the row of the first new token is the row of the last prompt token. The model is causal: one pass over
    the finished text, without its last token, gives the same rows as one pass for each step. Each text runs alone.

    Methods that explain a logit with several runs of the model (gradients, ValueZeroingEffect, LayerAttentionGradient),
    and methods with `per_receptive_field`, are called for each new token. So are all methods if the model's positions
    depend on the length of the text (dynamic NTK, LongRoPE), and the text is so long that they do.

    Args:
        model: A model with `generate`, as :func:`captum_vz.explain` takes it: a name, a folder, a model with
            `tokenizer`, a pair of both, or a pipeline.
        prompt: A text. Chat messages. Token ids, a list or tensor. A tokenizer's output. What `generate` returned, with
            `prompt_length`. Or a batch: a list of texts, of chats or of lists of ids, or a tensor of several rows.
        method: Any of the forms of :func:`~captum_vz.study.as_method`: a name of :data:`~captum_vz.study.METHODS`, a
            class of this package, or of Captum that explains inputs, a `functools.partial` of one, a function of
            (model, layers) that returns a method, the method itself, or a function of a batch. In a model with an
            encoder, a class computes maps of the cross-attention, and :class:`~captum_vz.ALTIPlus` includes the
            encoder. Methods whose sources are not the tokens of the prompt are then refused, such as rollouts.
        max_new_tokens: The largest number of new tokens. None: 25, unless `max_length` is passed.
        tokenizer: The tokenizer of a model that is passed alone. Captum's `TokenizerLike` is enough. None: prompts are
            ids, and tokens are shown by their ids.
        generated: The new tokens, which are then not generated: a text, ids, or for a batch a list of them. Begin a
            text with a space unless it continues the last word. For a model with an encoder, what `generate` returned.
        prompt_length: The number of tokens, padding included, that are the prompt. The other tokens are generated.
        attention_mask: 0 for the padding of prompts that are tensors, `(batch, tokens)`.
        layer: The only layer that is computed, from 0: a method that explains each layer by runs of its own, such as
            "value-zeroing-effect-layer", takes less time. Methods without layers ignore it. None: all layers.
        seed: The seed of sampling. The random state of torch is put back. None: the state of torch is used.
        method_options: Further arguments for the method's `attribute`, such as `perturbations_per_eval`.
        generate_kwargs: Further arguments for `model.generate`, such as `do_sample`, `num_beams` (the chosen text is
            attributed), `eos_token_id`, and `past_key_values` of the first tokens of the prompt. Arguments that change
            the inputs of the model, such as `inputs_embeds`, are refused.

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
    if isinstance(method, str):
        known_name("method", method, METHODS)
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    subject = Subject(model, model, find_layers(model, "decoder" if both else None), tokenizer)
    made = as_method(method).of(subject)
    made = replace(made, options={**made.options, **(method_options or {})})
    if layer is not None and layer < 0:
        raise ArgumentError(f"layer is {layer}: pass the number of a layer, from 0.", "layer")
    layer = layer if made.layered else None
    generate_kwargs = {**entries_of(prompt, model), **generate_kwargs}
    texts, several = finish_texts(model, tokenizer, prompts, generated, several, seed, generate_kwargs)
    found = []
    for text in texts:
        ask = partial(_scores, made, subject, text, layer=layer)
        scores = ask()
        layers = made.layer_names(scores.shape[2]) if layer is None else (made.scope(layer),)
        tokens = TokenText.of(tokenizer, text.conditions, text.sections), TokenText.of(tokenizer, text.generated)
        written = tokenizer.decode(list(text.generated), skip_special_tokens=True)
        again = partial(_joint, made, text, ask) if made.takes_features else None
        found.append(GenerationAttribution.of(name_of(method), made, scores, layers, *tokens, written, layer, again))
    return found if several else found[0]


def _joint(method: Method, text: FinishedText, ask: Callable[[Tensor], Tensor], member: list[int]) -> Tensor:
    """The scores `(n, groups + n, layers)` of groups of prompt tokens.

    A rollout takes the mean of a group's rows. The last prompt token has the row of the first new token, and is a
    group of its own until the layers are joined.
    """
    new, groups = len(text.generated), max(member) + 1
    alone = groups if method.joins else member[-1]
    columns = [*member[:-1], alone]
    sources = columns + [groups + 1 + step for step in range(new - 1)]
    if text.start:  # the sources of cross-attention are the encoder's tokens
        sources = member[: len(text.prompt.ids)]
    whole = ask(torch.tensor([sources]))
    scores = whole.new_zeros(new, groups, whole.shape[2])
    for group in set(columns) - {groups}:
        scores[:, group] = whole[:, columns.index(group)]
    if alone == groups:  # the last prompt token returns to its group
        scores[:, member[-1]] += whole[:, len(member) - 1]
    return torch.cat([scores, whole[:, len(member) :]], dim=1)


def _scores(
    method: Method, subject: Subject, text: FinishedText, features: Tensor | None = None, *, layer: int | None = None
) -> Tensor:
    """The scores of all given and generated tokens for each generated token, `(n, m + n, layers)`.

    The last column is 0, because no token follows the last generated token. `features`: see :meth:`Method.scores`.
    """
    device, steps, given = device_of(subject.model), len(text.generated), len(text.conditions)
    places = list(range(text.first, text.first + steps))
    longest = max(len(text.prompt.ids), len(text.start)) + steps - 1
    question = Question(
        text.inputs(device),
        places,
        list(zip(places, text.generated, strict=True)),
        attention="cross" if text.start else "self",
        grows=True,
        row_by_row=longest > longest_alike(subject.model),
    )
    found = method.scores(subject, question, None if features is None else features.to(device), layer=layer)
    of_encoder = text.start and found.shape[-1] == len(text.prompt.ids)
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
