"""Finished texts: a prompt and the tokens that the model generated, or that were given."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz.errors import ArgumentError
from captum_vz.generation.prompts import Prompt

# Arguments of `generate` that are also arguments of the model, and that do not change what the tokens represent.
HARMLESS = {
    *("attention_mask", "past_key_values", "cache", "use_cache", "cache_position", "decoder_input_ids"),
    *("logits_to_keep", "output_attentions", "output_hidden_states", "return_dict", "input_ids"),
}


@dataclass(frozen=True)
class FinishedText:
    """A prompt with all tokens of its continuation.

    Attributes:
        prompt: The prompt. In a model with an encoder, the tokens of the encoder.
        start: The tokens with which the decoder starts, in a model with an encoder. Otherwise empty.
        generated: The token ids of the continuation.
        encoder_decoder: Whether the model has an encoder.
        short_positions: How many tokens a text has at most, up to which the model's positions do not depend on the
            number of tokens. None: they never do.
    """

    prompt: Prompt
    start: tuple[int, ...]
    generated: tuple[int, ...]
    encoder_decoder: bool = False
    short_positions: int | None = None

    @property
    def grows_alike(self) -> bool:
        """Whether the tokens of the finished text have the positions that they have in the text so far."""
        longest = max(len(self.prompt.ids), len(self.start)) + len(self.generated) - 1
        return self.short_positions is None or longest <= self.short_positions

    @property
    def conditions(self) -> tuple[int, ...]:
        """The tokens that were given: the prompt, and the tokens with which a decoder starts."""
        return self.prompt.ids + self.start

    @property
    def first(self) -> int:
        """The position whose row belongs to the first new token. Position i predicts the token at i + 1."""
        return len(self.start if self.encoder_decoder else self.prompt.ids) - 1

    def inputs(self, device: Any, steps: int) -> dict[str, Tensor]:
        """The inputs of the model from which the first `steps` new tokens are predicted. The last is no input."""
        prompt, before = self.prompt.ids, self.generated[: steps - 1]
        ids = torch.tensor([prompt if self.encoder_decoder else prompt + before], device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.encoder_decoder:
            inputs["decoder_input_ids"] = torch.tensor([self.start + before], device=device)
        return inputs


def entries_of(prompt: Any, model: Any) -> dict[str, Any]:
    """The entries of a tokenizer's output that the model reads, without ids and attention mask, for `generate`."""
    if not (isinstance(prompt, Mapping) and "input_ids" in prompt):
        return {}
    known = set(inspect.signature(model.forward).parameters) - {"input_ids", "attention_mask", "labels"}
    found = {name: value for name, value in prompt.items() if name in known and value is not None}
    types = found.get("token_type_ids")
    if types is not None and hasattr(model.config, "type_vocab_size") and not _any_nonzero(types):
        del found["token_type_ids"]  # what these models read if they are given none
    return found


def _any_nonzero(types: Any) -> bool:
    return any(map(_any_nonzero, types)) if isinstance(types, (list, tuple)) else bool(torch.as_tensor(types).any())


def finish_texts(
    model: Any, tokenizer: Any, prompts: list[Prompt], generated: Any, several: bool, seed: int | None, options: Any
) -> tuple[list[FinishedText], bool]:
    """The finished texts, and whether there are several of them.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        prompts: The prompts.
        generated: The continuations. None: the tokens after `prompt_length`, or else the model generates them.
        several: Whether the prompts are a batch.
        seed: The seed of sampling.
        options: The arguments of `generate`.
    """
    taken = set(inspect.signature(model.forward).parameters) & set(options) - HARMLESS
    if taken:
        raise ArgumentError(
            f"{', '.join(sorted(taken))} would change what the model reads, but the maps are computed from token ids "
            "alone. Leave it out, or pass a model that adds it itself."
        )
    both = bool(getattr(model.config, "is_encoder_decoder", False))
    start = _start(model, options) if both else ()
    rest = [prompt.rest for prompt in prompts]
    if generated is None and rest[0] is None:
        return _generate(model, tokenizer, prompts, start, several, seed, both, options)
    if generated is not None and rest[0] is not None:
        raise ArgumentError("Both generated and prompt_length were passed: each gives the new tokens. Pass one.")
    if both and rest[0] is not None:
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
    each = rest if generated is None else (found if several else [found])
    if isinstance(each, str) or len(each) != len(prompts):
        raise ArgumentError(f"generated has {len(each)} entries for {len(prompts)} prompts: pass one for each.")
    texts = []
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        ids = _encoded(tokenizer, prompt, one, both) if isinstance(one, str) else tuple(int(i) for i in one)
        ids = ids[len(start) :] if both and ids[: len(start)] == start else ids
        if several and not isinstance(one, str):
            ids = _without_tail(model, ids, _padding_id(model, tokenizer, options), options)
        if not ids:
            raise ArgumentError(f"Prompt {index} has no new tokens: expected at least one. Pass a longer continuation.")
        texts.append(FinishedText(prompt, start, ids, both, _short_positions(model)))
    return texts, several


