"""The examples of a study: sentences with a target word and cue words; files of them; and their tokens."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from captum_vz import text as texts
from captum_vz._files import write_file
from captum_vz.errors import ArgumentError
from captum_vz.text import MASK, Record, split_words


@dataclass(frozen=True)
class Example:
    """A sentence with a target word, whose row of scores is evaluated, and cue words, on which the row should lie.

    Positions count words from 0. A study skips an example that :func:`encode` refuses, and records the reason.

    Attributes:
        id: A name that no other example of the study has.
        words: The words. ``[MASK]`` stands for a target that the model predicts.
        target: The position of the target word.
        cue: The positions of the words that decide on the target's form; empty if they are not known.
        good: The right form of the target word, if it is masked.
        bad: The wrong form.
        label: The label that a probe predicts, such as "singular".
        group: The group in which examples are summarised, such as BLiMP's paradigm.
        text: The sentence as it is written, with the words in their order. None: the words with spaces between them.
        other_cue: The cue words in the other number, for :func:`~captum_vz.study.value_patching`; empty if not known.

    >>> Example("1", ("The", "pictures", "[MASK]", "nice", "."), 2, (1,), "are", "is", text="The pictures [MASK] nice.")
    Example(id='1', words=('The', 'pictures', '[MASK]', 'nice', '.'), target=2, cue=(1,), good='are', bad='is', ...)
    """

    id: str
    words: tuple[str, ...]
    target: int
    cue: tuple[int, ...] = ()
    good: str | None = None
    bad: str | None = None
    label: str | None = None
    group: str = ""
    text: str | None = None
    other_cue: tuple[str, ...] = ()

    @classmethod
    def from_record(cls, record: Record, id: str | None = None) -> Example:
        """The example of a record of the testbed: of `agreement_sentences`, `mask_target` or `held_out`.

        Without an id, its ``UID`` and ``pairID`` are the id. See :meth:`from_dict` for the other fields.
        """
        return cls.from_dict(record | {"id": id or f"{record.get('UID', '')} {record.get('pairID', '')}".strip()})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Example:
        """The example of a dictionary, from :meth:`to_dict` or from another program.

        The keys are the attributes. ``words`` may be called ``tokens``, ``text`` the testbed's ``masked`` and ``group``
        BLiMP's ``UID``. Words are optional if there is a text, which :func:`~captum_vz.text.split_words` splits. All
        entries except ``target`` may be None or missing. Other keys are ignored.

        Raises:
            ValueError: A field is missing, or of another type. The message says which.
        """
        text, words, cue = _text(fields, "text", "masked"), _first(fields, "words", "tokens"), _first(fields, "cue")
        if words is None and text is None:
            raise ValueError(f"there are neither words (or tokens) nor a text in the fields {sorted(fields)}.")
        return cls(
            id=_text(fields, "id") or "",
            words=tuple(split_words(text or "")) if words is None else _words(words, "words (or tokens)"),
            target=_position(_first(fields, "target"), "target"),
            cue=tuple(_position(one, "cue") for one in (() if cue is None else cue if _is_sequence(cue) else [cue])),
            good=_text(fields, "good"),
            bad=_text(fields, "bad"),
            label=_text(fields, "label"),
            group=_text(fields, "group", "UID") or "",
            text=text,
            other_cue=_words(_first(fields, "other_cue") or (), "other_cue"),
        )

    def to_dict(self) -> dict[str, Any]:
        """All attributes by their names, in the types of JSON."""
        lists = {"words": list(self.words), "cue": list(self.cue), "other_cue": list(self.other_cue)}
        return asdict(self) | lists

    def to_record(self) -> Record:
        """A record of the testbed: ``masked`` (the sentence), ``words``, ``target``, ``cue``, and the forms."""
        text = " ".join(self.words) if self.text is None else self.text
        fields = self.to_dict()
        return {"masked": text} | {name: fields[name] for name in ("words", "target", "cue", "good", "bad")}


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    """The first of some entries that is there. Tables of numpy and pandas write None as NaN."""
    found = (fields.get(name) for name in names)
    return next((one for one in found if one is not None and not (isinstance(one, Real) and one != one)), None)


def _text(fields: Mapping[str, Any], *names: str) -> str | None:
    value = _first(fields, *names)
    if isinstance(value, bool) or not isinstance(value, (str, Integral, type(None))):
        raise ValueError(f"{' or '.join(names)} is {value!r}: expected a string.")
    return None if value is None else _encodable(str(value), " or ".join(names))


def _words(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str) or not _is_sequence(value) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{name} is {value!r}: expected a list of strings.")
    return tuple(_encodable(str(word), name) for word in value)


def _encodable(text: str, name: str) -> str:
    """The text, if it can be encoded: JSON may hold halves of characters, as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is {text!r}, which holds half of a character at {error.start}.") from error
    return text


