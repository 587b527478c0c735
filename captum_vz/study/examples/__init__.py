"""The examples of a study: sentences with their words, the target word, and the cue words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from operator import index
from typing import Any

from captum_vz.text import Record, split_words


@dataclass(frozen=True)
class Example:
    """A sentence with a target word, whose row of scores is evaluated, and cue words, on which the row should lie.

    Positions count words from 0. :func:`~captum_vz.study.encode` finds the tokens of the words, and checks that the
    positions exist. A study skips an example that fails there, and records the reason.

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
        other_cue: The cue words in the other number, which make a minimal pair, see
            :func:`~captum_vz.study.value_patching`; empty if they are not known.

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

        Args:
            record: ``masked`` and ``target``; if it has them, ``cue``, ``other_cue``, ``good``, ``bad`` and ``label``.
                Its ``UID``, BLiMP's name of the paradigm, is the group.
            id: The id. None: its ``UID`` and ``pairID``.

        >>> from captum_vz.testbed import agreement_sentences
        >>> example = Example.from_record(agreement_sentences(1)[0])
        >>> example.id, example.words[example.target], example.good
        ('anaphor 0', '[MASK]', 'themselves')
        """
        return cls.from_dict(record | {"id": id or f"{record.get('UID', '')} {record.get('pairID', '')}".strip()})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Example:
        """The example of a dictionary, from :meth:`to_dict` or from another program.

        Args:
            fields: The attributes by their names. ``words`` may be called ``tokens``, ``text`` the testbed's ``masked``
                and ``group`` BLiMP's ``UID``. Words are optional if there is a text, which
                :func:`~captum_vz.text.split_words` splits. All entries except ``target`` may be None or missing.
                Other keys are ignored. Sequences and numbers may be numpy's.

        Raises:
            ValueError: A field is missing, or of another type. The message says which.
        """
        text, group = (_text(fields, *names) for names in (("text", "masked"), ("group", "UID")))
        words = _first(fields, "words", "tokens")
        if words is None and text is None:
            raise ValueError(f"there are neither words (or tokens) nor a text in the fields {sorted(fields)}.")
        return cls(
            id=_text(fields, "id") or "",
            words=tuple(split_words(text or "")) if words is None else _words(words, "words (or tokens)"),
            target=_position(_first(fields, "target"), "target"),
            cue=_positions(_first(fields, "cue")),
            good=_text(fields, "good"),
            bad=_text(fields, "bad"),
            label=_text(fields, "label"),
            group=group or "",
            text=text,
            other_cue=_words(_first(fields, "other_cue") or (), "other_cue"),
        )

    def to_dict(self) -> dict[str, Any]:
        """All attributes by their names, in the types of JSON.

        >>> import json
        >>> example = Example("1", ("It", "[MASK]"), 1, (0,))
        >>> Example.from_dict(json.loads(json.dumps(example.to_dict()))) == example
        True
        """
        lists = {"words": list(self.words), "cue": list(self.cue), "other_cue": list(self.other_cue)}
        return asdict(self) | lists

    def to_record(self) -> Record:
        """A record of the testbed: ``masked`` (the sentence), ``words``, ``target``, ``cue``, and the forms.

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


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if not _is_missing(fields.get(name))), None)


def _is_missing(value: Any) -> bool:
    """Whether a value is None, or NaN, as tables of numpy and pandas write None."""
    return value is None or (isinstance(value, Real) and value != value)


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
    """Whether a value is a list, a tuple or a one-dimensional array."""
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1
