"""The training scripts run end to end on a small folder in BLiMP's format."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import train_causal
import train_masked
from safetensors.torch import load_file

from captum_vz.testbed import HELD_OUT_PARADIGMS, agreement_sentences, held_out, load_model
from tests.testbed.conftest import BLIMP_SEED, PAIRS

TINY = ["--epochs=1", "--grammar-pairs=100", "--layers=1", "--width=16", "--heads=2"]
SCRIPTS: dict[str, tuple[Any, list[str]]] = {
    "BertForMaskedLM": (train_masked, []),
    "RobertaPreLayerNormForMaskedLM": (train_masked, ["--architecture=roberta-prelayernorm"]),
    "LlamaForCausalLM": (train_causal, []),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_script_writes_loadable_model(kind: str, blimp: Path, tmp_path: Path) -> None:
    """It reads texts of the greatest length, and its card states the command without the machine's paths."""
    script, more = SCRIPTS[kind]
    script.main(["--blimp", str(blimp), "--output", str(tmp_path / "m"), *TINY, *more])
    model, tokenizer = load_model(str(tmp_path / "m"))
    assert type(model).__name__ == kind
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 16)
    weights = load_file(tmp_path / "m" / "model.safetensors")  # each once, in half precision
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    assert sum(weight.numel() for weight in weights.values()) == sum(weight.numel() for weight in model.parameters())
    longest = tokenizer("hat " * 200, truncation=True, return_tensors="pt")
    assert longest["input_ids"].shape == (1, train_masked.MAX_LENGTH)
    assert model(**longest).logits.isfinite().all()
    card = json.loads((tmp_path / "m" / "card.json").read_text("utf-8"))
    assert card["command"].startswith(
        f"python tutorials/training/{script.__name__}.py --blimp PATH --seed 0 --epochs 1"
    )
    assert all(one.replace("=", " ") in card["command"] for one in more)
    assert str(blimp) not in json.dumps(card)
    if script is train_masked:
        figures = card["accuracy"]["held_out"]
        measured = [figures[paradigm] for paradigm in HELD_OUT_PARADIGMS if paradigm in figures]
        pairs = figures["overall"]["pairs"]
        assert pairs == sum(one["pairs"] for one in measured) == 5 * (PAIRS // 2) - figures["dropped"]
        right = sum(one["pairs"] * one["accuracy"] for one in measured)
        assert figures["overall"]["accuracy"] == pytest.approx(right / pairs, abs=1e-3)


def test_training_pairs_leave_out_held_out(blimp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out sentences are left out even if the grammar gives the same sentences."""
    monkeypatch.setattr(train_masked, "GRAMMAR_SEED", BLIMP_SEED)
    evaluation = {record["sentence_good"] for records in held_out(blimp).values() for record in records}
    grammar = {record["sentence_good"] for record in agreement_sentences(5 * PAIRS, BLIMP_SEED)}
    assert grammar > evaluation
    pairs = train_masked.training_pairs(blimp, grammar_pairs=5 * PAIRS)
    assert {record["sentence_good"] for record in pairs} == grammar - evaluation
