"""From the words of a sentence to the tokens of a tokenizer, files of such sentences, and batches of texts.

A sentence is a record, a dict: ``masked``, its ``target`` and ``cue``, and the forms of the target, ``good`` and
``bad``. :class:`captum_vz.study.Example` holds the same under the same names, and :func:`captum_vz.study.encode` finds
its tokens by the functions of this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchEncoding, PreTrainedTokenizerBase

from captum_vz._private import NullProgress, progress, tree_map
from captum_vz.errors import ArgumentError

__all__ = [
    "MASK",
    "EncodedRecord",
    "Record",
    "attribute_texts",
    "encode_record",
    "form_ids",
    "read_json_lines",
    "record_spans",
    "split_words",
    "word_spans",
]

T = TypeVar("T")

# A sentence with the keys that `captum_vz.testbed.mask_target` describes.
Record = dict[str, Any]

MASK: Final = "[MASK]"

# Letters with full stops, "e.g.", and titles before a name, "Dr. Who".
_SHORT: Final = r"\b(?:(?:[^\W\d_]\.){2,}|(?i:mr|mrs|ms|dr|prof|st|vs)\.(?=\s+\w))"
_WORD: Final = re.compile(
    rf"[^\w\s.,;:!?…]*{_SHORT}"
    r"|[^\s.,;:!?…]+(?:(?<=\d)[.,:](?=\d)[^\s.,;:!?…]+)*"  # words, and numbers with marks inside: "3.14"
    r"|[.,;:!?…]"
)
# Marks that belong to the word before them, and those of the end of a sentence.
MARKED: Final = re.compile(rf"{_SHORT}|\d+(?:[.,:]\d+)+|(?<=\w)['’-](?=\w)|[.!?…]+[\"')\]]+")


def split_words(sentence: str) -> list[str]:
    """The words of a sentence: split at white space, punctuation marks as words of their own.

    >>> split_words("The pictures of some hat [MASK] scaring Marcus's sister.")
    ['The', 'pictures', 'of', 'some', 'hat', '[MASK]', 'scaring', "Marcus's", 'sister', '.']
    >>> split_words("Dr. Who: i.e. 3.14, at 10:30 (a.m.).")
    ['Dr.', 'Who', ':', 'i.e.', '3.14', ',', 'at', '10:30', '(a.m.', ')', '.']
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
    return ids[0], ids[1]


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
    """The number of each line that is not empty, from 1, and its object. A ValueError names a line that has none."""
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
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, got {line.strip()[:60]}")
        yield number, fields


