"""BLiMP's five paradigms: cues and numbers by rule, on sentences written by hand and, if it is available, on BLiMP."""

import json
from collections import Counter
from pathlib import Path

import pytest

from captum_vz.study import Example
from captum_vz.study.examples.blimp import UNBALANCED, blimp_examples, find_cue, number, select_blimp, with_other_cues
from captum_vz.testbed import HELD_OUT_PARADIGMS, Record, held_out, mask_target
from captum_vz.text import form_ids, split_words
from tests.study.conftest import Shipped

ANAPHOR, NOUN, ADJECTIVE, RELATIONAL, PLURAL = HELD_OUT_PARADIGMS

# The target between brackets as good|bad, the cues between asterisks.
SENTENCES = {
    ANAPHOR: [
        "*Rosa* did not warn [herself|themselves].",
        "*Guests* warned [themselves|himself].",
        "*Every* *committee* has warned [itself|themselves].",
        "*A* *lot* *of* *guests* smiled at [themselves|herself].",
        "*Oxford* *University* praised [itself|themselves].",
    ],
    NOUN: [
        "Rosa painted [this|these] *boat*.",
        "Rosa painted [those|that] rowing *boats*.",
        "This boat passed [this|these] *boat*.",
    ],
    ADJECTIVE: [
        "Rosa painted [that|those] old *boat*.",
        "Rosa painted [these|this] old rowing *boats*.",
        "Rosa painted [these|this] out in the open *boats*.",
    ],
    RELATIONAL: [
        "The *niece* of some guests [isn't|aren't] smiling.",
        "Two rowing *boats* of Rosa [worry|worries] us.",
        "A *song* about the nieces of Rosa [tosses|toss] us.",
    ],
    PLURAL: [
        "*Rosa* [worries|worry] us.",
        "The rowing *boats* [toss|tosses] Rosa.",
        "A *lot* of guests [weren't|wasn't] smiling.",
        "*Rosa* [hasn't|haven't] smiled.",
        "That *boat* [goes|go] down.",
        "This *boat* [was|were] old.",
    ],
}


def record(paradigm: str, sentence: str) -> tuple[Record, list[int]]:
    """The record that BLiMP would have for a sentence, and the positions of its cues."""
    start, forms, end = sentence.partition("[")[0], sentence.split("[")[1].split("]")[0], sentence.split("]")[1]
    good, bad = (f"{start}{form}{end}" for form in forms.split("|"))
    masked = mask_target(
        {"sentence_good": good.replace("*", ""), "sentence_bad": bad.replace("*", ""), "UID": paradigm}
    )
    if paradigm in (NOUN, ADJECTIVE):
        words = end.rstrip(".").replace("*", "").split()
        masked["two_prefix_word"] = " ".join(words[-2:] if "rowing" in words else words[-1:])
    marked = split_words(start + "[MASK]" + end)
    return masked, [place for place, word in enumerate(marked) if word.startswith("*")]


ALL = [(paradigm, sentence) for paradigm, some in SENTENCES.items() for sentence in some]
PLURALS = ("themselves", "those", "these", "weren't", "worry", "toss")


@pytest.mark.parametrize(("paradigm", "sentence"), ALL)
def test_cue_and_number_are_found(paradigm: str, sentence: str) -> None:
    found, cue = record(paradigm, sentence)
    assert find_cue(found) == cue
    form = sentence.split("[")[1].split("|")[0]
    singular = form not in PLURALS
    assert number(found) == ("singular" if singular else "plural")
    swapped = found | {"good": found["bad"], "bad": found["good"]}
    assert number(swapped) == ("plural" if singular else "singular")


@pytest.mark.parametrize(
    ("paradigm", "changed"),
    [
        (NOUN, {"two_prefix_word": "ship"}),  # another word than the sentence has
        (NOUN, {"two_prefix_word": ""}),
        (NOUN, {"masked": "Rosa painted [MASK] boat by the boat."}),  # which of the two?
        (ANAPHOR, {"masked": "A lot [MASK].", "target": 2}),
        (ANAPHOR, {"masked": "[MASK] is here.", "target": 0}),
        (RELATIONAL, {"masked": "[MASK] is here.", "target": 0}),
        (RELATIONAL, {"masked": "Of the boats [MASK] here.", "target": 3}),
        (PLURAL, {"masked": "The [MASK] here.", "target": 1}),
    ],
)
def test_unclear_cue_stays_empty(paradigm: str, changed: Record) -> None:
    found, _ = record(paradigm, SENTENCES[paradigm][0])
    assert find_cue(found | changed) == []


