"""Finished texts: prompts with the tokens that the model generated, or that were given."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from captum_vz.errors import ArgumentError
from captum_vz.generation.prompts import Ids, Prompt
from captum_vz.subjects.heads import device_of, is_encoder_decoder
from captum_vz.subjects.signals import placeholders, signals_of, source_names

# Arguments of `generate` that are also arguments of the model, and that do not change what the tokens represent.
HARMLESS = {
    *("attention_mask", "past_key_values", "cache", "use_cache", "cache_position", "decoder_input_ids"),
    *("logits_to_keep", "output_attentions", "output_hidden_states", "return_dict", "input_ids"),
}


def entries_of(prompt: Any, model: Any) -> dict[str, Any]:
    """The entries of a tokenizer's or a processor's output that the model reads, without ids and mask."""
    if not isinstance(prompt, Mapping) or "sequences" in prompt:  # what generate returned
        return {}
    known = set(inspect.signature(model.forward).parameters) - {"input_ids", "labels"}
    known -= {"attention_mask"} if "input_ids" in prompt else set()
    found = {name: value for name, value in prompt.items() if name in known and value is not None}
    types, config = found.get("token_type_ids"), getattr(model, "config", None)
    if types is not None and hasattr(config, "type_vocab_size") and not torch.as_tensor(types).any():
        del found["token_type_ids"]  # what these models read if they are given none
    return found


@torch.no_grad()
def states_of(model: Any, read: Mapping[str, Tensor]) -> Prompt:
    """The states of an encoder that reads an image or sound as the prompt of what its decoder writes."""
    given = {name: one.to(device_of(model)) for name, one in read.items()}
    states = model.get_encoder()(**given).last_hidden_state
    if len(states) != 1:
        raise ArgumentError(f"The prompt has {len(states)} images or sounds: pass one in each call.")
    names = tuple(source_names(model.config, states.shape[1], read))
    return Prompt((-1,) * len(names), read=read, names=names)


def finish_texts(
    model: Any, tokenizer: Any, prompts: list[Prompt], generated: Any, several: bool, seed: int | None, options: Any
) -> tuple[list[Prompt], bool]:
    """The finished texts, and whether there are several of them.

    If no continuations are given, the tokens after `prompt_length` are, or else the model generates them.
    """
    read = signals_of(options)
    if unknown := set(read) - set(inspect.signature(model.forward).parameters):
        raise ArgumentError(f"{type(model).__name__} takes no {', '.join(sorted(unknown))}: leave it out.")
    if read and len(prompts) > 1:
        raise ArgumentError(f"{', '.join(read)} need a call for each prompt, but there are {len(prompts)}: pass one.")
    prompts = [replace(prompts[0], read={**prompts[0].read, **read}), *prompts[1:]]
    taken = set(inspect.signature(model.forward).parameters) & set(options) - HARMLESS
    if taken:
        named = ", ".join(sorted(taken))
        raise ArgumentError(f"{named} would change what the model reads, and maps read token ids alone: leave it out.")
    start = _start(model, options) if is_encoder_decoder(model) else ()
    if generated is None and prompts[0].rest is None:
        new = _generated(model, tokenizer, prompts, start, seed, options)
        copies = len(new) // len(prompts)  # num_return_sequences
        prompts, several = [prompt for prompt in prompts for _ in range(copies)], several or copies > 1
    else:
        new = _given(model, tokenizer, prompts, generated, start, several, options)
    for index, ids in enumerate(new):
        if not ids:
            raise ArgumentError(f"Prompt {index} has no new tokens: expected at least one. Pass a longer continuation.")
    finished = [replace(one, start=start, generated=ids) for one, ids in zip(prompts, new, strict=True)]
    return finished, several


def _given(
    model: Any, tokenizer: Any, prompts: list[Prompt], generated: Any, start: Ids, several: bool, options: Any
) -> list[Ids]:
    rest = [prompt.rest or () for prompt in prompts]
    if generated is not None and prompts[0].rest is not None:
        raise ArgumentError("Both generated and prompt_length were passed: each gives the new tokens. Pass one.")
    if start and generated is None:
        raise ArgumentError(
            "prompt_length separates a prompt from its continuation, but the decoder of this model returns the "
            "continuation alone. Pass the encoder's tokens as prompt, and what generate returned as generated."
        )
    if set(options) - {"decoder_input_ids"}:
        raise ArgumentError(
            f"The new tokens are given, so nothing is generated: leave out {', '.join(sorted(options))}."
        )
    found = getattr(generated, "sequences", generated)
    if isinstance(found, Tensor):
        found = found.tolist() if found.ndim == 2 and (several or len(found) > 1) else found.reshape(-1).tolist()
    each = rest if generated is None else found if several else [found]
    if isinstance(each, str) or len(each) != len(prompts):
        raise ArgumentError(f"generated has {len(each)} entries for {len(prompts)} prompts: pass one for each.")
    new = []
    for prompt, one in zip(prompts, each, strict=True):
        ids = _encoded(tokenizer, prompt, one, bool(start)) if isinstance(one, str) else tuple(map(int, one))
        ids = _after(start, ids)
        is_row = several and not isinstance(one, str)
        new.append(_without_tail(model, ids, _padding_id(model, tokenizer, options), options) if is_row else ids)
    return new


def _generated(
    model: Any, tokenizer: Any, prompts: list[Prompt], start: Ids, seed: int | None, options: Any
) -> list[Ids]:
    """The new tokens of the model, in batches padded on the left. The random state of torch does not change."""
    if not callable(getattr(model, "generate", None)):
        raise ArgumentError(
            f"{type(model).__name__} has no generate: pass a causal model, or one with an encoder and a decoder."
        )
    pad, side = _padding_id(model, tokenizer, options), "right" if start else "left"
    each = [torch.tensor(prompt.ids) for prompt in prompts]
    ids, device = pad_sequence(each, True, pad, side), device_of(model)
    read = {name: one.to(device) for name, one in prompts[0].read.items()}
    mask = pad_sequence(list(map(torch.ones_like, each)), True, 0, side)
    named: dict[str, Any] = {"tokenizer": tokenizer} if options.get("stop_strings") else {}
    first = () if prompts[0].names else (ids.to(device),)
    if first:
        read["attention_mask"] = mask.to(device)
    else:
        named["return_dict_in_generate"] = True  # Whisper's sequences then begin with the tokens that it starts with
    arguments = {"pad_token_id": pad, **named, **options, **read}

    def run(**further: Any) -> Tensor:
        with torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            written = model.generate(*first, **arguments, **further)
        return getattr(written, "sequences", written)

    found = run()
    places = placeholders(model) if prompts[0].read else set()
    if not places.isdisjoint(found[:, ids.shape[1] :].unique().tolist()):
        warnings.warn(
            "The model writes the token that stands for an image or sound, which has none to read: it writes again, "
            f"with suppress_tokens={sorted(places)}.",
            stacklevel=2,
        )
        found = run(suppress_tokens=sorted(places))
    new = []
    for index, row in enumerate(found.tolist()):
        given = list(start) or ids[index * len(ids) // len(found)].tolist()
        if row[: len(given)] != given or len(row) <= len(given):
            raise ArgumentError(
                f"generate returned {len(row)} tokens that do not continue the {len(given)} tokens it was given. "
                "Pass what it returned, with prompt_length."
            )
        one = tuple(row[len(given) :])
        new.append(_without_tail(model, one, pad, options) if len(found) > 1 else one)
    return new


def foils_of(tokenizer: Any, text: Prompt, foil: Any) -> tuple[list[int | None], list[str]]:
    """The foil of each generated token, and what a user has to know. A word differs in one token, the others have none.

    A word begins with a space if the generated text does.
    """
    steps, last = len(text.generated), text.conditions[-1]
    for one in foil if isinstance(foil, (list, tuple)) else [foil]:
        if one is not None and not (one.strip() if isinstance(one, str) else isinstance(one, int) and one >= 0):
            raise ArgumentError(
                f"foil is {one!r}, no word: pass a word, an id, or a list with one or None for each new token.", "foil"
            )
    if foil is None or isinstance(foil, int):
        return [foil, *[None] * (steps - 1)], []
    before, both = tokenizer.decode([last]), tokenizer.decode([last, text.generated[0]])
    space = " " * both.removeprefix(before).startswith(" ")

    def ids_of(word: str) -> Ids:
        if not text.start:
            return _longer(tokenizer, text, space + word.strip())
        return _after(text.start, _encoded(tokenizer, text, word.strip(), True))

    if isinstance(foil, str):
        ids = ids_of(foil)
        pairs = enumerate(zip(ids, text.generated, strict=False))
        part = next((place for place, (one, other) in pairs if one != other), None)
        if part is None:
            raise ArgumentError(f"foil is {foil!r}, which is what is generated: pass another word.", "foil")
        token = tokenizer.decode([ids[part]])
        told = f"foil {foil} is asked about by its token {token!r}, at step {part}"
        return [ids[part] if place == part else None for place in range(steps)], [told] * (len(ids) > 1)
    if len(foil) != steps:
        raise ArgumentError(f"foil has {len(foil)} entries for {steps} new tokens: pass one for each, or None.", "foil")
    return [ids_of(one)[0] if isinstance(one, str) else one for one in foil], []


def longest_alike(model: Any) -> float:
    """Up to which length rotary positions do not depend on it (dynamic NTK, LongRoPE)."""
    limits: list[float] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if {"dynamic", "longrope"}.isdisjoint(kinds.values() if isinstance(kinds, Mapping) else [kinds]):
            continue
        config = module.config
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        parts = [config.to_dict(), rope, *(one for one in rope.values() if isinstance(one, Mapping))]
        named = ("max_position_embeddings", "original_max_position_embeddings")
        limits += [part[name] for part in parts for name in named if part.get(name) is not None]
    return min(limits, default=float("inf"))


def _start(model: Any, options: dict[str, Any]) -> Ids:
    """The tokens with which the decoder of a model with an encoder starts."""
    given = options.get("decoder_input_ids")
    if given is not None:
        rows = given.reshape(-1, given.shape[-1]).unique(dim=0)
        if len(rows) > 1:
            raise ArgumentError("decoder_input_ids differ between prompts: pass the prompts in separate calls.")
        return tuple(rows[0].tolist())
    number = _setting(model, "decoder_start_token_id", options)
    number = _setting(model, "bos_token_id", options) if number is None else number
    if number is None:
        raise ArgumentError(
            f"{type(model).__name__} has no decoder_start_token_id: pass decoder_input_ids, the first tokens."
        )
    return (int(number),)


def _setting(model: Any, name: str, options: dict[str, Any]) -> Any:
    places = options.get("generation_config"), getattr(model, "generation_config", None), getattr(model, "config", None)
    found = (options.get(name, getattr(place, name, None)) for place in places)
    return next((one for one in found if one is not None), None)


def _stops(model: Any, options: dict[str, Any]) -> list[int]:
    found = _setting(model, "eos_token_id", options)
    return list(found) if isinstance(found, Sequence) else [] if found is None else [found]


def _padding_id(model: Any, tokenizer: Any, options: dict[str, Any]) -> int:
    """The id that fills rows. It is masked, so any id serves if the model and the tokenizer have none."""
    known = _setting(model, "pad_token_id", options), getattr(tokenizer, "pad_token_id", None)
    return int(next(one for one in (*known, *_stops(model, options), 0) if one is not None))


def _without_tail(model: Any, ids: Ids, pad: int, options: dict[str, Any]) -> Ids:
    """The new tokens of one text of a batch, without the padding after a text that ended early."""
    stops, end = _stops(model, options), len(ids)
    while end and ids[end - 1] == pad:
        end -= 1
    if pad in stops:
        return ids[: end + 1]  # the first token of such a tail ended the text
    ended = (end and ids[end - 1] in stops) or {"stop_strings", "stopping_criteria"} & set(options)
    return ids[:end] if ended else ids  # otherwise the model generated these tokens itself


def _encoded(tokenizer: Any, prompt: Prompt, text: str, of_decoder: bool) -> Ids:
    """The ids of a continuation. A warning names a continuation of the prompt's last word."""
    if of_decoder:
        return tuple(tokenizer(text_target=text)["input_ids"])
    ids, before = _longer(tokenizer, prompt, text), prompt.text or ""
    if before[-1:].isalnum() and text[:1].isalnum() and ids != _longer(tokenizer, prompt, f" {text}"):
        warnings.warn(
            f"generated continues the last word of the prompt, {before.split()[-1] + text.split()[0]!r}: begin it with "
            "a space for a new word, or pass token ids.",
            stacklevel=2,
        )
    return ids


def _after(start: Ids, ids: Ids) -> Ids:
    """The ids after the tokens with which a decoder starts, if they begin with these."""
    return ids[len(start) :] if ids[: len(start)] == start else ids


def _longer(tokenizer: Any, prompt: Prompt, text: str) -> Ids:
    """The ids by which a whole text is longer than its prompt, if the two begin alike."""
    texts = [text] if prompt.text is None else [text, prompt.text, prompt.text + text]
    ids, *both = (tuple(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in texts)
    if both and both[1][: len(both[0])] == both[0]:
        return both[1][len(both[0]) :]
    return ids
