"""The grammar's sentences: BLiMP's format, and cues and targets that are what they are said to be."""

import pytest

from captum_vz.testbed import agreement_sentences, split_words
from captum_vz.testbed.data import Record
from tests.testbed.conftest import KINDS

# Number by form, independent of how the grammar writes it.
IRREGULAR_PLURALS = {"men", "women", "children", "wives", "people", "mice", "knives", "leaves", "shelves"}
PLURAL_FORMS = {"these", "those", "are", "were", "have", "do", "themselves"}
SINGULAR_FORMS = {"this", "that", "is", "was", "has", "does", "himself", "herself", "itself"}
WITHOUT_NUMBER = {"the", "some", "my", "your", "our"}

BLIMP_KEYS = {
    "sentence_good",
    "sentence_bad",
    "field",
    "linguistics_term",
    "UID",
    "simple_LM_method",
    "one_prefix_method",
    "two_prefix_method",
    "lexically_identical",
    "pairID",
}
ONE_PREFIX_KEYS = {"one_prefix_prefix", "one_prefix_word_good", "one_prefix_word_bad"}
TWO_PREFIX_KEYS = {"two_prefix_prefix_good", "two_prefix_prefix_bad", "two_prefix_word"}
OUR_KEYS = {"masked", "target", "good", "bad", "cue", "label"}


@pytest.fixture(scope="module", params=KINDS)
def records(request: pytest.FixtureRequest) -> list[Record]:
    return agreement_sentences(600, seed=3, paradigm=request.param)


def is_plural_noun(noun: str) -> bool:
    return noun in IRREGULAR_PLURALS or noun.endswith("s")


def is_plural_form(form: str) -> bool:
    if form in PLURAL_FORMS | SINGULAR_FORMS:
        return form in PLURAL_FORMS
    return not form.endswith("s") or form.endswith("ss")  # a finite verb: they impress, she impresses


def test_the_good_form_has_the_number_of_the_cue_and_the_bad_form_has_not(records: list[Record]) -> None:
    for record in records:
        (cue,) = record["cue"]
        plural = is_plural_noun(split_words(record["masked"])[cue].lower())
        assert is_plural_form(record["good"]) == plural, record
        assert is_plural_form(record["bad"]) != plural, record


def test_no_word_before_the_cue_shows_its_number(records: list[Record]) -> None:
    for record in records:
        words = [word.lower() for word in split_words(record["masked"])]
        (cue,) = record["cue"]
        if cue < record["target"]:
            assert words[:cue] and set(words[:cue]) <= WITHOUT_NUMBER
        else:
            assert cue - record["target"] in (1, 2)  # the target, perhaps an adjective, the cue


def test_both_numbers_come_about_equally_often(records: list[Record]) -> None:
    plural = [is_plural_form(record["good"]) for record in records]
    assert 240 < sum(plural) < 360
    assert [record["label"] == "plural" for record in records] == plural


def test_records_have_the_keys_of_blimp(records: list[Record]) -> None:
    for record in records:
        method = ONE_PREFIX_KEYS if record["one_prefix_method"] else TWO_PREFIX_KEYS
        assert set(record) == BLIMP_KEYS | method | OUR_KEYS
        assert record["one_prefix_method"] != record["two_prefix_method"]
    assert [record["pairID"] for record in records] == [str(number) for number in range(len(records))]


def test_prefixes_continue_to_the_sentences(records: list[Record]) -> None:
    for record in records:
        for form in ("good", "bad"):
            if record["one_prefix_method"]:
                start = f"{record['one_prefix_prefix']} {record[f'one_prefix_word_{form}']}"
            else:
                start = f"{record[f'two_prefix_prefix_{form}']} {record['two_prefix_word']}"
            assert record[f"sentence_{form}"].startswith(start)


def test_sentences_are_written_as_sentences_and_differ_in_the_target_alone(records: list[Record]) -> None:
    for record in records:
        for form in ("good", "bad"):
            sentence = record[f"sentence_{form}"]
            assert sentence == record["masked"].replace("[MASK]", record[form])
            assert sentence[0].isupper()
            assert sentence.endswith(".")
            assert "  " not in sentence
        assert split_words(record["masked"])[record["target"]] == "[MASK]"


def test_a_distractor_stands_between_subject_and_verb_and_often_has_the_other_number() -> None:
    records = agreement_sentences(600, seed=3, paradigm="relational_noun")
    distracting = 0
    for record in records:
        words = split_words(record["masked"])
        distractor = words[record["target"] - 1]
        distracting += is_plural_noun(distractor) != is_plural_form(record["good"])
    assert 240 < distracting < 360


def test_no_pair_comes_twice() -> None:
    records = agreement_sentences(5000, seed=1)
    assert len({record["sentence_good"] for record in records}) == 5000


def test_the_seed_decides() -> None:
    assert agreement_sentences(50, seed=1) == agreement_sentences(50, seed=1)
    assert agreement_sentences(50, seed=1) != agreement_sentences(50, seed=2)


def test_without_a_paradigm_all_take_turns() -> None:
    records = agreement_sentences(12)
    assert [record["UID"] for record in records] == [*KINDS, *KINDS, *KINDS[:2]]
    assert agreement_sentences(0) == []


def test_what_the_grammar_cannot_give_is_refused() -> None:
    with pytest.raises(ValueError, match="paradigm is 'adverb'; expected None or one of anaphor, "):
        agreement_sentences(1, paradigm="adverb")
    with pytest.raises(ValueError, match="n is -1; the grammar gives from 0 to"):
        agreement_sentences(-1)
    with pytest.raises(
        ValueError, match=r"n is 1000000000000; the grammar gives from 0 to \d+ different pairs of anap"
    ):
        agreement_sentences(10**12, paradigm="anaphor")
