"""The training script runs end to end on a small folder in BLiMP's format."""

import json
import random
from pathlib import Path

import pytest
import torch
import train_masked as train
from safetensors.torch import load_file
from train_masked import build_tokenizer, drop_matches, main, train_model, training_pairs
from transformers import PreTrainedTokenizerFast

from captum_vz.testbed import HELD_OUT_PARADIGMS, agreement_sentences, held_out, load_model, prefers_good
from tests.testbed.conftest import BLIMP_SEED, PAIRS

TINY = ["--epochs=1", "--grammar-pairs=100", "--layers=1", "--width=16", "--heads=2"]


@pytest.fixture(scope="module")
def trained(blimp: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    main(["--blimp", str(blimp), "--output", str(folder), *TINY])
    return folder


def test_script_writes_loadable_model(trained: Path) -> None:
    model, tokenizer = load_model(trained)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 16)
    batch = tokenizer("The hats [MASK] red.", return_tensors="pt")
    assert model(**batch).logits.shape == (1, batch["input_ids"].shape[1], len(tokenizer))
    weights = load_file(trained / "model.safetensors")  # each once, in half precision
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    assert sum(weight.numel() for weight in weights.values()) == sum(weight.numel() for weight in model.parameters())


def test_card_states_command_and_accuracy(trained: Path, blimp: Path) -> None:
    card = json.loads((trained / "card.json").read_text(encoding="utf-8"))
    assert card["command"].startswith(
        "python tutorials/training/train_masked.py --blimp PATH --seed 0 --epochs 1 --grammar-pair"
    )
    assert str(blimp) not in json.dumps(card)
    assert card["training_pairs"] == 5 * (PAIRS - PAIRS // 2) + 100
    figures = card["accuracy"]["held_out"]
    measured = [figures[paradigm] for paradigm in HELD_OUT_PARADIGMS if paradigm in figures]
    pairs = figures["overall"]["pairs"]
    assert pairs == sum(one["pairs"] for one in measured) == 5 * (PAIRS // 2) - figures["dropped"]
    right = sum(one["pairs"] * one["accuracy"] for one in measured)
    assert figures["overall"]["accuracy"] == pytest.approx(right / pairs, abs=1e-3)


@pytest.mark.slow
def test_seed_determines_written_files(trained: Path, blimp: Path, tmp_path: Path) -> None:
    main(["--blimp", str(blimp), "--output", str(tmp_path / "again"), *TINY])
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()
    _, tokenizer = load_model(trained)
    other = train_model(tokenizer, training_pairs(blimp, 100), epochs=1, seed=1, layers=1, width=16, heads=2)
    model, _ = load_model(trained)
    assert not torch.allclose(other.cls.predictions.decoder.weight, model.cls.predictions.decoder.weight, atol=1e-2)


def test_training_learns_good_forms() -> None:
    """All good forms are plural here, so that a few steps are enough to learn to prefer the plural."""
    records = [r for r in agreement_sentences(60, paradigm="determiner_noun") if r["good"] in ("these", "those")]
    sentences = [record[key] for record in records for key in ("sentence_good", "sentence_bad")]
    tokenizer = build_tokenizer(sentences, max_length=128)
    model = train_model(tokenizer, records, epochs=60, layers=1, width=32, heads=2)
    assert prefers_good(model, tokenizer, records).all()
    assert not model.training


def test_layers_that_norm_their_inputs(blimp: Path, tmp_path: Path) -> None:
    """The pre-norm model is trained and loaded by the same scripts, and reads texts of the greatest length."""
    main(["--blimp", str(blimp), "--output", str(tmp_path), *TINY, "--architecture=roberta-prelayernorm"])
    model, tokenizer = load_model(tmp_path)
    assert type(model).__name__ == "RobertaPreLayerNormForMaskedLM"
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight
    longest = tokenizer("hat " * 200, truncation=True, return_tensors="pt")
    assert longest["input_ids"].shape == (1, train.MAX_LENGTH)
    assert model(**longest).logits.isfinite().all()
    assert "--architecture roberta-prelayernorm" in json.loads((tmp_path / "card.json").read_text("utf-8"))["command"]


def test_training_pairs_leave_out_held_out(blimp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out sentences are left out even if the grammar gives the same sentences."""
    monkeypatch.setattr(train, "GRAMMAR_SEED", BLIMP_SEED)
    evaluation = {record["sentence_good"] for records in held_out(blimp).values() for record in records}
    grammar = {record["sentence_good"] for record in agreement_sentences(5 * PAIRS, BLIMP_SEED)}
    assert grammar > evaluation
    pairs = train.training_pairs(blimp, grammar_pairs=5 * PAIRS)
    assert {record["sentence_good"] for record in pairs} == grammar - evaluation


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(["The hats and the hat are red; that cats have.", "Zoë's 2 wugs"], max_length=64, shared=2)


def test_words_of_text_are_pieces(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = tokenizer.tokenize("The hats and the hat are red; that cats have. Zoë's 2 wugs")
    assert " ".join(pieces) == "the hats and the hat are red ; that cats have . zoe ' s 2 wugs"


def test_drop_matches_frequency(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary, draw = tokenizer.get_vocab(), random.Random(0)
    splits = [tokenizer.convert_ids_to_tokens(drop_matches("hats", vocabulary, 0.3, draw)) for _ in range(2000)]
    assert sum(split == ["hats"] for split in splits) / 2000 == pytest.approx(0.7, abs=0.03)
    assert {"".join(piece.removeprefix("##") for piece in split) for split in splits} == {"hats"}
    assert len({tuple(split) for split in splits}) > 2
