"""Words of a sentence, by whose positions target and cue are given."""

import re
from typing import Any, Final

#: A sentence with the keys that :func:`~captum_vz.testbed.mask_target` describes.
Record = dict[str, Any]

MASK: Final = "[MASK]"

_WORD: Final = re.compile(r"[^\s.,;:!?]+|[.,;:!?]")


def split_words(sentence: str) -> list[str]:
    """The words of a sentence: split at white space, punctuation marks as words of their own.

    >>> split_words("The pictures of some hat [MASK] scaring Marcus's sister.")
    ['The', 'pictures', 'of', 'some', 'hat', '[MASK]', 'scaring', "Marcus's", 'sister', '.']
    """
    return [sentence[start:end] for start, end in word_spans(sentence)]


def word_spans(sentence: str) -> list[tuple[int, int]]:
    """The characters `[start, end)` of each word of :func:`split_words`.

    >>> word_spans("Jill left.")
    [(0, 4), (5, 9), (9, 10)]
    """
    return [match.span() for match in _WORD.finditer(sentence)]
