"""A sentence to judge methods on: its words, the one that is explained, and those that decide."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from operator import index
from pathlib import Path
from typing import Any

from captum_vz.testbed import split_words
from captum_vz.testbed.data import Record


@dataclass(frozen=True)
class Example:
    """A sentence with a target word, whose row of scores is judged, and cue words, on which it should lie.

    Positions count words from 0. They are those of a person: which tokens they are, only a tokenizer knows, see
    :func:`~captum_vz.study.encode`. Whether they are words of the sentence at all is seen there, too, so that one bad
    example of many is told of and skipped.

    Attributes:
        id: A name of its own among the examples of a study.
        words: The words. Where the target is to be predicted, ``[MASK]`` stands for it.
        target: The position of the word that is explained.
        cue: The positions of the words that decide; none if that is not known.
        good: The right word in the target's place, if it is masked.
        bad: The wrong one it is compared with.
        label: What a probe is to read off, such as "singular".
        group: What examples are summarised by, such as BLiMP's paradigm.
        text: The sentence as it is written, with the words in their order. None: a space between any two of them.

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

    @classmethod
    def from_record(cls, record: Record, id: str | None = None) -> Example:
        """What a record of the testbed says: of `agreement_sentences`, `mask_target` or `held_out`.

        Args:
            record: ``masked`` and ``target``; if it has them, ``cue``, ``good``, ``bad`` and ``label``. Its ``UID``,
                BLiMP's name of the paradigm, is the group.
            id: A name of its own. None: its ``UID`` and ``pairID``.

        >>> from captum_vz.testbed import agreement_sentences
        >>> example = Example.from_record(agreement_sentences(1)[0])
        >>> example.id, example.words[example.target], example.good
        ('anaphor 0', '[MASK]', 'themselves')
        """
        return cls.from_dict(record | {"id": id or f"{record.get('UID', '')} {record.get('pairID', '')}".strip()})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Example:
        """The example that a dictionary describes, as :meth:`to_dict` gives it or as another program has written it.

        Args:
            fields: The attributes by their names. ``words`` may be called ``tokens``, ``text`` the testbed's ``masked``
                and ``group`` BLiMP's ``UID``. Words may be left out where there is a text, which
                :func:`~captum_vz.testbed.split_words` splits. All but them and ``target`` may be None or left out;
                other keys are ignored. Sequences and numbers may be numpy's.

        Raises:
            ValueError: A field is missing, or of another type. The message says which.
        """
        text, group = (_text(fields, *names) for names in (("text", "masked"), ("group", "UID")))
        words = _first(fields, "words", "tokens")
        if words is None and text is None:
            raise ValueError(f"there are neither words (or tokens) nor a text in the fields {sorted(fields)}.")
        return cls(
            id=_text(fields, "id") or "",
            words=tuple(split_words(text or "")) if words is None else _words(words),
            target=_position(_first(fields, "target"), "target"),
            cue=_positions(_first(fields, "cue")),
            good=_text(fields, "good"),
            bad=_text(fields, "bad"),
            label=_text(fields, "label"),
            group=group or "",
            text=text,
        )

    def to_dict(self) -> dict[str, Any]:
        """All attributes by their names, as JSON has them: examples become rows with the same columns.

        >>> example = Example("1", ("It", "[MASK]"), 1, (0,))
        >>> Example.from_dict(json.loads(json.dumps(example.to_dict()))) == example
        True
        """
        return asdict(self) | {"words": list(self.words), "cue": list(self.cue)}

    def to_record(self) -> Record:
        """What the testbed calls a record: ``masked``, the sentence; its ``words``; ``target`` and ``cue``; the forms.

        >>> Example("1", ("It", "[MASK]", "."), 1, (0,), text="It [MASK].").to_record()["masked"]
        'It [MASK].'
        """
        return {
            "masked": " ".join(self.words) if self.text is None else self.text,
            "words": list(self.words),
            "target": self.target,
            "cue": list(self.cue),
            "good": self.good,
            "bad": self.bad,
        }


def read_jsonl(path: str | Path, group: str | None = None) -> list[Example]:
    """Reads examples from a file with one JSON object a line: the words, the target's position and the cue's.

    .. code-block:: json

        {"tokens": ["The", "pictures", "[MASK]", "nice", "."], "target": 2, "cue": [1], "good": "are", "bad": "is"}

    Args:
        path: The file. Of what a line may say, see :class:`Example`; BLiMP's records with ``masked`` are understood as
            well. Empty lines are skipped.
        group: For the lines that name none. None: the file's name without its ending.

    Returns:
        The examples in the order of the lines. One without an ``id`` gets its group and the number of its line.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is no JSON object, or has no words or no target. The message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected a file with one JSON object a line.")
    examples = []
    # Only a line feed ends a line: JSON strings may hold the other separators. Some programs begin with a BOM.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError(f"expected a JSON object, got {line.strip()[:60]}")
            example = Example.from_dict(fields)
            of = example.group or (path.stem if group is None else group)
            examples.append(replace(example, group=of, id=example.id or f"{of} {number}"))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return examples


def write_jsonl(path: str | Path, examples: Iterable[Example]) -> None:
    """Writes examples to a file with one JSON object a line, as :func:`read_jsonl` reads them.

    Args:
        path: The file; what it held is replaced.
        examples: What to write, a line each. What is None is left out.
    """
    lines = (
        json.dumps({key: value for key, value in example.to_dict().items() if value is not None}, ensure_ascii=False)
        for example in examples
    )
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if not _is_missing(fields.get(name))), None)


def _is_missing(value: Any) -> bool:
    """None, or the NaN that tables of numpy and pandas have in its place."""
    return value is None or (isinstance(value, Real) and value != value)


def _text(fields: Mapping[str, Any], *names: str) -> str | None:
    value = _first(fields, *names)
    if isinstance(value, bool) or not isinstance(value, (str, Integral, type(None))):
        raise ValueError(f"{' or '.join(names)} is {value!r}: expected a string.")
    return None if value is None else str(value)


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not _is_sequence(value) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"words (or tokens) is {value!r}: expected a list of strings.")
    return tuple(str(word) for word in value)


def _positions(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not _is_sequence(value):
        return (_position(value, "cue"),)
    return tuple(_position(position, "cue") for position in value)


def _position(value: Any, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # numpy's integers too
    except TypeError:
        raise ValueError(f"{name} is {value!r}: expected the position of a word, from 0.") from None


def _is_sequence(value: Any) -> bool:
    """A list, a tuple or a one-dimensional array."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1
