"""Pairs are read, the differing word is found, and the held-out half is not in the training data."""

import shutil
from pathlib import Path

import pytest

from captum_vz.testbed import agreement_sentences, expand_contractions, held_out, mask_target, read_paradigm
from captum_vz.testbed.data import HELD_OUT_PARADIGMS, drop_held_out, training_records, word_spans
from captum_vz.text import split_words
from tests.testbed.conftest import PAIRS, write_paradigm

AUXILIARIES = ["is", "are", "was", "were", "has", "have", "had", "does", "do", "did", "could", "would", "should"]
CONTRACTIONS = {f"{word}n't": f"{word} not" for word in AUXILIARIES} | {"won't": "will not", "can't": "cannot"}


@pytest.mark.parametrize(("short", "long"), CONTRACTIONS.items())
def test_expand_each_contraction(short: str, long: str) -> None:
    assert expand_contractions(f"Jill {short} go.") == f"Jill {long} go."
    assert expand_contractions(f"{short.capitalize()} Jill go?") == f"{long.capitalize()} Jill go?"


@pytest.mark.parametrize("sentence", ["Jill's sister left.", "The ant wanted it.", "", "they don", "Bob's isn'tville"])
def test_expand_contractions_keeps_other_words(sentence: str) -> None:
    assert expand_contractions(sentence) == sentence


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
    record = mask_target({"sentence_good": good, "sentence_bad": bad, "UID": "kept"})
    assert record["target"] == target
    assert record["UID"] == "kept"
    assert split_words(record["masked"])[target] == "[MASK]"
    assert record["masked"].replace("[MASK]", record["good"]) == expand_contractions(good)
    assert record["masked"].replace("[MASK]", record["bad"]) == expand_contractions(bad)


@pytest.mark.parametrize(
    ("good", "bad"), [("Jill left.", "Jill left."), ("Jill left.", "Jim leaves."), ("Jill left.", "Jill left it.")]
)
def test_mask_target_without_single_difference(good: str, bad: str) -> None:
    with pytest.raises(ValueError, match="in exactly one word, got 'Jill left"):
        mask_target({"sentence_good": good, "sentence_bad": bad})


def test_each_paradigm_is_halved(blimp: Path) -> None:
    evaluation = held_out(blimp)
    assert tuple(evaluation) == HELD_OUT_PARADIGMS
    training = training_records(blimp)
    for paradigm, records in evaluation.items():
        kept_out = {record["pairID"] for record in records}
        trained = {record["pairID"] for record in training if record["UID"] == paradigm}
        assert len(kept_out) == len(records) == PAIRS // 2
        assert kept_out | trained == {record["pairID"] for record in read_paradigm(blimp, paradigm)}
        assert not kept_out & trained


def test_held_out_sentences_are_dropped(blimp: Path) -> None:
    evaluation = [record for records in held_out(blimp).values() for record in records]
    keys = ("sentence_good", "sentence_bad")
    shouted = [record | {key: record[key].upper() for key in keys} for record in evaluation[:5]]
    swapped = [
        record | dict(zip(keys, (record[key] for key in keys[::-1]), strict=True)) for record in evaluation[5:10]
    ]
    new = agreement_sentences(20, seed=8)
    contracted = {"sentence_good": "Jill hasn't left.", "sentence_bad": "Jill haven't left."}
    assert drop_held_out([*evaluation[10:15], *shouted, *new, *swapped, contracted], blimp) == [*new, contracted]


def test_drop_held_out_ignores_contractions(blimp: Path, tmp_path: Path) -> None:
    folder = tmp_path / "blimp"
    shutil.copytree(blimp, folder)
    paradigm = HELD_OUT_PARADIGMS[3]
    contracted = {"sentence_good": "Jill hasn't left.", "sentence_bad": "Jill haven't left.", "UID": paradigm}
    write_paradigm(folder, paradigm, [contracted] * PAIRS)
    written_out = {"sentence_good": "Jill has not left.", "sentence_bad": "Jill have not left."}
    assert drop_held_out([written_out], folder) == []
    assert drop_held_out([written_out], blimp) == [written_out]


def test_folder_without_blimp(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"anaphor_number_agreement\.jsonl is missing: expected BLiMP's"):
        held_out(tmp_path)
