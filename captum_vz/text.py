"""From the words of a sentence to the tokens of a tokenizer, and files of such sentences.

A sentence is a record, a dict: ``masked``, its ``target`` and ``cue``, and the forms of the target, ``good`` and
``bad``. :class:`captum_vz.study.Example` holds the same under the same names, and :func:`captum_vz.study.encode` finds
its tokens by the functions of this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from transformers import BatchEncoding, PreTrainedTokenizerBase

__all__ = [
    "MASK",
    "EncodedRecord",
    "Record",
    "encode_record",
    "form_ids",
    "read_json_lines",
    "record_spans",
    "split_words",
    "word_spans",
]

# A sentence with the keys that `captum_vz.testbed.mask_target` describes.
Record = dict[str, Any]

MASK: Final = "[MASK]"

_WORD: Final = re.compile(
    r"[^\w\s.,;:!?]*\b(?:[^\W\d_]\.){2,}"  # letters with full stops: "e.g."
    r"|[^\s.,;:!?]+(?:(?<=\d)[.,:](?=\d)[^\s.,;:!?]+)*"  # words, and numbers with marks inside: "3.14"
    r"|[.,;:!?]"
)


def split_words(sentence: str) -> list[str]:
    """The words of a sentence: split at white space, punctuation marks as words of their own.

    >>> split_words("The pictures of some hat [MASK] scaring Marcus's sister.")
    ['The', 'pictures', 'of', 'some', 'hat', '[MASK]', 'scaring', "Marcus's", 'sister', '.']
    >>> split_words("Pi, i.e. 3.14, at 10:30 (a.m.).")
    ['Pi', ',', 'i.e.', '3.14', ',', 'at', '10:30', '(a.m.', ')', '.']
    """
    return [sentence[start:end] for start, end in word_spans(sentence)]


def word_spans(sentence: str) -> list[tuple[int, int]]:
    """The characters `[start, end)` of each word of :func:`split_words`.

    >>> word_spans("Jill left.")
    [(0, 4), (5, 9), (9, 10)]
    """
    return [match.span() for match in _WORD.finditer(sentence)]


class EncodedRecord(NamedTuple):
    """A masked sentence as a tokenizer returns it, with the token positions of its target and of its cues."""

    encoding: BatchEncoding
    target: int
    cue: list[int]


def encode_record(tokenizer: PreTrainedTokenizerBase, record: Record) -> EncodedRecord:
    """Encodes a record's masked sentence and finds the tokens at its word positions.

    The position of a word is the position of its first piece, as in Mohebbi et al. (2023, https://aclanthology.org/2023.eacl-main.245).

    Args:
        tokenizer: Any fast tokenizer with a mask token, which takes the place of ``[MASK]``.
        record: ``masked``, a sentence; ``target``, the word position of its ``[MASK]``, or of another word, which is
            not replaced; and ``cue``, a list of word positions (missing: none). `agreement_sentences` gives all three,
            `mask_target` the first two. Positions count the words of :func:`split_words`, or of ``words`` if the
            record has them: the words in their order in the sentence.

    Returns:
        The encoding, whose tensors are `(1, tokens)`, and the token positions of the target and of the cue words.

    Raises:
        ValueError: The tokenizer has no mask token, or no token for a word. A word is not in the sentence.

    >>> from captum_vz.testbed import load_model
    >>> _, tokenizer = load_model()
    >>> encoded = encode_record(tokenizer, {"masked": "The pictures [MASK] nice.", "target": 2, "cue": [1]})
    >>> tokens = encoded.encoding.tokens()
    >>> tokens[encoded.target], [tokens[position] for position in encoded.cue]
    ('[MASK]', ['pictures'])
    """
    start, end = record_spans(record)[record["target"]]
    form = record["masked"][start:end]
    if form.upper() == MASK:  # the mask of a lower-case sentence is lower case
        form = tokenizer.mask_token
    if form is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no mask token: pass the tokenizer of a masked language model."
        )
    sentence, starts = _fill(record, form)
    encoding = tokenizer(sentence, return_tensors="pt")

    def token(word: int) -> int:
        position = encoding.char_to_token(starts[word])
        if position is None:
            raise ValueError(f"the tokenizer has no token for word {word} of {sentence!r}.")
        return position

    return EncodedRecord(encoding, token(record["target"]), [token(word) for word in record.get("cue", [])])


def form_ids(tokenizer: PreTrainedTokenizerBase, record: Record) -> tuple[int, int] | None:
    """The token ids of a record's ``good`` and ``bad`` form in its sentence, or None if one is not a single token.

    >>> from captum_vz.testbed import load_model
    >>> _, tokenizer = load_model()
    >>> record = {"masked": "The pictures [MASK] nice.", "target": 2, "good": "are", "bad": "is"}
    >>> tokenizer.convert_ids_to_tokens(form_ids(tokenizer, record))
    ['are', 'is']
    """
    ids = []
    for form in (record["good"], record["bad"]):
        sentence, starts = _fill(record, form)
        encoding = tokenizer(sentence)
        start = starts[record["target"]]
        first, last = (encoding.char_to_token(character) for character in (start, start + len(form) - 1))
        if first is None or first != last or encoding["input_ids"][first] == tokenizer.unk_token_id:
            return None
        ids.append(encoding["input_ids"][first])
    good, bad = ids
    return good, bad


def _fill(record: Record, form: str) -> tuple[str, list[int]]:
    """The sentence with `form` in place of its target word, and the first character of each word."""
    spans = record_spans(record)
    start, end = spans[record["target"]]
    starts = [first if first <= start else first + len(form) - (end - start) for first, _ in spans]
    return record["masked"][:start] + form + record["masked"][end:], starts


def record_spans(record: Record) -> list[tuple[int, int]]:
    """The characters `[start, end)` of each word."""
    sentence: str = record["masked"]
    if record.get("words") is None:
        return word_spans(sentence)
    spans, end = [], 0
    for position, word in enumerate(record["words"]):
        start = sentence.find(word, end)
        if start < 0 or sentence[end:start].strip():
            raise ValueError(
                f"word {position} is {word!r}, but the sentence continues with {sentence[end:]!r}: pass the words of "
                f"{sentence!r} in their order."
            )
        end = start + len(word)
        spans.append((start, end))
    return spans


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of each line that is not empty, from 1, and its object.

    Raises:
        ValueError: The file is not text in UTF-8, or a line is not a JSON object. The message names the line.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")  # some programs write a byte order mark
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {number}: it is not text in UTF-8.") from error
    # Only a line feed ends a line, because JSON strings may hold other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{path}, line {number}: it is nested too deep for Python's JSON.") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:60]}")
        yield number, fields
