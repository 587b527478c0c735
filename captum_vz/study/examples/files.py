"""Files of examples: JSON lines, and tables of comma-separated values."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from captum_vz._files import write_file
from captum_vz.errors import ArgumentError
from captum_vz.study.examples import Example
from captum_vz.text import MASK, read_json_lines, split_words, word_spans


def read_jsonl(path: str | Path, group: str | None = None) -> list[Example]:
    """Reads examples from a file with one JSON object a line: the words, the target's position and the cue's.

    .. code-block:: json

        {"tokens": ["The", "pictures", "[MASK]", "nice", "."], "target": 2, "cue": [1], "good": "are", "bad": "is"}

    Args:
        path: The file. The keys of a line are those of :meth:`Example.from_dict`, so BLiMP's records with ``masked``
            are read as well. Empty lines are skipped.
        group: The group of lines without one. None: the file's name without its ending.

    Returns:
        The examples in the order of the lines. One without an ``id`` gets its group and the number of its line.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not a JSON object, or has no words or no target. The message names the line.
    """
    path = _file(path, "a file with one JSON object a line")
    with path.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"{").removeprefix(b"\xef\xbb\xbf").lstrip()
    if not first.startswith((b"{", b"[")):
        raise ValueError(f"{path} does not hold JSON objects, one a line. A CSV? Pass --csv, or call read_csv.")
    return _numbered(path, read_json_lines(path), Example.from_dict, group)


def read_csv(path: str | Path, group: str | None = None) -> list[Example]:
    """Reads examples from a table in which the target and the cue are written as words.

    .. code-block:: text

        text,target,cue,good,bad
        The pictures of the hat are nice.,are,pictures,are,is
        The hat near the pictures [MASK] nice.,,hat,is,are

    Args:
        path: The file, in UTF-8. Its first line names the columns; commas, semicolons or tabs are between them.
            ``text`` holds the sentence, with ``[MASK]`` or with the word of ``target``. The target is masked if there
            is a ``bad`` form, and ``good`` is then the target if it is empty. ``cue`` holds one word, or several with
            spaces between them. ``id``, ``group`` and ``label`` may be there too.
        group: The group of rows without one. None: the file's name without its ending.

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
    return _numbered(path, ((rows.line_num, row) for row in rows), _of_words, group)


def _file(path: str | Path, expected: str) -> Path:
    path = Path(path)
    if not path.is_file():
        what = "no file" if path.exists() else "missing"
        raise FileNotFoundError(f"{path} is {what}: expected {expected}.")
    return path


def _numbered(
    path: Path, lines: Iterable[tuple[int, Any]], make: Callable[[Any], Example], group: str | None
) -> list[Example]:
    """The examples of lines, by their numbers, with an id and a group."""
    examples = []
    for number, line in lines:
        try:
            example = make(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        of = example.group or (path.stem if group is None else group)
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
        start, end = word_spans(text)[place]
        text = text[:start] + MASK + text[end:]
        words[place] = MASK
    cue = split_words(fields.get("cue", ""))
    found = {"text": text, "words": words, "target": place, "good": good}
    found["cue"] = _places(words, cue, "the cue", "pass its position in a file of JSON lines") if cue else []
    return Example.from_dict(fields | found)


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

    Args:
        given: Something that yields examples or dictionaries, see :meth:`Example.from_dict`, or a table of pyarrow. A
            dictionary without an ``id`` gets its group and its number as the id.

    Raises:
        ArgumentError: Something is no example. The message gives its place.

    >>> [example] = as_examples([{"tokens": ["It", "[MASK]"], "target": 1}])
    >>> example.id, example.words
    ('1', ('It', '[MASK]'))
    """
    rows = given.to_pylist() if hasattr(given, "to_pylist") else given
    if isinstance(rows, (str, Mapping)) or not isinstance(rows, Iterable):
        raise ArgumentError(
            f"examples is of type {type(given).__name__}: pass a list of Example objects or dictionaries, a table of "
            "pyarrow, or a data set of Hugging Face."
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
    """At most so many of the items, evenly spaced.

    >>> evenly(["a", "b", "c", "d"], 2)
    ['a', 'c']
    """
    count = min(most, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def write_jsonl(path: str | Path, examples: Iterable[Example]) -> None:
    """Writes examples to a file with one JSON object a line, as :func:`read_jsonl` reads them.

    Args:
        path: The file, which is replaced if it exists.
        examples: The examples, one for each line. Attributes that are None are not written.
    """
    lines = (
        json.dumps({key: value for key, value in example.to_dict().items() if value is not None}, ensure_ascii=False)
        for example in examples
    )
    write_file(path, "".join(f"{line}\n" for line in lines))
