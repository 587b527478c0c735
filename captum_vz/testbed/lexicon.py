"""The words of the package's own grammar, grouped by their function in a sentence.

Nouns that can be a cue show their number in their form: there is no *sheep*, and no singular in *-s*. The words next to
a cue show no number. The form of the target can therefore be inferred from the cue only.
"""

from typing import Final

IRREGULAR_PLURALS: Final = {
    "man": "men",
    "woman": "women",
    "child": "children",
    "person": "people",
    "wife": "wives",
    "knife": "knives",
    "shelf": "shelves",
    "leaf": "leaves",
    "mouse": "mice",
}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


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
NUMBERED: Final = (("the", "the"), ("this", "these"), ("that", "those"), ("every", "all"), ("some", "most"))
DEMONSTRATIVES: Final = (("this", "these"), ("that", "those"))

NAMES: Final = _words(
    "Anna Marcus Paula Robert Linda Peter Julia Daniel Laura Simon Maria Thomas Helen Victor Sarah Martin Claire "
    "Kevin Emily Jason Diana Eric Alice Patrick Susan Gerald Nina Oscar Ruth Walter"
)
HERSELF: Final = _words("girl woman lady sister daughter niece aunt mother grandmother queen wife widow nun girlfriend")
HIMSELF: Final = _words("boy man guy brother son nephew uncle father grandfather king prince monk waiter boyfriend")
ITSELF: Final = _words("dog cat horse bird robot machine company committee bank school library hospital museum")
REFLEXIVES: Final = tuple(
    (noun, reflexive)
    for nouns, reflexive in ((HERSELF, "herself"), (HIMSELF, "himself"), (ITSELF, "itself"))
    for noun in nouns
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
RELATIONAL: Final = tuple(
    (noun, preposition)
    for preposition, nouns in (
        (
            "of",
            "picture photo print sketch drawing portrait sister brother friend teacher niece owner leader fan critic",
        ),
        ("about", "story movie book report essay play show song documentary article rumor poem letter question"),
        ("to", "key door answer road bridge path gift letter"),
        ("from", "letter gift message package"),
        ("near", "cat tree house chair lamp"),
        ("behind", "dog car girl garage wall"),
        ("beside", "boy child horse computer clock"),
        ("with", "man woman doctor box bag"),
    )
    for noun in _words(nouns)
)
PLACES: Final = ("", "near the river", "at the museum", "in the garden", "behind the school", "beside the lake")

ADJECTIVES: Final = _words(
    "red blue green gray old new big small hidden broken expensive strange lost clean dusty heavy famous pretty black "
    "white tall short happy sad tired quiet loud young good bad nice important beautiful boring interesting dirty empty"
)
MODALS: Final = ("", "could", "should", "might", "will", "would not", "cannot", "did not")
ADVERBS: Final = ("", "often", "always", "never", "really", "sometimes", "rarely")

# Verbs (base, past). HANDLE takes a thing as its object, MEET takes a person or a reflexive.
HANDLE: Final = (
    ("buy", "bought"),
    ("sell", "sold"),
    ("see", "saw"),
    ("find", "found"),
    ("lose", "lost"),
    ("hide", "hid"),
    ("clean", "cleaned"),
    ("describe", "described"),
    ("discuss", "discussed"),
    ("forget", "forgot"),
    ("like", "liked"),
    ("notice", "noticed"),
)
MEET: Final = (
    ("admire", "admired"),
    ("help", "helped"),
    ("hurt", "hurt"),
    ("like", "liked"),
    ("praise", "praised"),
    ("respect", "respected"),
    ("hate", "hated"),
    ("trust", "trusted"),
    ("watch", "watched"),
    ("describe", "described"),
    ("criticize", "criticized"),
    ("forget", "forgot"),
    ("observe", "observed"),
    ("visit", "visited"),
)
# Verbs (base, -ing, participle) whose subject can be a person or a thing.
STIR: Final = (
    ("scare", "scaring", "scared"),
    ("annoy", "annoying", "annoyed"),
    ("impress", "impressing", "impressed"),
    ("confuse", "confusing", "confused"),
    ("upset", "upsetting", "upset"),
    ("help", "helping", "helped"),
    ("surprise", "surprising", "surprised"),
    ("bore", "boring", "bored"),
    ("alarm", "alarming", "alarmed"),
    ("distract", "distracting", "distracted"),
    ("irritate", "irritating", "irritated"),
    ("shock", "shocking", "shocked"),
    ("worry", "worrying", "worried"),
    ("bother", "bothering", "bothered"),
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