def _position(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"{name} is {value!r}: expected the position of a word, from 0.")
    return index(value)  # numpy's integers too


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1


def read_jsonl(path: str | Path) -> list[Example]:
    """Reads examples from a file with one JSON object a line: the words, the target's position and the cue's.

    .. code-block:: json

        {"tokens": ["The", "pictures", "[MASK]", "nice", "."], "target": 2, "cue": [1], "good": "are", "bad": "is"}

    The keys of a line are those of :meth:`Example.from_dict`, so BLiMP's records with ``masked`` are read as well. An
    example without a ``group`` gets the file's name without its ending, and one without an ``id`` its group and the
    number of its line.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not a JSON object, or has no words or no target. The message names the line.
    """
    path = _file(path, "a file with one JSON object a line")
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"{").removeprefix(b"\xef\xbb\xbf").lstrip()
    if not first.startswith((b"{", b"[")):
        raise ValueError(f"{path} does not hold JSON objects, one a line. A CSV? Pass --csv, or call read_csv.")
    return _numbered(path, texts.read_json_lines(path), Example.from_dict)


def read_csv(path: str | Path) -> list[Example]:
    """Reads examples from a table in which the target and the cue are written as words.

    .. code-block:: text

        text,target,cue,good,bad
        The pictures of the hat are nice.,are,pictures,are,is
        The hat near the pictures [MASK] nice.,,hat,is,are

    The file is in UTF-8. Its first line names the columns; commas, semicolons or tabs are between them. ``text`` holds
    the sentence, with ``[MASK]`` or with the word of ``target``. The target is masked if there is a ``bad`` form, and
    ``good`` is then the target if it is empty. ``cue`` holds one word, or several with spaces between them. ``id``,
    ``group`` (else the file's name) and ``label`` may be there too.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: There is no column ``text``; or the target or a cue is not in the text, or is there several times.
            The message names the line.
    """
    path = _file(path, "a table with the columns text, target, cue, good and bad")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: save it in this encoding.") from error
    head = lines[0] if lines else ""
    rows = csv.DictReader(lines, delimiter=max(",;\t", key=head.count))
    rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or ()]
    if "text" not in rows.fieldnames:
        raise ValueError(
            f"{path} has the columns {', '.join(rows.fieldnames) or 'of an empty file'}: name them text, target, cue, "
            "good and bad in the first line."
        )
    return _numbered(path, ((rows.line_num, row) for row in rows), _of_words)


def _file(path: str | Path, expected: str) -> Path:
    path = Path(path)
    if not path.is_file():
        what = "no file" if path.exists() else "missing"
        raise FileNotFoundError(f"{path} is {what}: expected {expected}.")
    return path


