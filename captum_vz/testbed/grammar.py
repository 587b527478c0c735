"""Sentence pairs from the package's own grammar. Their cue and target are known by construction.

The words are grouped by their function in a sentence. Nouns that can be a cue show their number in their form: there is
no *sheep*, and no singular in *-s*. The words next to a cue show no number. The form of the target can therefore be
inferred from the cue only.

A paradigm has slots, and a function that writes a sentence from one choice for each slot. Different choices give
different sentences, so a paradigm has as many pairs as its slots have combinations.
"""

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from captum_vz.text import MASK, Record, split_words, word_spans


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _forms(text: str) -> tuple[Any, ...]:
    """The forms of each word, which have slashes between them."""
    return tuple(tuple(word.split("/")) for word in text.split())


def _pairs(followers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Each word with the one that follows it, which is the key of its words."""
    return tuple((word, follower) for follower, words in followers.items() for word in _words(words))


IRREGULAR_PLURALS: Final = dict(
    _forms(
        "man/men woman/women child/children person/people wife/wives knife/knives shelf/shelves leaf/leaves mouse/mice"
    )
)


def add_s(word: str) -> str:
    """The -s form of an English word: the plural of a noun, or the third person singular of a verb.

    >>> [add_s(word) for word in ("hat", "story", "boy", "watch", "child")]
    ['hats', 'stories', 'boys', 'watches', 'children']
    """
    if word in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[word]
    if word.endswith(("s", "sh", "ch", "x")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


# Determiners for both numbers, and pairs (singular, plural) of determiners.
NEUTRAL: Final = ("the", "some", "my", "your", "our")
NUMBERED: Final = _forms("the/the this/these that/those every/all some/most")
DEMONSTRATIVES: Final = NUMBERED[1:3]

NAMES: Final = _words(
    "Anna Marcus Paula Robert Linda Peter Julia Daniel Laura Simon Maria Thomas Helen Victor Sarah Martin Claire "
    "Kevin Emily Jason Diana Eric Alice Patrick Susan Gerald Nina Oscar Ruth Walter"
)
REFLEXIVES: Final = _pairs(
    {
        "herself": "girl woman lady sister daughter niece aunt mother grandmother queen wife widow nun girlfriend",
        "himself": "boy man guy brother son nephew uncle father grandfather king prince monk waiter boyfriend",
        "itself": "dog cat horse bird robot machine company committee bank school library hospital museum",
    }
)

PEOPLE: Final = _words(
    "girl boy woman man child teacher student doctor senator dancer guest driver customer patient cashier pilot lawyer "
    "farmer painter singer writer nurse neighbor friend person baker judge manager officer worker scientist engineer "
    "player author artist soldier visitor tourist cousin uncle aunt parent baby king queen mouse cat dog horse bird"
)
THINGS: Final = _words(
    "book hat lamp chair table cup plate window door picture car truck bike boat house garden mountain river movie "
    "report letter song painting sweater jacket shirt computer phone cake apple banana museum restaurant library key "
    "cabinet knife shelf leaf tree flower bag bottle clock coin desk drawer garage guitar idea island jar kitchen lake "
    "machine map mirror newspaper office pen pencil piano pillow plan problem question radio ring road robot room rope "
    "shoe ship shop spoon star station stone street ticket tool towel tower town toy train wall wheel"
)
# Relational nouns with the preposition that connects them to another noun: a picture of hats, the key to the cabinets.
RELATIONAL: Final = _pairs(
    {
        "of": "picture photo print sketch drawing portrait sister brother friend teacher niece owner leader fan critic",
        "about": "story movie book report essay play show song documentary article rumor poem letter question",
        "to": "key door answer road bridge path gift letter",
        "from": "letter gift message package",
        "near": "cat tree house chair lamp",
        "behind": "dog car girl garage wall",
        "beside": "boy child horse computer clock",
        "with": "man woman doctor box bag",
    }
)
PLACES: Final = ("", "near the river", "at the museum", "in the garden", "behind the school", "beside the lake")

ADJECTIVES: Final = _words(
    "red blue green gray old new big small hidden broken expensive strange lost clean dusty heavy famous pretty black "
    "white tall short happy sad tired quiet loud young good bad nice important beautiful boring interesting dirty empty"
)
MODALS: Final = ("", "could", "should", "might", "will", "would not", "cannot", "did not")
ADVERBS: Final = ("", "often", "always", "never", "really", "sometimes", "rarely")

# Verbs (base, past). HANDLE takes a thing as its object, MEET takes a person or a reflexive.
HANDLE: Final = _forms(
    "buy/bought sell/sold see/saw find/found lose/lost hide/hid clean/cleaned describe/described discuss/discussed "
    "forget/forgot like/liked notice/noticed"
)
MEET: Final = _forms(
    "admire/admired help/helped hurt/hurt like/liked praise/praised respect/respected hate/hated trust/trusted "
    "watch/watched describe/described criticize/criticized forget/forgot observe/observed visit/visited"
)
# Verbs (base, -ing, participle) whose subject can be a person or a thing.
STIR: Final = _forms(
    "scare/scaring/scared annoy/annoying/annoyed impress/impressing/impressed confuse/confusing/confused "
    "upset/upsetting/upset help/helping/helped surprise/surprising/surprised bore/boring/bored alarm/alarming/alarmed "
    "distract/distracting/distracted irritate/irritating/irritated shock/shocking/shocked worry/worrying/worried "
    "bother/bothering/bothered"
)
# Finite verbs (singular, plural) with the rest of the sentence.
PREDICATES: Final = tuple(
    (singular, plural, f"{rest} {patient}")
    for base, ing, participle in STIR
    for singular, plural, rest in (
        ("is", "are", ing),
        ("was", "were", ing),
        ("has", "have", participle),
        ("does", "do", f"not {base}"),
        (add_s(base), base, ""),
    )
    for patient in NAMES
) + tuple(
    (singular, plural, f"{adverb} {state}")
    for singular, plural in (("is", "are"), ("was", "were"))
    for adverb in ("", "not", "still", "always", "never")
    for state in (*ADJECTIVES, "here", "at home", "on the table", "in the kitchen", "near the door")
)


def other_number(word: str) -> tuple[str, ...]:
    """The forms of the other number that can stand in the place of a form. Empty for a word without such forms.

    >>> other_number("are")[:4], other_number("herself"), other_number("hat")
    (('is', 'was', 'has', 'does'), ('themselves',), ())
    """
    verbs = tuple(dict.fromkeys((singular, plural) for singular, plural, _ in PREDICATES))
    reflexives = tuple((reflexive, "themselves") for _, reflexive in REFLEXIVES)
    for pairs in (verbs, reflexives, NUMBERED):
        for own, other in (tuple(zip(*pairs, strict=True)), tuple(zip(*pairs, strict=True))[::-1]):
            if word in own and word not in other:
                return tuple(dict.fromkeys(form for form in other if form not in own))
    return ()


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
    return add_s(noun) if plural else noun


def _past(modal: str, verb: tuple[str, str]) -> str:
    """A verb phrase that does not show number: a modal and the base form, or the past."""
    base, past = verb
    return f"{modal} {base}" if modal else past


def _anaphor(plural: bool, determiner: str, noun: tuple[str, str], place: str, modal: str, verb: Any) -> Draft:
    singular, reflexive = noun
    return Draft(f"{determiner} *{_inflect(singular, plural)}* {place} {_past(modal, verb)} _", reflexive, "themselves")


def _determiner_noun(plural: bool, subject: str, modal: str, verb: Any, *rest: Any) -> Draft:
    *adjective, noun, forms = rest
    return Draft(f"{subject} {_past(modal, verb)} _ {' '.join(adjective)} *{_inflect(noun, plural)}*", *forms)


def _relational_noun(
    plural: bool, determiner: str, head: tuple[str, str], many: bool, determiners: Any, distractor: str, predicate: Any
) -> Draft:
    noun, preposition = head
    other = f"{determiners[many]} {_inflect(distractor, many)}"
    singular, plural_form, rest = predicate
    return Draft(f"{determiner} *{_inflect(noun, plural)}* {preposition} {other} _ {rest}", singular, plural_form)


def _subject_verb(plural: bool, determiner: str, noun: str, place: str, adverb: str, verb: str, patient: str) -> Draft:
    return Draft(f"{determiner} *{_inflect(noun, plural)}* {place} {adverb} _ {patient}", add_s(verb), verb)


_NOUN: Final = ("determiner_noun_agreement", _determiner_noun)
_VERB: Final = "subject_verb_agreement"
_RELATIONAL: Final = (NEUTRAL, RELATIONAL, (False, True), NUMBERED, PEOPLE + THINGS, PREDICATES)
_BASES: Final = tuple(base for base, _ in MEET)
PARADIGMS: Final = {
    "anaphor": Paradigm("anaphor_agreement", _anaphor, (NEUTRAL, REFLEXIVES, PLACES, MODALS, MEET)),
    "determiner_noun": Paradigm(*_NOUN, (NAMES, MODALS, HANDLE, THINGS, DEMONSTRATIVES)),
    "determiner_adjective_noun": Paradigm(*_NOUN, (NAMES, MODALS, HANDLE, ADJECTIVES, THINGS, DEMONSTRATIVES)),
    "relational_noun": Paradigm(_VERB, _relational_noun, _RELATIONAL),
    "subject_verb": Paradigm(_VERB, _subject_verb, (NEUTRAL, PEOPLE, PLACES, ADVERBS, _BASES, NAMES)),
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

    good, bad = (draft.plural, draft.singular) if plural else (draft.singular, draft.plural)
    good_text, bad_text = (" ".join([*words[:target], form, *words[target + 1 :]]) + "." for form in (good, bad))
    record: Record = {
        "sentence_good": good_text,
        "sentence_bad": bad_text,
        "linguistics_term": paradigm.term,
        "UID": name,
        "one_prefix_method": cue < target,
        "two_prefix_word": "" if cue < target else words[cue],
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
        Records with those keys of BLiMP (Warstadt et al. 2020, https://aclanthology.org/2020.tacl-1.25) that this
        package reads; the keys that :func:`mask_target` adds; ``cue``, a list with the position of the cue;
        ``other_cue``, a list with the same noun in the other number; and ``label``, its number, "singular" or "plural".
        Positions count the words of :func:`~captum_vz.text.split_words` from 0.

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


_AUXILIARIES: Final = "is are was were has have had does do did could would should"
_CONTRACTIONS: Final = {"won't": "will not", "can't": "cannot"} | {
    f"{auxiliary}n't": f"{auxiliary} not" for auxiliary in _AUXILIARIES.split()
}
_CONTRACTION: Final = re.compile(rf"\b({'|'.join(_CONTRACTIONS)})\b", re.IGNORECASE)


def expand_contractions(sentence: str) -> str:
    """The sentence with the fifteen negative contractions of BLiMP written out.

    >>> expand_contractions("Some niece of Anna hasn't left and can't. Won't she?")
    'Some niece of Anna has not left and cannot. Will not she?'
    """

    def expand(match: re.Match[str]) -> str:
        long = _CONTRACTIONS[match[0].lower()]
        return long.capitalize() if match[0][0].isupper() else long

    return _CONTRACTION.sub(expand, sentence)


def mask_target(record: Record) -> Record:
    """A BLiMP record with the word in which ``sentence_good`` and ``sentence_bad`` differ.

    Contractions are written out first. The record gets ``good`` and ``bad``, the two forms of the word, ``target``, its
    position, and ``masked``, the sentence with ``[MASK]`` at this position.

    Raises:
        ValueError: The sentences do not differ in exactly one word.

    >>> masked = mask_target({"sentence_good": "Jill hasn't left.", "sentence_bad": "Jill haven't left."})
    >>> masked["masked"], masked["target"], masked["good"], masked["bad"]
    ('Jill [MASK] not left.', 1, 'has', 'have')
    """
    good, bad = (expand_contractions(record[key]) for key in ("sentence_good", "sentence_bad"))
    good_words, bad_words = split_words(good), split_words(bad)
    differences = [i for i, (one, other) in enumerate(zip_longest(good_words, bad_words)) if one != other]
    if len(good_words) != len(bad_words) or len(differences) != 1:
        raise ValueError(f"expected two sentences that differ in exactly one word, got {good!r} and {bad!r}.")
    (target,) = differences
    start, end = word_spans(good)[target]
    forms = {"good": good_words[target], "bad": bad_words[target]}
    return record | {"masked": good[:start] + MASK + good[end:], "target": target} | forms
