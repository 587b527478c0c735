"""The paper's sentences: five paradigms of BLiMP, with target, cue and number found by rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from captum_vz.study.example import Example
from captum_vz.testbed import form_ids, held_out, split_words
from captum_vz.testbed.data import Record

#: The paradigm with more than twice as many singular verbs as plural ones, which are drawn down to their number.
UNBALANCED: Final = "regular_plural_subject_verb_agreement_1"

_SINGULAR: Final = {"this", "that", "is", "was", "has", "does", "himself", "herself", "itself"}
_DETERMINERS: Final = {"a", "an", "the", "this", "that", "these", "those", "some", "many", "most", "all", "every"}
_PREPOSITIONS: Final = {"of", "about"}


def blimp_examples(blimp: str | Path, tokenizers: Iterable[Any] = ()) -> list[Example]:
    """The sentences of `Mohebbi et al. 2023 <https://aclanthology.org/2023.eacl-main.245>`_ that are held out.

    They are those halves of the paper's five paradigms of BLiMP that the embedded model was not trained on
    (:func:`~captum_vz.testbed.held_out`). As in the paper, a pair is dropped if one of its forms is not a single token,
    and of `regular_plural_subject_verb_agreement_1` only as many singular verbs are kept as there are plural ones; they
    are drawn once and for all.

    Args:
        blimp: The folder with BLiMP's `.jsonl` files, `data` in https://github.com/alexwarstadt/blimp.
        tokenizers: Those of the models that are to be compared: the forms have to be single tokens of all of them, so
            that all see the same sentences. None: no pair is dropped.

    Returns:
        The examples, with paradigms as groups and "singular" or "plural" as labels. One for which the rule of its
        paradigm (:func:`find_cue`) finds no cue has none: a study records it, and goes on without it.

    Raises:
        FileNotFoundError: A paradigm is missing.
    """
    tokenizers = list(tokenizers)
    examples = []
    for paradigm, records in held_out(blimp).items():
        kept = [record for record in records if all(form_ids(tokenizer, record) for tokenizer in tokenizers)]
        known = [Example.from_record(record | {"cue": find_cue(record), "label": number(record)}) for record in kept]
        examples += _balanced(known) if paradigm == UNBALANCED else known
    return examples


def find_cue(record: Record) -> list[int]:
    """The words that decide on the target of a record of BLiMP, by a rule of its paradigm, without a parser.

    - ``determiner_noun_agreement...``: the last word of the noun that BLiMP names, which follows the target;
    - ``..._subject_verb_agreement_1`` and ``distractor_agreement_relational_noun``: the head of the subject, the word
      before its first preposition or, where there is none, its last;
    - ``anaphor_number_agreement``: all words of the subject, to which the anaphor refers: a name, a bare noun, or a
      determiner ("a lot of") and a noun.

    Args:
        record: As :func:`~captum_vz.testbed.mask_target` and :func:`~captum_vz.testbed.held_out` give it.

    Returns:
        Positions of words. None if the sentence is not of the form that the rule knows: it is not guessed.

    Raises:
        ValueError: There is no rule for the paradigm.

    >>> from captum_vz.testbed import mask_target
    >>> pair = {"sentence_good": "The sketch of those trucks hasn't hurt Alan.",
    ...         "sentence_bad": "The sketch of those trucks haven't hurt Alan.",
    ...         "UID": "distractor_agreement_relational_noun"}
    >>> record = mask_target(pair)
    >>> [split_words(record["masked"])[position] for position in find_cue(record)]
    ['sketch']
    """
    rule = _RULES.get(record.get("UID", ""))
    if rule is None:
        raise ValueError(f"there is no rule for the cues of {record.get('UID')!r}, only for {', '.join(_RULES)}.")
    return rule(record, split_words(record["masked"]))


def number(record: Record) -> str | None:
    """The grammatical number of a record's right form: "singular" or "plural"; None if its two forms do not show it.

    >>> number({"good": "impress", "bad": "impresses"}), number({"good": "this", "bad": "these"})
    ('plural', 'singular')
    """
    good, bad = record["good"].lower(), record["bad"].lower()
    # Both forms are looked at: "impress" ends in an s, too.
    singular, plural = (_is_singular(one, other) for one, other in ((good, bad), (bad, good)))
    return None if singular == plural else "singular" if singular else "plural"


def _is_singular(form: str, other: str) -> bool:
    """Whether a form is one of the singular ones, or a verb's -s form beside the other."""
    return form in _SINGULAR or form in (f"{other}s", f"{other}es", f"{other.removesuffix('y')}ies")


def _noun(record: Record, words: list[str]) -> list[int]:
    noun = record.get("two_prefix_word", "").split()
    starts = range(record["target"] + 1, len(words) - len(noun) + 1)
    ends = [start + len(noun) - 1 for start in starts if noun and words[start : start + len(noun)] == noun]
    return ends if len(ends) == 1 else []


def _head(record: Record, words: list[str]) -> list[int]:
    subject = [word.lower() for word in words[: record["target"]]]
    head = next((place for place, word in enumerate(subject) if word in _PREPOSITIONS), len(subject)) - 1
    return [head] if head >= 0 and subject[head] not in _DETERMINERS else []


def _antecedent(record: Record, words: list[str]) -> list[int]:
    before = [word.lower() for word in words[: record["target"]]]
    length = 1
    if before[:1] and before[0] in _DETERMINERS:
        length = 4 if before[1:3] == ["lot", "of"] else 2
    elif before[1:2] == ["university"]:  # "Harvard University", the one name of two words
        length = 2
    return list(range(length)) if length < len(before) else []  # a verb is between it and the target


_RULES: Final[dict[str, Callable[[Record, list[str]], list[int]]]] = {
    "anaphor_number_agreement": _antecedent,
    "determiner_noun_agreement_2": _noun,
    "determiner_noun_agreement_with_adj_2": _noun,
    "distractor_agreement_relational_noun": _head,
    "regular_plural_subject_verb_agreement_1": _head,
}


def _balanced(examples: list[Example]) -> list[Example]:
    """As many singular ones as there are plural ones, in their order."""
    singular = [place for place, example in enumerate(examples) if example.label == "singular"]
    plural = sum(example.label == "plural" for example in examples)
    kept = set(random.Random(UNBALANCED).sample(singular, min(plural, len(singular))))
    return [example for place, example in enumerate(examples) if example.label != "singular" or place in kept]