def _numbered(path: Path, lines: Iterable[tuple[int, Any]], make: Callable[[Any], Example]) -> list[Example]:
    """The examples of lines, by their numbers, with an id and a group."""
    examples = []
    for number, line in lines:
        try:
            example = make(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        of = example.group or path.stem
        examples.append(replace(example, group=of, id=example.id or f"{of} {number}"))
    return examples


def _of_words(row: Mapping[Any, Any]) -> Example:
    """The example of a text whose target and cue are given as words."""
    fields = {name: value.strip() for name, value in row.items() if isinstance(value, str) and value.strip()}
    text, target = fields.get("text", ""), fields.get("target", MASK)
    words = split_words(text)
    (place,) = _places(words, [MASK if MASK in words else target], "the target", f"write {MASK} in its place")
    good = fields.get("good", None if target == MASK or "bad" not in fields else target)
    if good is not None and words[place] != MASK:
        start, end = texts.word_spans(text)[place]
        text = text[:start] + MASK + text[end:]
        words[place] = MASK
    named = split_words(fields.get("cue", ""))
    cue = _places(words, named, "the cue", "pass its position in a file of JSON lines") if named else []
    return Example.from_dict(fields | {"text": text, "words": words, "target": place, "good": good, "cue": cue})


def _places(words: Sequence[str], wanted: Sequence[str], what: str, remedy: str) -> list[int]:
    """Where words are in a text: in a row, or else each by itself. Case does not matter."""
    own, sought = [word.casefold() for word in words], [word.casefold() for word in wanted]
    starts = [start for start in range(len(own)) if own[start : start + len(sought)] == sought]
    if len(starts) == 1:
        return list(range(starts[0], starts[0] + len(sought)))
    if len(sought) > 1 and not starts:
        return [place for word in wanted for place in _places(words, [word], what, remedy)]
    how_often = f"{len(starts)} times" if starts else "not"
    raise ValueError(f"{what} {' '.join(wanted)!r} is {how_often} in the text: {remedy if starts else 'check it'}.")


def as_examples(given: Any) -> list[Example]:
    """Examples of any of these: :class:`Example` objects, dictionaries, a table of pyarrow, a `datasets.Dataset`.

    A dictionary without an ``id`` gets its group and its number as the id.
    """
    rows = given.to_pylist() if hasattr(given, "to_pylist") else given
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Iterable):
        raise ArgumentError(
            f"examples is of type {type(given).__name__}: pass a list of Example objects or dictionaries, or a table."
        )
    found = []
    for number, one in enumerate(rows, 1):
        if not isinstance(one, (Example, Mapping)):
            raise ArgumentError(f"example {number} is of type {type(one).__name__}: pass an Example or a dictionary.")
        try:
            # An Example may hold lists, too. In the types of its class it equals what a file of it gives.
            example = Example.from_dict(one.to_dict() if isinstance(one, Example) else one)
        except ValueError as error:
            raise ArgumentError(f"example {number}: {error}") from error
        named = isinstance(one, Example) or example.id
        found.append(example if named else replace(example, id=f"{example.group} {number}".strip()))
    return found


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly spaced."""
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def write_jsonl(path: str | Path, examples: Iterable[Example]) -> None:
    """Writes examples to a file with one JSON object a line, as :func:`read_jsonl` reads them."""
    lines = (
        json.dumps({key: value for key, value in example.to_dict().items() if value is not None}, ensure_ascii=False)
        for example in examples
    )
    write_file(path, "".join(f"{line}\n" for line in lines))


class BadExampleError(ValueError):
    """An example cannot be used with a tokenizer or a model. The message says why."""


@dataclass(frozen=True)
class Encoded:
    """An example as token ids."""

    ids: tuple[int, ...]
    target: int  # the position of the target word's token, where the model predicts; its row of scores is evaluated
    cue: tuple[int, ...]  # the positions of the cue words' tokens: the first piece of each
    forms: tuple[int, int] | None  # the ids of the right and the wrong form


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

    The tokenizer is a fast one. `until_target` ends the text before a target ``[MASK]``, as causal models need it.

    Raises:
        BadExampleError: The example has a wrong position, or more than `max_tokens` tokens. `needs_cue`: it has no cue.
            `needs_forms`: it has no two different forms of one token each.

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
            tokens, target, cues = texts.encode_record(tokenizer, record)
            has_forms = masked and example.good is not None and example.bad is not None
            forms = texts.form_ids(tokenizer, record) if has_forms else None
            encoded = Encoded(tuple(tokens["input_ids"][0].tolist()), target, tuple(cues), forms)
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
    return texts.padded(tokenizer, [{"input_ids": one.ids} for one in examples], device)


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
    start, _ = texts.record_spans(record)[example.target]
    text = record["masked"][:start].rstrip()
    before = {"masked": text, "words": record["words"][: example.target], "cue": record["cue"]}
    tokens, _, cues = texts.encode_record(tokenizer, before | {"target": example.target - 1})

    def without_end(ids: list[int]) -> list[int]:
        return ids[:-1] if len(ids) > 1 and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id) else ids

    ids, forms = without_end(tokens["input_ids"][0].tolist()), []
    for form in filter(None, (example.good, example.bad)):  # right after the text, if they are one token each
        longer = without_end(tokenizer(f"{text} {form}")["input_ids"])
        forms += longer[-1:] if longer[:-1] == ids and longer[-1] != tokenizer.unk_token_id else []
    return Encoded(tuple(ids), len(ids) - 1, tuple(cues), (forms[0], forms[1]) if len(forms) == 2 else None)
