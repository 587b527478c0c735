"""Sentence pairs from the package's own grammar. Their cue and target are known by construction.

A paradigm has slots, and a function that writes a sentence from one choice for each slot. Different choices give
different sentences, so a paradigm has as many pairs as its slots have combinations.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from captum_vz.testbed import lexicon as lex
from captum_vz.testbed.data import mask_target
from captum_vz.text import Record


class Draft(NamedTuple):
    """A sentence with asterisks around its cue and ``_`` for its target, and the two forms of the target."""

    text: str
    singular: str
    plural: str


class Paradigm(NamedTuple):
    """A kind of agreement: BLiMP's term for it, a function that writes a sentence, and choices for its arguments."""

    term: str
    write: Callable[..., Draft]
    slots: tuple[Sequence[Any], ...]

    @property
    def capacity(self) -> int:
        """The number of different pairs: every combination of choices, in singular and plural."""
        return 2 * math.prod(map(len, self.slots))


def _inflect(noun: str, plural: bool) -> str:
    return lex.add_s(noun) if plural else noun


def _past(modal: str, verb: tuple[str, str]) -> str:
    """A verb phrase that does not show number: a modal and the base form, or the past."""
    base, past = verb
    return f"{modal} {base}" if modal else past


def _anaphor(
    plural: bool, determiner: str, noun: tuple[str, str], place: str, modal: str, verb: tuple[str, str]
) -> Draft:
    singular, reflexive = noun
    return Draft(f"{determiner} *{_inflect(singular, plural)}* {place} {_past(modal, verb)} _", reflexive, "themselves")


def _determiner_noun(
    plural: bool, subject: str, modal: str, verb: tuple[str, str], noun: str, forms: tuple[str, str]
) -> Draft:
    return Draft(f"{subject} {_past(modal, verb)} _ *{_inflect(noun, plural)}*", *forms)


def _determiner_adjective_noun(
    plural: bool, subject: str, modal: str, verb: tuple[str, str], adjective: str, noun: str, forms: tuple[str, str]
) -> Draft:
    return Draft(f"{subject} {_past(modal, verb)} _ {adjective} *{_inflect(noun, plural)}*", *forms)


def _relational_noun(
    plural: bool,
    determiner: str,
    head: tuple[str, str],
    distractor_plural: bool,
    distractor_determiner: tuple[str, str],
    distractor: str,
    predicate: tuple[str, str, str],
) -> Draft:
    noun, preposition = head
    other = f"{distractor_determiner[distractor_plural]} {_inflect(distractor, distractor_plural)}"
    singular, plural_form, rest = predicate
    return Draft(f"{determiner} *{_inflect(noun, plural)}* {preposition} {other} _ {rest}", singular, plural_form)


def _subject_verb(plural: bool, determiner: str, noun: str, place: str, adverb: str, verb: str, patient: str) -> Draft:
    return Draft(f"{determiner} *{_inflect(noun, plural)}* {place} {adverb} _ {patient}", lex.add_s(verb), verb)


PARADIGMS: Final[dict[str, Paradigm]] = {
    "anaphor": Paradigm("anaphor_agreement", _anaphor, (lex.NEUTRAL, lex.REFLEXIVES, lex.PLACES, lex.MODALS, lex.MEET)),
    "determiner_noun": Paradigm(
        "determiner_noun_agreement",
        _determiner_noun,
        (lex.NAMES, lex.MODALS, lex.HANDLE, lex.THINGS, lex.DEMONSTRATIVES),
    ),
    "determiner_adjective_noun": Paradigm(
        "determiner_noun_agreement",
        _determiner_adjective_noun,
        (lex.NAMES, lex.MODALS, lex.HANDLE, lex.ADJECTIVES, lex.THINGS, lex.DEMONSTRATIVES),
    ),
    "relational_noun": Paradigm(
        "subject_verb_agreement",
        _relational_noun,
        (
            lex.NEUTRAL,
            lex.RELATIONAL,
            (False, True),
            lex.NUMBERED,
            lex.PEOPLE + lex.THINGS,
            lex.PREDICATES,
        ),
    ),
    "subject_verb": Paradigm(
        "subject_verb_agreement",
        _subject_verb,
        (lex.NEUTRAL, lex.PEOPLE, lex.PLACES, lex.ADVERBS, tuple(base for base, _ in lex.MEET), lex.NAMES),
    ),
}