def attribute_texts(
    method: Any,
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_tokens: int = 1024,
    show_progress: bool = False,
    **asked: Any,
) -> list[Any]:
    """Attributions of many texts, which run in batches of texts of similar length.

    This takes a third to a twelfth of the time of one text after another. Batches change numbers by rounding only.

    Args:
        method: A method of this package, such as :class:`~captum_vz.ValueZeroing`.
        texts: The texts.
        tokenizer: The tokenizer of the model.
        batch_tokens: The most tokens in a batch, padding included. A longer text is a batch of its own.
        show_progress: Whether to show a progress bar, with one step for each text.
        **asked: Further arguments of `attribute`, without a `feature_mask`. A list of `target`, `foil` or `token` has
            one entry for each text. Negative positions count from the end of each text.

    Returns:
        For each text, in the order given, what `attribute` returns for this text alone, without the axis of the batch.
        For a list of layers this is a list.

    Raises:
        ArgumentError: `texts` is one text. `batch_tokens` is less than 1. A list has another length than `texts`.
        RefusedError: As `attribute`.

    >>> from captum_vz import ValueZeroing
    >>> from captum_vz.testbed import load_model
    >>> model, tokenizer = load_model()
    >>> texts = ["some hat [MASK] scaring marcus.", "the pictures of some hat [MASK] scaring marcus."]
    >>> rows = attribute_texts(ValueZeroing(model, model.bert.encoder.layer[3]), texts, tokenizer, token=[3, 6])
    >>> [tuple(row.shape) for row in rows]
    [(8,), (11,)]
    """
    if isinstance(texts, str):
        raise ArgumentError(f"texts is {texts!r}: pass a list of texts.", "texts")
    if batch_tokens < 1:
        raise ArgumentError(f"batch_tokens is {batch_tokens}: pass at least 1.", "batch_tokens")
    encoded = [dict(tokenizer(text)) for text in texts]
    sizes = [len(one["input_ids"]) for one in encoded]
    each = {name: _of_each(name, asked[name], sizes) for name in ("target", "foil", "token") if name in asked}
    is_map = not getattr(method, "by_layer", False) and all(asked.get(name) is None for name in ("target", "token"))
    model = getattr(method, "forward_func", None)
    device = next(model.parameters()).device if isinstance(model, nn.Module) else "cpu"
    found: list[Any] = [None] * len(sizes)
    by_length = sorted(range(len(sizes)), key=sizes.__getitem__)
    with progress(desc="texts", total=len(sizes)) if show_progress else NullProgress() as bar:
        for places in fill_batches(by_length, sizes.__getitem__, len(sizes), batch_tokens):
            inputs = padded(tokenizer, [encoded[place] for place in places], device)
            of_batch = {name: [one[place] for place in places] for name, one in each.items() if isinstance(one, list)}
            result = method.attribute(inputs, **asked | of_batch)
            for number, place in enumerate(places):
                found[place] = tree_map(partial(_without_padding, number, sizes[place], is_map), result)
            bar.update(len(places))
    return found


def _without_padding(number: int, size: int, is_map: bool, result: Tensor) -> Tensor:
    """One example of a result, with its first `size` columns; of a map `(..., out, in)`, also its first rows."""
    own = result[number, ..., :size]
    return (own[..., :size, :] if is_map and own.dim() > 1 else own).clone()


def _of_each(name: str, value: Any, sizes: Sequence[int]) -> Any:
    """A list with an entry for each text. Positions count from the start. What is the same for all stays as it is."""
    value = value.tolist() if isinstance(value, Tensor) and value.dim() else value
    if isinstance(value, list) and len(value) != len(sizes):
        raise ArgumentError(f"{name} has {len(value)} entries: pass one for each of {len(sizes)} texts.", name)

    def from_start(entry: Any, size: int) -> Any:
        if name == "token":
            return entry + size if type(entry) is int and entry < 0 else entry
        is_moved = isinstance(entry, tuple) and len(entry) > 1 and type(entry[0]) is int and entry[0] < 0
        return (entry[0] + size, *entry[1:]) if is_moved else entry  # (token, entry)

    several = value if isinstance(value, list) else [value] * len(sizes)
    moved = [from_start(one, size) for one, size in zip(several, sizes, strict=True)]
    return value if moved == several else moved


def padded(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Mapping[str, Any]], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Texts with `input_ids` as one batch, padded on the right, with an `attention_mask`, `(batch, tokens)` each."""
    # The attention mask hides padding, so any id may be used.
    filler = {"input_ids": tokenizer.pad_token_id or 0}

    def joined(name: str, rows: Iterable[Sequence[int]]) -> Tensor:
        each = [torch.tensor(row, device=device) for row in rows]
        return pad_sequence(each, batch_first=True, padding_value=filler.get(name, 0))

    mask = joined("attention_mask", ([1] * len(one["input_ids"]) for one in texts))
    return {name: joined(name, (one[name] for one in texts)) for name in texts[0]} | {"attention_mask": mask}


def fill_batches(items: Iterable[T], length: Callable[[T], int], most: int, tokens: int) -> Iterator[list[T]]:
    """Batches of items that are sorted by length: at most `most` items, and `tokens` tokens with padding.

    A longer item is a batch of its own.
    """
    batch: list[T] = []
    for item in items:
        if batch and (len(batch) == most or (len(batch) + 1) * length(item) > tokens):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
