"""Pairs are read, the held-out half is not in the training data, and words become tokens."""

import re
import shutil
from pathlib import Path

import pytest
from train_masked import drop_held_out, training_records

from captum_vz import testbed
from captum_vz.text import encode_record, form_ids, split_words, word_spans
from tests.explaining.models import byte_tokenizer
from tests.testbed.conftest import KINDS, PAIRS, write_paradigm

TOKENIZER = testbed.load_model()[1]
AUXILIARIES = ["is", "are", "was", "were", "has", "have", "had", "does", "do", "did", "could", "would", "should"]
CONTRACTIONS = {f"{word}n't": f"{word} not" for word in AUXILIARIES} | {"won't": "will not", "can't": "cannot"}


@pytest.mark.parametrize(("short", "long"), CONTRACTIONS.items())
def test_expand_each_contraction(short: str, long: str) -> None:
    assert testbed.expand_contractions(f"Jill {short} go.") == f"Jill {long} go."
    assert testbed.expand_contractions(f"{short.capitalize()} Jill go?") == f"{long.capitalize()} Jill go?"


@pytest.mark.parametrize("sentence", ["Jill's sister left.", "The ant wanted it.", "", "they don", "Bob's isn'tville"])
def test_expand_contractions_keeps_other_words(sentence: str) -> None:
    assert testbed.expand_contractions(sentence) == sentence


@pytest.mark.parametrize("sentence", ["The cat, a pet, left.", "  Who?!", "", "ex-wife's 3.14 naïve", "[MASK] runs."])
def test_split_words_keeps_all_characters(sentence: str) -> None:
    assert "".join(split_words(sentence)) == "".join(sentence.split())
    assert [sentence[start:end] for start, end in word_spans(sentence)] == split_words(sentence)


@pytest.mark.parametrize(
    ("good", "bad", "target"),
    [
        ("Some dog stunned this committee.", "Some dog stunned these committee.", 3),
        ("A brother of all waiters wasn't praising Marie.", "A brother of all waiters aren't praising Marie.", 5),
        ("Christina can't respect herself.", "Christina can't respect themselves.", 3),
        ("Has Jill left?", "Have Jill left?", 0),
        ("The actor who has seen the dogs has left.", "The actor who has seen the dogs have left.", 7),
    ],
)
def test_mask_target_of_differing_word(good: str, bad: str, target: int) -> None:
    record = testbed.mask_target({"sentence_good": good, "sentence_bad": bad, "UID": "kept"})
    assert record["target"] == target
    assert record["UID"] == "kept"
    assert split_words(record["masked"])[target] == "[MASK]"
    assert record["masked"].replace("[MASK]", record["good"]) == testbed.expand_contractions(good)
    assert record["masked"].replace("[MASK]", record["bad"]) == testbed.expand_contractions(bad)


@pytest.mark.parametrize(
    ("good", "bad"), [("Jill left.", "Jill left."), ("Jill left.", "Jim leaves."), ("Jill left.", "Jill left it.")]
)
def test_mask_target_without_single_difference(good: str, bad: str) -> None:
    with pytest.raises(ValueError, match="exactly one word"):
        testbed.mask_target({"sentence_good": good, "sentence_bad": bad})


def test_each_paradigm_is_halved(blimp: Path) -> None:
    evaluation = testbed.held_out(blimp)
    assert tuple(evaluation) == testbed.HELD_OUT_PARADIGMS
    training = training_records(blimp)
    for paradigm, records in evaluation.items():
        kept_out = {record["pairID"] for record in records}
        trained = {record["pairID"] for record in training if record["UID"] == paradigm}
        assert len(kept_out) == len(records) == PAIRS // 2
        assert kept_out | trained == {record["pairID"] for record in testbed.read_paradigm(blimp, paradigm)}
        assert not kept_out & trained


