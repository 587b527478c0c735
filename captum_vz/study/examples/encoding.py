"""From an example's words to the tokens of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_vz.study.examples import Example
from captum_vz.text import MASK, encode_record, form_ids, padded, record_spans


class BadExampleError(ValueError):
    """An example cannot be used with a tokenizer or a model. The message says why."""


@dataclass(frozen=True)
class Encoded:
    """An example as token ids.

    Attributes:
        ids: Its token ids.
        target: The position of the target word's token, where the model predicts. Its row of scores is evaluated.
        cue: The positions of the cue words' tokens: the first piece of each.
        forms: The token ids of the right and the wrong form; None if there are none.
    """

    ids: tuple[int, ...]
    target: int
    cue: tuple[int, ...]
    forms: tuple[int, int] | None


def encode(
    tokenizer: Any,
    example: Example,
    *,
    max_tokens: int | None = None,
    needs_cue: bool = False,
    needs_forms: bool = False,
    until_target: bool = False,
) -> Encoded:
    """Finds the tokens of an example's words. The position of a word is the position of its first piece.

    A target ``[MASK]`` becomes the tokenizer's mask token. For a model that predicts the next token, and for a
    tokenizer without a mask token, the text ends before the target. Then the row of the last token is evaluated, where
    the model predicts the target.

    Args:
        tokenizer: A fast tokenizer of transformers.
        example: The example.
        max_tokens: The largest number of tokens that the model takes. None: no limit.
        needs_cue: Whether an example without a cue is refused.
        needs_forms: Whether an example is refused unless it has two different forms of one token each.
        until_target: Whether the text ends before a target ``[MASK]``, as causal models need it: see
            :func:`~captum_vz.subjects.heads.predicts_next`.

    Raises:
        BadExampleError: The example cannot be used. The message says why.

    >>> from captum_vz.testbed import load_model
    >>> _, tokenizer = load_model()
    >>> encoded = encode(tokenizer, Example("1", ("the", "hats", "[MASK]", "nice"), 2, (1,), "are", "is"))
    >>> tokenizer.convert_ids_to_tokens(encoded.ids)
    ['[CLS]', 'the', 'hats', '[MASK]', 'nice', '[SEP]']
    >>> encoded.target, encoded.cue, tokenizer.convert_ids_to_tokens(encoded.forms)
    (3, (2,), ['are', 'is'])
    """
    count = len(example.words)
    if not 0 <= example.target < count:
        raise BadExampleError(f"the target is word {example.target}, but there are {count} words, 0 to {count - 1}")
    if needs_cue and not example.cue:
        raise BadExampleError("there is no cue")
    for cue in example.cue:
        if not 0 <= cue < count or cue == example.target:
            raise BadExampleError(
                f"the cue is word {cue}: expected one of 0 to {count - 1}, but not the target, {example.target}"
            )
    masked = example.words[example.target] == MASK
    try:
        if masked and (until_target or tokenizer.mask_token is None):
            encoded = _until_target(tokenizer, example)
        else:
            record = example.to_record()
            tokens, target, cues = encode_record(tokenizer, record)
            has_forms = masked and example.good is not None and example.bad is not None
            forms = form_ids(tokenizer, record) if has_forms else None
            encoded = Encoded(tuple(tokens["input_ids"][0].tolist()), target, tuple(cues), forms)
    except BadExampleError:
        raise
    except ValueError as error:
        raise BadExampleError(str(error)) from error
    if needs_forms:
        told = f"the forms {example.good!r} and {example.bad!r} of the target are"
        if None in (example.good, example.bad):
            raise BadExampleError("there are no forms 'good' and 'bad' of the target, which blanking out needs")
        if encoded.forms is None:
            raise BadExampleError(f"{told} not one token each")
        if len(set(encoded.forms)) == 1:
            raise BadExampleError(f"{told} the same token")
    if max_tokens is not None and len(encoded.ids) > max_tokens:
        raise BadExampleError(f"it is {len(encoded.ids)} tokens long, but the model takes at most {max_tokens}")
    return encoded


def pad(tokenizer: Any, examples: Sequence[Encoded], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Examples as one batch, padded on the right: `input_ids` and `attention_mask`, each `(batch, tokens)`."""
    return padded(tokenizer, [{"input_ids": one.ids} for one in examples], device)


def _until_target(tokenizer: Any, example: Example) -> Encoded:
    later = [cue for cue in example.cue if cue > example.target]
    if later:
        raise BadExampleError(
            f"the cue is word {later[0]}, after the target, which a model that predicts the next token cannot see"
        )
    if example.target == 0:
        raise BadExampleError(
            "the target is the first word: a model that predicts the next token has nothing to predict it from"
        )
    record = example.to_record()
    start, _ = record_spans(record)[example.target]
    text = record["masked"][:start].rstrip()
    before = {"masked": text, "words": record["words"][: example.target], "cue": record["cue"]}
    tokens, _, cues = encode_record(tokenizer, before | {"target": example.target - 1})

    def without_end(ids: list[int]) -> list[int]:
        return ids[:-1] if len(ids) > 1 and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id) else ids

    ids, forms = without_end(tokens["input_ids"][0].tolist()), []
    for form in filter(None, (example.good, example.bad)):  # right after the text, if they are one token each
        longer = without_end(tokenizer(f"{text} {form}")["input_ids"])
        forms += longer[-1:] if longer[:-1] == ids and longer[-1] != tokenizer.unk_token_id else []
    return Encoded(tuple(ids), len(ids) - 1, tuple(cues), (forms[0], forms[1]) if len(forms) == 2 else None)