def _record(name: str, index: int, pair_id: int) -> Record:
    """The pair of the `index`-th combination of choices, as a BLiMP record with its cue."""
    paradigm = PARADIGMS[name]
    index, plural = divmod(index, 2)
    choices = []
    for slot in paradigm.slots:
        index, choice = divmod(index, len(slot))
        choices.append(slot[choice])
    draft, other = (paradigm.write(number, *choices) for number in (bool(plural), not plural))

    words = draft.text.split()
    target = words.index("_")
    (cue,) = [position for position, word in enumerate(words) if word.startswith("*")]
    words = [word.strip("*") for word in words]
    words[0] = words[0].capitalize()

    forms = (draft.singular, draft.plural)
    good, bad = forms[plural], forms[not plural]
    good_words, bad_words = ([*words[:target], form, *words[target + 1 :]] for form in (good, bad))
    record: Record = {"sentence_good": " ".join(good_words) + ".", "sentence_bad": " ".join(bad_words) + "."}
    # As in BLiMP: one prefix with two endings or, if the cue comes after the target, two prefixes with one ending.
    if cue < target:
        record |= {
            "one_prefix_prefix": " ".join(words[:target]),
            "one_prefix_word_good": good,
            "one_prefix_word_bad": bad,
        }
    else:
        record |= {
            "two_prefix_prefix_good": " ".join(good_words[:cue]),
            "two_prefix_prefix_bad": " ".join(bad_words[:cue]),
            "two_prefix_word": words[cue],
        }
    record |= {
        "field": "morphology",
        "linguistics_term": paradigm.term,
        "UID": name,
        "simple_LM_method": True,
        "one_prefix_method": cue < target,
        "two_prefix_method": cue > target,
        "lexically_identical": cue < target,
        "pairID": str(pair_id),
        "cue": [cue],
        "other_cue": [other.text.split()[cue].strip("*")],
        "label": "plural" if plural else "singular",
    }
    return mask_target(record)


def agreement_sentences(n: int, seed: int = 0, paradigm: str | None = None) -> list[Record]:
    """`n` different pairs of sentences. The two sentences of a pair differ in the form of one word, the target.

    The number of one other word, the cue, decides the form of the target. No other word shows this number.

    Args:
        n: The number of pairs.
        seed: The same seed gives the same pairs.
        paradigm: ``"anaphor"``, ``"determiner_noun"``, ``"determiner_adjective_noun"``, ``"relational_noun"`` (with a
            second noun between subject and verb) or ``"subject_verb"``. None: all paradigms in turn.

    Returns:
        Records in BLiMP's format (Warstadt et al. 2020, https://aclanthology.org/2020.tacl-1.25) with the keys that
        :func:`~captum_vz.testbed.mask_target` adds (``masked``, ``target``, ``good``, ``bad``) and three more: ``cue``,
        a list with the position of the cue, ``other_cue``, a list with the same noun in the other number, and
        ``label``, its number, "singular" or "plural". Positions count the words of
        :func:`~captum_vz.text.split_words` from 0.

    Raises:
        ValueError: The paradigm is unknown, `n` is negative, or the grammar has fewer than `n` pairs.

    >>> record = agreement_sentences(1, paradigm="relational_noun")[0]
    >>> record["masked"], record["good"], record["bad"]
    ('Our documentary about the engineer [MASK] scaring Paula.', 'was', 'were')
    >>> record["target"], record["cue"]
    (5, [1])
    """
    if paradigm is not None and paradigm not in PARADIGMS:
        raise ValueError(f"paradigm is {paradigm!r}: pass None or one of {', '.join(PARADIGMS)}.")
    names = list(PARADIGMS) if paradigm is None else [paradigm]
    capacity = len(names) * min(PARADIGMS[name].capacity for name in names)
    if not 0 <= n <= capacity:
        raise ValueError(f"n is {n}; the grammar gives from 0 to {capacity} different pairs of {', '.join(names)}.")
    turns = len(names)
    drawn = [
        random.Random(f"{seed} {name}").sample(range(PARADIGMS[name].capacity), len(range(turn, n, turns)))
        for turn, name in enumerate(names)
    ]
    return [_record(names[i % turns], drawn[i % turns][i // turns], i) for i in range(n)]