def test_held_out_sentences_are_dropped(blimp: Path, tmp_path: Path) -> None:
    evaluation = [record for records in testbed.held_out(blimp).values() for record in records]
    keys = ("sentence_good", "sentence_bad")
    shouted = [record | {key: record[key].upper() for key in keys} for record in evaluation[:5]]
    swapped = [
        record | dict(zip(keys, (record[key] for key in keys[::-1]), strict=True)) for record in evaluation[5:10]
    ]
    new = testbed.agreement_sentences(20, seed=8)
    contracted = {"sentence_good": "Jill hasn't left.", "sentence_bad": "Jill haven't left."}
    given = [*evaluation[10:15], *shouted, *new, *swapped, contracted]
    assert drop_held_out(given, blimp) == [*new, contracted]
    folder = tmp_path / "blimp"
    shutil.copytree(blimp, folder)
    paradigm = testbed.HELD_OUT_PARADIGMS[3]
    contracted = {"sentence_good": "Jill hasn't left.", "sentence_bad": "Jill haven't left.", "UID": paradigm}
    write_paradigm(folder, paradigm, [contracted] * PAIRS)
    written_out = {"sentence_good": "Jill has not left.", "sentence_bad": "Jill have not left."}
    assert drop_held_out([written_out], folder) == []
    assert drop_held_out([written_out], blimp) == [written_out]
    with pytest.raises(FileNotFoundError, match="expected BLiMP's"):
        testbed.held_out(tmp_path)


# Positions


ODD: list[testbed.Record] = [
    {"masked": "[MASK] Zoë's ex-wives qwertyuiop!", "target": 0, "cue": [1, 2, 3]},
    {"masked": "Who, if anyone, [MASK] 3.14 unquestionably left?", "target": 5, "cue": [0, 1, 6, 8]},
    {"masked": "The wugs “near” the blicket [MASK].", "target": 5, "cue": [1, 2, 6]},
]
RECORDS = ODD + testbed.agreement_sentences(50, seed=5)


def test_positions_equal_encoding_by_words() -> None:
    for record in RECORDS:
        by_words = TOKENIZER(split_words(record["masked"]), is_split_into_words=True)
        encoded = encode_record(TOKENIZER, record)
        assert encoded.encoding["input_ids"][0].tolist() == by_words["input_ids"]
        assert encoded.encoding["input_ids"][0, encoded.target] == TOKENIZER.mask_token_id
        assert encoded.cue == [by_words.word_ids().index(word) for word in record["cue"]]


#: What makes one token of each of the words "the" and "some" with the space before them.
MERGES = [(f"Ġ{word[:end]}", word[end]) for word in ("the", "some") for end in range(len(word))]


@pytest.mark.parametrize("mask", ["<mask>", "[MASK]", "~"])
def test_positions_with_byte_level_tokenizer(mask: str) -> None:
    tokenizer = byte_tokenizer(*MERGES, mask_token=mask)
    for record in RECORDS:
        encoded = encode_record(tokenizer, record)
        ids = encoded.encoding["input_ids"][0]
        assert ids[encoded.target] == tokenizer.mask_token_id
        assert (ids == tokenizer.mask_token_id).sum() == 1
        words = split_words(record["masked"])
        for word, position in zip(record["cue"], encoded.cue, strict=True):
            # The text that starts at the first piece of a word starts with the word.
            assert tokenizer.decode(ids[position:]).strip().startswith(words[word])
    # The forms take the place of the mask, so the space before it is theirs.
    forms = form_ids(tokenizer, {"masked": "It is near [MASK] hat.", "target": 3, "good": "the", "bad": "some"})
    assert tokenizer.convert_ids_to_tokens(list(forms or ())) == ["Ġthe", "Ġsome"]


