"""The paper's sentences: five paradigms of BLiMP, with target, cue and number found by rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from captum_vz.study.examples import Example
from captum_vz.testbed import held_out, read_paradigm
from captum_vz.testbed.grammar import add_s
from captum_vz.text import Record, form_ids, split_words

#: The paradigm with more than twice as many singular verbs as plural ones.
UNBALANCED: Final = "regular_plural_subject_verb_agreement_1"

_SINGULAR: Final = {"this", "that", "is", "was", "has", "does", "himself", "herself", "itself"}
_DETERMINERS: Final = {"a", "an", "the", "this", "that", "these", "those", "some", "many", "most", "all", "every"}
_PREPOSITIONS: Final = {"of", "about"}
_NUMBERED: Final = {"a", "an", "this", "that", "these", "those", "many", "most", "all", "every"}


@dataclass(frozen=True)
class BlimpSelection:
    """The sentences that a study uses, and how many pairs are left out. Its string tells both.

    The examples have paradigms as groups and "singular" or "plural" as labels. A study skips an example without a cue,
    for which the rule of its paradigm finds none.
    """

    examples: list[Example]
    pairs: int  #: how many pairs the five paradigms have, or how many of them are held out
    several_tokens: int  #: how many of them are left out because one of the two forms is not a single token
    unbalanced: int  #: how many are left out to have as many singular as plural verbs
    trained_on: int = 0  #: how many further pairs are left out because the embedded models were trained on them

    def __str__(self) -> str:
        """The numbers of pairs, and why some are left out."""
        why = {
            "that the embedded models were trained on": self.trained_on,
            "with a form that is not a single token": self.several_tokens,
            f"of {UNBALANCED}, to have as many singular as plural verbs": self.unbalanced,
        }
        left_out = "; ".join(f"{count:,} {reason}" for reason, count in why.items() if count)
        total = self.pairs + self.trained_on
        return f"{len(self.examples):,} of {total:,} pairs of BLiMP. Left out: {left_out or 'none'}."


def select_blimp(
    blimp: str | Path, tokenizers: Iterable[Any] = (), *, whole: bool = False, prefix: str = ""
) -> BlimpSelection:
    """The sentences of the paper, and how many pairs are left out.

    They are the halves of the five paradigms of `Mohebbi et al. 2023
    <https://aclanthology.org/2023.eacl-main.245>`_ that the embedded models were not trained on
    (:func:`~captum_vz.testbed.held_out`). As in the paper, a pair is left out if one of its forms is not a single
    token. The paradigm :data:`UNBALANCED` gives as many singular verbs as it has plural ones.

    Args:
        blimp: The folder with BLiMP's `.jsonl` files, `data` in https://github.com/alexwarstadt/blimp.
        tokenizers: The tokenizers of the models to compare. The forms must be single tokens of all of them. Empty: no
            pair is left out for its tokens.
        whole: Whether all pairs of the five paradigms are used, for studies without an embedded model.
        prefix: Words before each sentence, such as "As we all know,". Models of next words draw on the first token,
            whatever it is, so a cue there shows nothing.

    Raises:
        FileNotFoundError: A paradigm is missing.
    """
    tokenizers, examples, single = list(tokenizers), [], 0
    halves = held_out(blimp)
    every = {paradigm: read_paradigm(blimp, paradigm) for paradigm in halves}
    for paradigm, records in (every if whole else halves).items():
        kept = [record for record in records if all(form_ids(tokenizer, record) for tokenizer in tokenizers)]
        known = [Example.from_record(record | {"cue": find_cue(record), "label": number(record)}) for record in kept]
        if paradigm == UNBALANCED and not whole:  # as many singular examples as there are plural ones, in their order
            singular = [place for place, example in enumerate(known) if example.label == "singular"]
            plural = sum(example.label == "plural" for example in known)
            drawn = set(random.Random(UNBALANCED).sample(singular, min(plural, len(singular))))
            known = [one for place, one in enumerate(known) if one.label != "singular" or place in drawn]
        examples += known
        single += len(kept)
    pairs, total = (sum(map(len, some.values())) for some in (every if whole else halves, every))
    examples = [_behind(prefix, one) if prefix else one for one in with_other_cues(examples)]
    return BlimpSelection(examples, pairs, pairs - single, single - len(examples), total - pairs)


def _behind(prefix: str, example: Example) -> Example:
    before, text, first = split_words(prefix), example.text or " ".join(example.words), example.words[0]
    start = first.lower() if first.lower() in _DETERMINERS else first
    cue = tuple(len(before) + place for place in example.cue)
    words = (*before, start, *example.words[1:])
    text = f"{prefix.strip()} {start}{text[len(first) :]}"
    return replace(example, words=words, target=len(before) + example.target, cue=cue, text=text)


def blimp_examples(blimp: str | Path, tokenizers: Iterable[Any] = ()) -> list[Example]:
    """The examples of :func:`select_blimp`, without the counts of pairs that are left out."""
    return select_blimp(blimp, tokenizers).examples


def find_cue(record: Record) -> list[int]:
    """The positions of the cue words of a record of BLiMP, by a rule for its paradigm, without a parser.

    - ``determiner_noun_agreement...``: the last word of the noun that BLiMP names, which follows the target;
    - ``..._subject_verb_agreement_1`` and ``distractor_agreement_relational_noun``: the head of the subject, the word
      before its first preposition or, where there is none, its last;
    - ``anaphor_number_agreement``: all words of the subject, to which the anaphor refers: a name, a bare noun, or a
      determiner ("a lot of") and a noun.

    There are none if the sentence does not have the form that the rule expects. A paradigm without a rule is refused.
    """
    rule = _RULES.get(record.get("UID", ""))
    if rule is None:
        raise ValueError(f"there is no rule for the cues of {record.get('UID')!r}, only for {', '.join(_RULES)}.")
    return rule(record, split_words(record["masked"]))


def with_other_cues(examples: Sequence[Example]) -> list[Example]:
    """The examples with the other number of their cue, where it is known, for :func:`~captum_vz.study.value_patching`.

    It is the noun with another ending, if it is the cue of another example. It is not known for names, for several cue
    words, and after a determiner that fits one number only.
    """
    seen = {
        label: {one.words[cue] for one in examples if one.label == label for cue in one.cue}
        for label in ("singular", "plural")
    }
    plurals = {noun: add_s(noun) for noun in seen["singular"] if noun.islower()}  # others may be names
    known = {noun: plural for noun, plural in plurals.items() if plural in seen["plural"]}
    known |= {plural: noun for noun, plural in known.items()}

    def other(example: Example) -> tuple[str, ...]:
        for place in example.cue if len(example.cue) == 1 else ():
            before = example.words[place - 1].lower() if place else ""
            if example.words[place] in known and before not in _NUMBERED:
                return (known[example.words[place]],)
        return ()

    return [replace(example, other_cue=other(example)) for example in examples]


def number(record: Record) -> str | None:
    """The grammatical number of a record's right form, "singular" or "plural"; None if its two forms do not show it."""
    good, bad = record["good"].lower(), record["bad"].lower()

    def is_singular(form: str, other: str) -> bool:
        return form in _SINGULAR or form in (f"{other}s", f"{other}es", f"{other.removesuffix('y')}ies")

    # Both forms are needed, because "impress" ends in an s, too.
    singular, plural = is_singular(good, bad), is_singular(bad, good)
    return None if singular == plural else "singular" if singular else "plural"


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
    elif before[1:2] == ["university"]:  # "Harvard University", the only name of two words
        length = 2
    return list(range(length)) if length < len(before) else []  # a verb is between it and the target


_RULES: Final[dict[str, Callable[[Record, list[str]], list[int]]]] = {
    "anaphor_number_agreement": _antecedent,
    "determiner_noun_agreement_2": _noun,
    "determiner_noun_agreement_with_adj_2": _noun,
    "distractor_agreement_relational_noun": _head,
    "regular_plural_subject_verb_agreement_1": _head,
}
