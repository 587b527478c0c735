"""Attribute the tokens of a generated text to its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_vz.attr import ALTILogit, ALTIPlus, MapAggregation, ModelFreeAttribution, TokenAttribution
from captum_vz.generation.prompts import Section, read_prompts
from captum_vz.generation.result import GenerationAttribution
from captum_vz.generation.rows import Rows, build_method, rows_of
from captum_vz.generation.texts import FinishedText, device_of, finish_texts
from captum_vz.generation.words import TokenText

#: Captum generates as many tokens by default.
MAX_NEW_TOKENS = 25


def attribute_generation(
    method: Any,
    model: Any,
    tokenizer: Any,
    prompt: Any,
    max_new_tokens: int | None = None,
    *,
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
    for each new token.

    Args:
        method: A class with maps or rows: a layer method, a rollout, :class:`~captum_vz.ALTILogit`,
            :class:`~captum_vz.ValueZeroingEffect`, or a class of Captum that explains inputs. Or a function of (model,
            layers) that returns such a method, such as a `functools.partial`. Or the method itself. In a model with an
            encoder, a class computes maps of the cross-attention, and :class:`~captum_vz.ALTIPlus` includes the
            encoder. A method that was made with `attention="self"`, and a rollout of one stack, are then refused,
            because their sources are not the tokens of the prompt.
        model: A model of transformers with `generate`, in eval mode.
        tokenizer: Its tokenizer. It makes ids of texts, and labels of ids.
        prompt: A text. Chat messages, which become ids by the tokenizer's chat template. Token ids, a list or tensor.
            A tokenizer's output. What `generate` returned, with `prompt_length`. Or a list of texts, of chats or of
            lists of ids, or a tensor of ids with several rows: a batch.
        max_new_tokens: The largest number of new tokens. None: 25, unless `max_length` is passed.
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
    >>> from captum_vz.testbed import load_agreement_model
    >>> model, tokenizer = load_agreement_model("causal")
    >>> found = attribute_generation(ValueZeroing, model, tokenizer, "the pictures of some hat", max_new_tokens=3)
    >>> found.text, found.scores.shape, found.prefix.shape  # (n, m, layers) and (n, n, layers)
    ('were not boring', torch.Size([3, 6, 3]), torch.Size([3, 3, 3]))
    """
    if max_new_tokens is not None:
        generate_kwargs["max_new_tokens"] = max_new_tokens
    elif generated is None and prompt_length is None and not {"max_length", "generation_config"} & set(generate_kwargs):
        generate_kwargs["max_new_tokens"] = MAX_NEW_TOKENS
    prompts, several = read_prompts(tokenizer, prompt, attention_mask, prompt_length)
    texts, several = finish_texts(model, tokenizer, prompts, generated, several, seed, generate_kwargs)
    ready = build_method(method, model, tokenizer)
    found = [_attributed(ready, model, tokenizer, text, method_options or {}) for text in texts]
    return found if several else found[0]


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
        type(method).__name__ if not isinstance(method, partial) else method.func.__name__,
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