def test_unclear_number_and_unknown_paradigm() -> None:
    assert number({"good": "mice", "bad": "cheese"}) is None
    assert number({"good": "is", "bad": "was"}) is None
    with pytest.raises(ValueError, match="rule for the cues"):
        find_cue({"UID": "wh_island", "masked": "Who [MASK]?", "target": 1})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The sentences above in BLiMP's format, each six times. About three of each are held out."""
    for paradigm, sentences in SENTENCES.items():
        records = [record(paradigm, sentence)[0] | {"pairID": str(n)} for n, sentence in enumerate(sentences * 6)]
        (tmp_path / f"{paradigm}.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return tmp_path


def test_held_out_records_become_examples(folder: Path) -> None:
    examples = {example.id: example for example in blimp_examples(folder)}
    records = [record for half in held_out(folder).values() for record in half]
    assert set(examples) <= {f"{record['UID']} {record['pairID']}" for record in records}
    for record in records:
        if record["UID"] != UNBALANCED:
            example = examples[f"{record['UID']} {record['pairID']}"]
            assert (example.text, example.group) == (record["masked"], record["UID"])
            assert (list(example.cue), example.label) == (find_cue(record), number(record))
            assert (example.good, example.bad) == (record["good"], record["bad"])
    assert blimp_examples(str(folder)) == list(examples.values())
    halves = held_out(folder)[PLURAL]
    before = Counter(number(record) for record in halves)
    after = Counter(example.label for example in blimp_examples(folder) if example.group == PLURAL)
    assert before["singular"] > before["plural"] == after["plural"] == after["singular"] > 0


def test_pairs_of_several_tokens_dropped(folder: Path, shipped: Shipped) -> None:
    _, tokenizer = shipped
    vocabulary = tokenizer.get_vocab()
    kept = blimp_examples(folder, [tokenizer])
    assert kept
    assert len(kept) < len(blimp_examples(folder))
    selection = select_blimp(folder, [tokenizer])
    pairs = sum(map(len, held_out(folder).values()))
    single = sum(form_ids(tokenizer, record) is not None for half in held_out(folder).values() for record in half)
    assert (selection.pairs, selection.several_tokens) == (pairs, pairs - single)
    assert selection.unbalanced == single - len(kept) > 0
    total = pairs + selection.trained_on
    assert f"{len(kept)} of {total} pairs of BLiMP. Left out: {total - pairs} that the embedded" in str(selection)
    assert len(select_blimp(folder, whole=True).examples) == total == 6 * len(ALL)
    assert all(example.good in vocabulary and example.bad in vocabulary for example in kept)


OTHER_NUMBERS = [
    ("The *boat* of Rosa [sinks|sink].", ("boats",)),
    ("The *boats* of Rosa [sink|sinks].", ("boat",)),
    ("The *city* of Rosa [grows|grow].", ("cities",)),
    ("Some *cities* of Rosa [grow|grows].", ("city",)),
    ("A *boat* of Rosa [sinks|sink].", ()),  # "a boats" is no sentence
    ("Most *boats* of Rosa [sink|sinks].", ()),
    ("The *niece* of Rosa [sinks|sink].", ()),  # no sentence has "nieces"
    ("*Guy* [sinks|sink].", ()),  # a name, though "guys" is a cue
    ("Some *guys* of Rosa [sink|sinks].", ()),
]


def test_other_numbers_are_cues_of_other_sentences() -> None:
    examples = []
    for place, (sentence, _) in enumerate(OTHER_NUMBERS):
        masked, cue = record(RELATIONAL, sentence)
        known = masked | {"cue": cue, "label": number(masked), "pairID": place}
        examples.append(Example.from_record(known))
    found = with_other_cues(examples)
    assert [one.other_cue for one in found] == [other for _, other in OTHER_NUMBERS]
    assert [(one.id, one.words, one.cue) for one in found] == [(one.id, one.words, one.cue) for one in examples]
