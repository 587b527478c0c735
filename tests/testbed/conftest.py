"""Fixtures: a small folder in BLiMP's format with sentences of the grammar."""

import json
from pathlib import Path

import pytest
from train_masked import GRAMMAR_PAIRS, GRAMMAR_SEED

from captum_vz.testbed import HELD_OUT_PARADIGMS, Record, agreement_sentences

KINDS = ("anaphor", "determiner_noun", "determiner_adjective_noun", "relational_noun", "subject_verb")
PAIRS = 40
BLIMP_SEED = 7


def trained_sentences() -> set[str]:
    """The sentences of the grammar that the embedded models were trained on."""
    return {record["sentence_good"] for record in agreement_sentences(GRAMMAR_PAIRS, GRAMMAR_SEED)}


def write_paradigm(folder: Path, name: str, records: list[Record]) -> None:
    added = ("masked", "target", "good", "bad", "cue", "label")
    lines = [json.dumps({key: r[key] for key in r if key not in added} | {"UID": name}) for r in records]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def blimp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blimp")
    for paradigm, kind in zip(HELD_OUT_PARADIGMS, KINDS, strict=True):
        write_paradigm(folder, paradigm, agreement_sentences(PAIRS, BLIMP_SEED, paradigm=kind))
    return folder
