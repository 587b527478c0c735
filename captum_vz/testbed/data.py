"""The sentence pairs of BLiMP: how to read them, find the target word, and split them into training and held-out."""

import json
import random
import re
from itertools import zip_longest
from pathlib import Path
from typing import Final

from captum_vz.text import MASK, Record, read_json_lines, split_words, word_spans

#: The paradigms of Mohebbi et al. (2023). Half of the pairs of each are held out from training.
HELD_OUT_PARADIGMS: Final = (
    "anaphor_number_agreement",
    "determiner_noun_agreement_2",
    "determiner_noun_agreement_with_adj_2",
    "distractor_agreement_relational_noun",
    "regular_plural_subject_verb_agreement_1",
)
AGREEMENT: Final = ("anaphor_agreement", "determiner_noun_agreement", "subject_verb_agreement")

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
    """A BLiMP record with the word in which its two sentences differ.

    Contractions are written out first.

    Args:
        record: A record with ``sentence_good`` and ``sentence_bad``.

    Returns:
        The record with ``good`` and ``bad``, the two forms of the differing word, ``target``, its position, and
        ``masked``, the sentence with ``[MASK]`` at this position.

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


def read_paradigm(blimp: str | Path, paradigm: str) -> list[Record]:
    """The records of one paradigm of BLiMP, with the target masked, see :func:`mask_target`.

    Args:
        blimp: The folder with BLiMP's `.jsonl` files.
        paradigm: The name of a file in this folder, without its ending.

    Raises:
        FileNotFoundError: The folder has no such file.
        ValueError: The file does not hold BLiMP's records.
    """
    path = Path(blimp) / f"{paradigm}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: expected BLiMP's 'data' folder (https://github.com/alexwarstadt/blimp)."
        )
    records = []
    for number, record in read_json_lines(path):
        try:
            records.append(mask_target(record))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no record of BLiMP ({error}).") from error
    return records


def held_out(blimp: str | Path) -> dict[str, list[Record]]:
    """The pairs of the paper's five paradigms that the embedded model was not trained on: half of each paradigm.

    The halves depend only on the files, so they are the same in each call.

    Args:
        blimp: The folder with BLiMP's `.jsonl` files.

    Returns:
        For each of :data:`HELD_OUT_PARADIGMS` its held-out records, see :func:`mask_target`.
    """
    return {paradigm: _halves(read_paradigm(blimp, paradigm), paradigm)[1] for paradigm in HELD_OUT_PARADIGMS}


def training_records(blimp: str | Path) -> list[Record]:
    """All pairs of BLiMP's agreement paradigms, except the held-out halves."""
    training: list[Record] = []
    for path in sorted(Path(blimp).glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            term = json.loads(lines.readline() or "{}").get("linguistics_term")
        if term in AGREEMENT:
            records = read_paradigm(blimp, path.stem)
            training += _halves(records, path.stem)[0] if path.stem in HELD_OUT_PARADIGMS else records
    return training


def drop_held_out(records: list[Record], blimp: str | Path) -> list[Record]:
    """The records that share no sentence with the held-out halves. Case and contractions are ignored."""
    evaluation = [record for half in held_out(blimp).values() for record in half]
    held = {sentence for record in evaluation for sentence in _sentences(record)}
    return [record for record in records if held.isdisjoint(_sentences(record))]


def _halves(records: list[Record], paradigm: str) -> tuple[list[Record], list[Record]]:
    evaluation = set(random.Random(paradigm).sample(range(len(records)), len(records) // 2))
    training = [record for index, record in enumerate(records) if index not in evaluation]
    return training, [records[index] for index in sorted(evaluation)]


def _sentences(record: Record) -> set[str]:
    return {expand_contractions(record[key]).lower() for key in ("sentence_good", "sentence_bad")}