def _generate(
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    start: tuple[int, ...],
    several: bool,
    seed: int | None,
    both: bool,
    options: dict[str, Any],
) -> tuple[list[FinishedText], bool]:
    """Let the model continue the prompts, padded on the left. The random state of torch does not change."""
    if not callable(getattr(model, "generate", None)):
        raise ArgumentError(
            f"{type(model).__name__} has no generate, so it continues no text: pass a causal model, or a model with an "
            "encoder and a decoder."
        )
    pad = _padding_id(model, tokenizer, options)
    rows, mask = _padded(prompts, pad, on_the_right=both)
    ids = torch.tensor(rows, device=device_of(model))
    arguments = {"pad_token_id": pad, **options, "attention_mask": torch.tensor(mask, device=device_of(model))}
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        found = model.generate(ids, **arguments)
    found = getattr(found, "sequences", found)
    copies = len(found) // len(prompts)  # num_return_sequences
    texts = []
    for index, row in enumerate(found.tolist()):
        prompt, given = prompts[index // copies], list(start) if both else rows[index // copies]
        if row[: len(given)] != given or len(row) <= len(given):
            raise ArgumentError(
                f"generate returned {len(row)} tokens that do not continue the {len(given)} tokens it was given. "
                "Pass what it returned, with prompt_length."
            )
        new = tuple(row[len(given) :])
        new = _without_tail(model, new, pad, options) if len(found) > 1 else new
        if not new:
            raise ArgumentError(f"generate returned no new token for prompt {index // copies}: pass a longer length.")
        texts.append(FinishedText(prompt, start, new, both, _short_positions(model)))
    return texts, several or copies > 1


def _short_positions(model: Any) -> int | None:
    """Up to which length rotary positions do not depend on it (dynamic NTK, LongRoPE). None: at any length."""
    limits: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if {"dynamic", "longrope"}.isdisjoint(kinds.values() if isinstance(kinds, Mapping) else [kinds]):
            continue
        config = module.config
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        parts = [config.to_dict(), rope, *(one for one in rope.values() if isinstance(one, Mapping))]
        named = ("max_position_embeddings", "original_max_position_embeddings")
        limits += [part[name] for part in parts for name in named if part.get(name) is not None]
    return min(limits, default=None)


def _padded(prompts: list[Prompt], pad: int, on_the_right: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and masks of one length. A decoder continues the last token, so its padding stands on the left."""
    longest = max(len(prompt.ids) for prompt in prompts)
    rows, masks = [], []
    for prompt in prompts:
        empty = [0] * (longest - len(prompt.ids))
        ids, ones, padding = list(prompt.ids), [1] * len(prompt.ids), [pad] * len(empty)
        rows.append(ids + padding if on_the_right else padding + ids)
        masks.append(ones + empty if on_the_right else empty + ones)
    return rows, masks


def _start(model: Any, options: dict[str, Any]) -> tuple[int, ...]:
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
            f"{type(model).__name__} has no decoder_start_token_id: pass decoder_input_ids, the first tokens of the "
            "decoder."
        )
    return (int(number),)


def _setting(model: Any, name: str, options: dict[str, Any]) -> Any:
    """A setting of the generation, from the arguments or from the model."""
    for place in (options.get("generation_config"), getattr(model, "generation_config", None), model.config):
        found = options.get(name, getattr(place, name, None))
        if found is not None:
            return found
    return None


def _padding_id(model: Any, tokenizer: Any, options: dict[str, Any]) -> int:
    """The id that fills rows. It is masked, so any id serves if the model and the tokenizer have none."""
    stops = _setting(model, "eos_token_id", options)
    stop = stops[0] if isinstance(stops, Sequence) and stops else stops
    found = _setting(model, "pad_token_id", options), getattr(tokenizer, "pad_token_id", None), stop, 0
    return int(next(one for one in found if one is not None))


def _without_tail(model: Any, ids: tuple[int, ...], pad: int, options: dict[str, Any]) -> tuple[int, ...]:
    """The new tokens of one text of a batch, without the padding after a text that ended early."""
    stops = _setting(model, "eos_token_id", options)
    stops = set(stops if isinstance(stops, Sequence) else [] if stops is None else [stops])
    end = len(ids)
    while end and ids[end - 1] == pad:
        end -= 1
    if pad in stops:
        return ids[: end + 1]  # the first token of such a tail ended the text
    ended = (end and ids[end - 1] in stops) or {"stop_strings", "stopping_criteria"} & set(options)
    return ids[:end] if ended else ids  # otherwise the model generated these tokens itself


def _encoded(tokenizer: Any, prompt: Prompt, text: str, both: bool) -> tuple[int, ...]:
    """The ids of a continuation. A warning names a continuation of the prompt's last word."""
    if both:
        return tuple(tokenizer(text_target=text)["input_ids"])
    ids = _longer(tokenizer, prompt, text)
    before = prompt.text or ""
    if before[-1:].isalnum() and text[:1].isalnum() and ids != _longer(tokenizer, prompt, f" {text}"):
        warnings.warn(
            f"generated continues the last word of the prompt, {before.split()[-1] + text.split()[0]!r}: begin it with "
            "a space for a new word, or pass token ids.",
            stacklevel=2,
        )
    return ids


def _longer(tokenizer: Any, prompt: Prompt, text: str) -> tuple[int, ...]:
    """The ids by which a whole text is longer than its prompt, if the two begin alike."""
    if prompt.text is not None:
        whole = tokenizer(prompt.text + text, add_special_tokens=False)["input_ids"]
        head = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        if whole[: len(head)] == head:
            return tuple(whole[len(head) :])
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def device_of(model: Any) -> torch.device:
    """Where inputs go. The weights of an offloaded model are on no device, and its hooks move the inputs."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device
