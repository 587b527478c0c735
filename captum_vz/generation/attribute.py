"""Attribute the tokens of a generated text to its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.functional import deciding_layer
from captum_vz.generation.prompts import Prompt, completed, read_prompts
from captum_vz.generation.result import GenerationAttribution
from captum_vz.generation.texts import entries_of, finish_texts, foils_of, longest_alike, states_of
from captum_vz.methods import DECIDING, DECISION, DEEP, MAPS, Method, Question, as_method, check_layer, name_of, shares
from captum_vz.methods.decision import AGAINST_ALL, DecisionMethod
from captum_vz.result import Part, Row, TokenText
from captum_vz.subjects import Subject, heads, parts_of, written_layers
from captum_vz.subjects.signals import signals_of

#: Captum generates as many tokens by default.
MAX_NEW_TOKENS = 25


def attribute_generation(
    model: Any,
    prompt: Any,
    method: Any = None,
    max_new_tokens: int | None = None,
    *,
    tokenizer: Any = None,
    generated: Any = None,
    prompt_length: int | Sequence[int] | None = None,
    attention_mask: Tensor | None = None,
    layer: int | Literal["deciding"] | None = None,
    foil: int | str | Sequence[int | str | None] | None = None,
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
            `prompt_length`. Or a batch: a list of texts, of chats or of lists of ids, or a tensor of several rows. A
            processor's output with an image or sound, one in each call: patches are tokens of the prompt, or, with
            frames of sound, the states of the encoder.
        method: Any of the forms of :func:`~captum_vz.study.as_method`: a name of :data:`~captum_vz.study.METHODS`, a
            class of this package, or of Captum that explains inputs, a `functools.partial` of one, a function of
            (model, layers) that returns a method, the method itself, or a function of a batch. In a model with an
            encoder, a class computes maps of the cross-attention, and :class:`~captum_vz.ALTIPlus` includes the
            encoder. Methods whose sources are not the tokens of the prompt are then refused, such as rollouts. None:
            "value-zeroing-rollout", with an encoder "value-zeroing", with twelve layers or more "decision",
            with Value Zeroing in the layer that decides, because a product of many maps ends in its first column.
        max_new_tokens: The largest number of new tokens. None: 25, unless `max_length` is passed.
        tokenizer: The tokenizer of a model that is passed alone. Captum's `TokenizerLike` is enough. None: prompts are
            ids, and tokens are shown by their ids.
        generated: The new tokens, which are then not generated: a text, ids, or for a batch a list of them. Begin a
            text with a space unless it continues the last word. For a model with an encoder, what `generate` returned.
        prompt_length: The number of tokens, padding included, that are the prompt. The other tokens are generated.
        attention_mask: 0 for the padding of prompts that are tensors, `(batch, tokens)`.
        layer: The only layer that is computed; negative counts from the end. A method that explains each layer by runs
            of its own, such as "value-zeroing-effect-layer", takes less time. Methods without layers ignore it. None:
            all layers.
            "deciding": the first method of the result is "decision", and `method`, which has a map of each layer, has
            for each token the row of the layer that decides, see :func:`~captum_vz.functional.deciding_layer`.
        foil: Why the generated token rather than this one? A word is compared with the generated text: its first token
            that differs is the foil of this token, and the others have none. A list has an entry for each new token: a
            word, of which the first token counts, an id, or None.
        seed: The seed of sampling. The random state of torch is put back. None: the state of torch is used.
        method_options: Further arguments for the method's `attribute`, such as `perturbations_per_eval`.
        generate_kwargs: Further arguments for `model.generate`, such as `do_sample`, `num_beams` (the chosen text is
            attributed), `eos_token_id`, `stop_strings`, and `past_key_values` of the first tokens of the prompt.
            Images, videos and sound, such as `pixel_values`, also go to the pass of the maps. Others that change what
            the model reads, such as `inputs_embeds`, are refused.

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
    model, tokenizer = parts_of(model, tokenizer)
    if max_new_tokens is not None:
        generate_kwargs["max_new_tokens"] = max_new_tokens
    elif generated is None and prompt_length is None and not {"max_length", "generation_config"} & set(generate_kwargs):
        generate_kwargs["max_new_tokens"] = MAX_NEW_TOKENS
    tokenizer = completed(tokenizer)
    generate_kwargs = {**entries_of(prompt, model), **generate_kwargs}
    both = heads.is_encoder_decoder(model)
    if both and getattr(model, "main_input_name", "input_ids") in generate_kwargs:  # an image or a sound alone
        prompts, several = [states_of(model, signals_of(generate_kwargs))], False
    else:
        prompts, several = read_prompts(tokenizer, prompt, attention_mask, prompt_length)
    subject = Subject(model, model, written_layers(model), tokenizer)
    shown = default_method(subject, layer) if method is None else method
    if shown == DECISION and method is None:
        shown, layer = MAPS, DECIDING
    made = as_method(shown).of(subject)
    made = replace(made, options={**made.options, **(method_options or {})})
    asked = {name_of(shown): made}
    if layer == DECIDING:
        if both or not made.shows_layers:
            raise ArgumentError(
                f"layer is {DECIDING!r}, which needs a causal model and a method with a map of each layer, but the "
                f"method is {name_of(shown)}: pass method={MAPS!r}, or the number of a layer.",
                "layer",
            )
        asked, layer = {DECISION: as_method(DECISION), **asked}, None
    if layer is not None and made.layered:
        layer = check_layer(layer, subject.depth)
    if foil is not None and not any(one.explains_output for one in asked.values()):
        raise ArgumentError(
            f"foil is {foil!r}, but {name_of(shown)} explains no output: leave it out, or choose {DECISION}.", "foil"
        )
    texts, several = finish_texts(model, tokenizer, prompts, generated, several, seed, generate_kwargs)
    found = [_explained(text, asked, subject, foil, layer) for text in texts]
    return found if several else found[0]


def default_method(subject: Subject, layer: Any) -> str:
    """The name of the method of generated text, unless the user chooses one; `layer` is what they chose."""
    if heads.is_encoder_decoder(subject.model):
        return MAPS
    if layer == DECIDING or (layer is None and len(subject.layers) >= DEEP):
        return DECISION
    return "value-zeroing-rollout"


def _explained(
    text: Prompt, asked: dict[str, Method], subject: Subject, foil: Any, layer: int | None
) -> GenerationAttribution:
    """The result of one text: of one method, or of what each token rests on and of the maps of layers."""
    tokenizer, found = subject.tokenizer, None
    foils, remarks = foils_of(tokenizer, text, foil)
    if foil is None and any(isinstance(one, DecisionMethod) for one in asked.values()):
        remarks.append(f"each token {AGAINST_ALL}")
    for name, method in asked.items():
        one = layer if method.layered else None
        ask = partial(_scores, method, subject, text, foils if method.explains_output else None, layer=one)
        scores = ask()
        layers = method.layer_names(scores.shape[2]) if one is None else (method.scope(one),)
        if found is not None:
            _add_deciding(found, name, method, scores, layers)
            continue
        names, ids = text.names, text.start if text.names else text.conditions
        given = TokenText.of(tokenizer, ids, text.all_sections).after(names)
        tokens = given, TokenText.of(tokenizer, text.generated)
        written = tokenizer.decode(list(text.generated), skip_special_tokens=True)
        again = partial(_joint, method, text, ask) if method.takes_features else None
        found = GenerationAttribution.of(name, method, scores, layers, *tokens, written, one, again)
        found.told += remarks
    assert found is not None  # there is a method
    return found


def _add_deciding(
    found: GenerationAttribution, name: str, method: Method, scores: Tensor, layers: tuple[str, ...]
) -> None:
    """Add a method with the rows of the layers that decide, from its scores `(n, m + n, layers)`."""
    raw, rows, given = scores.permute(0, 2, 1), list[Row](), len(found.prompt.ids)
    for step, (of_layers, rests_on) in enumerate(zip(raw, found.all_scores[..., 0], strict=True)):
        seen = given + step
        decides = rests_on[:seen].any()
        layer = deciding_layer(shares(of_layers[:, :seen]), rests_on[:seen])[0] if decides else None
        found.deciding.append(layer)
        rows.append(Row(found.rows[step].name, None, of_layers[-1 if layer is None else layer]))
    found.parts[name] = Part(name, method, rows, raw, layers, None)


def _joint(method: Method, text: Prompt, ask: Callable[[Tensor], Tensor], member: list[int]) -> Tensor:
    """The scores `(n, groups + n, layers)` of groups of prompt tokens.

    A rollout takes the mean of a group's rows. The last prompt token has the row of the first new token, and is a
    group of its own until the layers are joined.
    """
    new, groups = len(text.generated), max(member) + 1
    alone = groups if method.joins else member[-1]
    columns = [*member[:-1], alone]
    sources = columns + [groups + 1 + step for step in range(new - 1)]
    if text.start:  # the sources of cross-attention are the encoder's tokens
        sources = member[: len(text.ids)]
    whole = ask(torch.tensor([sources]))
    scores = whole.new_zeros(new, groups, whole.shape[2])
    for group in set(columns) - {groups}:
        scores[:, group] = whole[:, columns.index(group)]
    if alone == groups:  # the last prompt token returns to its group
        scores[:, member[-1]] += whole[:, len(member) - 1]
    return torch.cat([scores, whole[:, len(member) :]], dim=1)


def _scores(
    method: Method,
    subject: Subject,
    text: Prompt,
    foils: Sequence[int | None] | None,
    features: Tensor | None = None,
    *,
    layer: int | None = None,
) -> Tensor:
    """The scores of all given and generated tokens for each generated token, `(n, m + n, layers)`.

    The last column is 0, because no token follows the last generated token. `features`: see :meth:`Method.scores`.
    """
    device, steps, given = subject.device, len(text.generated), len(text.conditions)
    places = list(range(text.first, text.first + steps))
    longest = max(len(text.ids), len(text.start)) + steps - 1
    question = Question(
        text.inputs(device),
        places,
        list(zip(places, text.generated, strict=True)),
        attention="cross" if text.start else "self",
        grows=True,
        row_by_row=longest > longest_alike(subject.model),
    )
    features = None if features is None else features.to(device)
    asked = _by_foil(question, foils or [None] * steps)
    parts = [method.scores(subject, one, features, layer=layer) for one in asked]
    widest = max(one.shape[-1] for one in parts)  # a method that reads a text for each step ends with the last one
    found = torch.cat([pad(one, (0, widest - one.shape[-1])) for one in parts], 1)
    of_encoder = text.start and found.shape[-1] == len(text.ids)
    wanted = found.shape[-1] if of_encoder else given + steps - 1
    if found.shape[-1] != wanted:
        raise UnsupportedLayerError(
            f"The rows of {method.title} have {found.shape[-1]} columns, but the text has {wanted} tokens: the model "
            "adds tokens, or merges them. Such models cannot be explained token by token."
        )
    scores = found.new_zeros(steps, given + steps, len(found))
    scores[:, :wanted] = found.permute(1, 2, 0)
    if (scores[:, given:] != 0)[torch.ones(steps, steps).triu().bool()].any():
        raise UnsupportedLayerError("The model is not causal: rows depend on later tokens. Pass a causal model.")
    return scores


def _by_foil(question: Question, foils: Sequence[int | None]) -> Iterator[Question]:
    """The question about the steps in turn, in groups that all have a foil, or that all have none."""
    assert not callable(question.target) and question.target is not None  # indices of the generated tokens
    rows = zip(question.places, question.target, foils, strict=True)
    for has_foil, group in groupby(rows, lambda row: row[2] is not None):
        places, target, numbers = map(list, zip(*group, strict=True))
        foil = list(zip(places, numbers, strict=True)) if has_foil else None
        yield replace(question, token=places, target=target, foil=foil)