def test_forms_and_own_words() -> None:
    tokenizer = TOKENIZER
    record: testbed.Record = {"masked": "The pictures [MASK] nice.", "target": 2, "good": "are", "bad": "is"}
    ids = form_ids(tokenizer, record)
    assert ids == (tokenizer.convert_tokens_to_ids("are"), tokenizer.convert_tokens_to_ids("is"))
    assert form_ids(tokenizer, record | {"good": "Are"}) == ids
    assert form_ids(tokenizer, record | {"good": "exasperate"}) is None
    assert form_ids(tokenizer, record | {"bad": "exasperates"}) is None
    assert form_ids(tokenizer, record | {"bad": "見"}) is None
    record = {"masked": "The wugs, are nice.", "target": 1, "cue": [0]}
    own = record | {"words": ["The wugs,", "are", "nice."]}
    encoded = encode_record(tokenizer, own)
    tokens = encoded.encoding.tokens()
    assert (tokens[encoded.target], tokens[encoded.cue[0]]) == ("are", "the")
    assert tokens[encode_record(tokenizer, record).target].startswith("w")
    assert form_ids(tokenizer, own | {"good": "are", "bad": "is"}) == ids
    with pytest.raises(ValueError, match="has no mask token"):
        encode_record(byte_tokenizer(), RECORDS[0])


@pytest.mark.parametrize("words", [["The", "nice"], ["The", "wugs", "wugs"]])
def test_own_words_missing_in_sentence(words: list[str]) -> None:
    with pytest.raises(ValueError, match="sentence continues"):
        encode_record(TOKENIZER, {"masked": "The wugs are nice.", "words": words, "target": 1})


# The grammar's sentences have BLiMP's format, and the cue decides the form of the target


# The number of a form, independent of the code of the grammar.
IRREGULAR_PLURALS = {"men", "women", "children", "wives", "people", "mice", "knives", "leaves", "shelves"}
WITHOUT_NUMBER = {"the", "some", "my", "your", "our"}


@pytest.fixture(scope="module", params=KINDS)
def records(request: pytest.FixtureRequest) -> list[testbed.Record]:
    return testbed.agreement_sentences(600, seed=3, paradigm=request.param)


def is_plural_noun(noun: str) -> bool:
    return noun in IRREGULAR_PLURALS or noun.endswith("s")


def is_plural_form(form: str) -> bool:
    """Also of a finite verb: they impress, she impresses."""
    return form == "themselves" or not re.search("[^s]s$|^that$|self$", form)


def test_good_form_agrees_with_cue(records: list[testbed.Record]) -> None:
    for record in records:
        (cue,) = record["cue"]
        plural = is_plural_noun(split_words(record["masked"])[cue].lower())
        assert is_plural_form(record["good"]) == plural, record
        assert is_plural_form(record["bad"]) != plural, record
    plurals = [is_plural_form(record["good"]) for record in records]
    assert 240 < sum(plurals) < 360
    assert [record["label"] == "plural" for record in records] == plurals


def test_other_cue_is_the_noun_in_the_other_number(records: list[testbed.Record]) -> None:
    """With it, the bad form is the right one; some record of the grammar is that pair."""
    for record in records:
        (cue,), (other,) = record["cue"], record["other_cue"]
        noun = split_words(record["masked"])[cue].lower()
        assert is_plural_noun(other) != is_plural_noun(noun)
        assert is_plural_noun(other) != is_plural_form(record["good"])
        singular, plural = sorted([noun, other], key=is_plural_noun)
        assert plural in IRREGULAR_PLURALS or plural in (f"{singular}s", f"{singular}es", f"{singular[:-1]}ies")


def test_sentences_differ_only_in_target_and_show_no_other_number(records: list[testbed.Record]) -> None:
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
    records = testbed.agreement_sentences(600, seed=3, paradigm="relational_noun")
    distractors = [split_words(record["masked"])[record["target"] - 1] for record in records]
    pairs = zip(distractors, records, strict=True)
    assert 240 < sum(is_plural_noun(one) != is_plural_form(record["good"]) for one, record in pairs) < 360
    records = testbed.agreement_sentences(5000, seed=1)
    assert len({record["sentence_good"] for record in records}) == 5000
    first, again, other = (testbed.agreement_sentences(50, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    with pytest.raises(ValueError, match="is 'adverb'"):
        testbed.agreement_sentences(1, paradigm="adverb")
    for n in (-1, 10**12):
        with pytest.raises(ValueError, match=f"n is {n}; the gram"):
            testbed.agreement_sentences(n)
