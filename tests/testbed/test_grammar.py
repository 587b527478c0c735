"""The grammar's sentences have BLiMP's format, and the cue decides the form of the target."""

import pytest

from captum_vz.testbed import agreement_sentences
from captum_vz.testbed.grammar import Record
from captum_vz.text import split_words
from tests.testbed.conftest import KINDS

# The number of a form, independent of the code of the grammar.
IRREGULAR_PLURALS = {"men", "women", "children", "wives", "people", "mice", "knives", "leaves", "shelves"}
PLURAL_FORMS = {"these", "those", "are", "were", "have", "do", "themselves"}
SINGULAR_FORMS = {"this", "that", "is", "was", "has", "does", "himself", "herself", "itself"}
WITHOUT_NUMBER = {"the", "some", "my", "your", "our"}


@pytest.fixture(scope="module", params=KINDS)
def records(request: pytest.FixtureRequest) -> list[Record]:
    return agreement_sentences(600, seed=3, paradigm=request.param)


def is_plural_noun(noun: str) -> bool:
    return noun in IRREGULAR_PLURALS or noun.endswith("s")


def is_plural_form(form: str) -> bool:
    if form in PLURAL_FORMS | SINGULAR_FORMS:
        return form in PLURAL_FORMS
    return not form.endswith("s") or form.endswith("ss")  # a finite verb: they impress, she impresses


def test_good_form_agrees_with_cue(records: list[Record]) -> None:
    for record in records:
        (cue,) = record["cue"]
        plural = is_plural_noun(split_words(record["masked"])[cue].lower())
        assert is_plural_form(record["good"]) == plural, record
        assert is_plural_form(record["bad"]) != plural, record
    plurals = [is_plural_form(record["good"]) for record in records]
    assert 240 < sum(plurals) < 360
    assert [record["label"] == "plural" for record in records] == plurals


def test_other_cue_is_the_noun_in_the_other_number(records: list[Record]) -> None:
    """With it, the bad form is the right one; some record of the grammar is that pair."""
    for record in records:
        (cue,), (other,) = record["cue"], record["other_cue"]
        noun = split_words(record["masked"])[cue].lower()
        assert is_plural_noun(other) != is_plural_noun(noun)
        assert is_plural_noun(other) != is_plural_form(record["good"])
        singular, plural = sorted([noun, other], key=is_plural_noun)
        assert plural in IRREGULAR_PLURALS or plural in (f"{singular}s", f"{singular}es", f"{singular[:-1]}ies")


def test_sentences_differ_only_in_target_and_show_no_other_number(records: list[Record]) -> None:
    for record in records:
        for form in ("good", "bad"):
            assert record[f"sentence_{form}"] == record["masked"].replace("[MASK]", record[form])
        assert split_words(record["masked"])[record["target"]] == "[MASK]"
        words = [word.lower() for word in split_words(record["masked"])]
        (cue,) = record["cue"]
        if cue < record["target"]:
            assert words[:cue] and set(words[:cue]) <= WITHOUT_NUMBER
        else:
            assert cue - record["target"] in (1, 2)  # the target, perhaps an adjective, the cue


def test_distractors_and_seeds() -> None:
    records = agreement_sentences(600, seed=3, paradigm="relational_noun")
    distractors = [split_words(record["masked"])[record["target"] - 1] for record in records]
    pairs = zip(distractors, records, strict=True)
    assert 240 < sum(is_plural_noun(one) != is_plural_form(record["good"]) for one, record in pairs) < 360
    records = agreement_sentences(5000, seed=1)
    assert len({record["sentence_good"] for record in records}) == 5000
    assert agreement_sentences(50, seed=1) == agreement_sentences(50, seed=1) != agreement_sentences(50, seed=2)
    with pytest.raises(ValueError, match="paradigm is 'adverb': pass None or one of anaphor, "):
        agreement_sentences(1, paradigm="adverb")
    for n in (-1, 10**12):
        with pytest.raises(ValueError, match=rf"n is {n}; the grammar gives from 0 to \d+ different pairs of anaphor"):
            agreement_sentences(n)
