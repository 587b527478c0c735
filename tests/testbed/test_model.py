"""The embedded models and those of packages: their size, their loading, their inputs and their accuracy."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train_causal
import train_masked
import transformers
from safetensors.torch import load_file
from train_causal import causal_records, continues_well, next_logits, prefers_good_next

from captum_vz import find_layers, testbed
from captum_vz.cli import main
from captum_vz.errors import ArgumentError
from captum_vz.testbed.models import EMBEDDED, PACKAGED
from captum_vz.text import encode_record
from tests.command import Output
from tests.testbed.conftest import BLIMP_SEED, KINDS, PAIRS, trained_sentences

TEXT = "the pictures of some hat [MASK] scaring marcus."
LAYERS = {"agreement": 4, "six-layers": 6, "pre-norm": 5, "causal": 3}


@pytest.mark.parametrize("name", LAYERS)
def test_model_is_loaded_silently_and_by_transformers(name: str, capfd: Output) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model, tokenizer = testbed.load_model(name)
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(find_layers(model)) == model.config.num_hidden_layers == LAYERS[name]
    assert tokenizer.get_vocab() == testbed.load_model()[1].get_vocab()
    assert tokenizer.pad_token_id == model.config.pad_token_id
    assert tokenizer.model_max_length <= model.config.max_position_embeddings
    assert tokenizer.tokenize("The HAT [MASK] red.") == ["the", "hat", "[MASK]", "red", "."]
    folder = EMBEDDED[name]
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert sum(files.values()) <= (2e6 if name == "causal" else 4e6)
    batch = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    assert torch.equal(batch["input_ids"], tokenizer(TEXT, return_tensors="pt")["input_ids"])
    kind = f"AutoModelFor{'CausalLM' if name == 'causal' else 'MaskedLM'}"
    loaded = getattr(transformers, kind).from_pretrained(folder)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_folder_without_model(tmp_path: Path) -> None:
    for wrong, meant in ((tmp_path, ""), (str(tmp_path), ""), ("agrement", r" \(did you mean agreement\?\)")):
        with pytest.raises(FileNotFoundError, match=f"missing{meant}"):
            testbed.load_model(wrong)


def test_prefers_good_in_batches() -> None:
    model, tokenizer = testbed.load_model()
    records = testbed.agreement_sentences(60, seed=11)
    one_by_one = torch.cat([testbed.prefers_good(model, tokenizer, [record]) for record in records])
    assert torch.equal(testbed.prefers_good(model, tokenizer, records, batch_size=25), one_by_one)
    swapped = [record | {"good": record["bad"], "bad": record["good"]} for record in records]
    assert torch.equal(testbed.prefers_good(model, tokenizer, swapped), ~one_by_one)
    assert testbed.prefers_good(model, tokenizer, []).shape == (0,)
    record: testbed.Record = {"masked": "The wugs [MASK].", "target": 2, "good": "blicket", "bad": "blickets"}
    with pytest.raises(ValueError, match="a single token"):
        testbed.prefers_good(model, tokenizer, [record])


@pytest.mark.parametrize("name", LAYERS)
def test_accuracy_on_new_grammar_sentences(name: str) -> None:
    loaded, trained = testbed.load_model(name), trained_sentences()
    for kind in KINDS:
        fresh = [
            r for r in testbed.agreement_sentences(110, seed=77, paradigm=kind) if r["sentence_good"] not in trained
        ]
        assert len(fresh) >= 100
        if name != "causal":
            assert testbed.prefers_good(*loaded, fresh).double().mean() >= 0.95, kind
        elif usable := causal_records(loaded[1], fresh):
            assert prefers_good_next(*loaded, usable).double().mean() >= 0.95, kind


def test_causal_model_continues_prefixes() -> None:
    causal, trained = testbed.load_model("causal"), trained_sentences()
    prefixes = testbed.agreement_sentences(330, seed=78, paradigm="relational_noun")
    fresh = [record for record in prefixes if record["sentence_good"] not in trained][:300]
    assert len(fresh) == 300
    assert continues_well(*causal, fresh).double().mean() >= 0.97
    model, tokenizer = causal
    records = causal_records(tokenizer, testbed.agreement_sentences(12))
    for record, logits in zip(records, next_logits(model, tokenizer, records, batch_size=5), strict=True):
        encoded = encode_record(tokenizer, record)
        prefix = encoded.encoding["input_ids"][:, : encoded.target]
        torch.testing.assert_close(logits, model(prefix).logits[0, -1], rtol=1e-4, atol=1e-4)


# Models of packages


LOADED: Any = testbed.load_model("causal")


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes "smollm2" a file that transformers reads as the embedded causal model. The folder that it becomes."""
    gguf = tmp_path / "package" / "weights.gguf"
    gguf.parent.mkdir()
    gguf.touch()
    monkeypatch.setattr(testbed.models, "model_source", {**EMBEDDED, "smollm2": gguf}.get)
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.cached_assets_path", lambda *names, **further: cache)

    def read(*names: Any, **options: Any) -> Any:
        assert options.pop("gguf_file") == "weights.gguf"
        model = testbed.load_model("causal")[0]
        model.config.quantization_config = {"quant_method": "gguf"}
        return model

    tokenizers = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained",
        lambda folder, **options: LOADED[1] if "gguf_file" in options else tokenizers(folder, **options),
    )
    return cache / "weights"


@pytest.mark.parametrize("name", PACKAGED)
def test_missing_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setitem(sys.modules, PACKAGED[name].modules[-1], None)
    with pytest.raises(ArgumentError, match=f"{name} needs a") as caught:
        testbed.load_model(name)
    for command in (["explain", "a"], ["study", "--grammar", "2", "--folder", str(tmp_path / "out")]):
        assert main([*command, "--model", name]) == 2
        assert str(caught.value) in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_file_is_converted_once(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = testbed.load_model("smollm2")
    assert all(map(torch.equal, model.state_dict().values(), LOADED[0].state_dict().values()))
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.get_vocab() == LOADED[1].get_vocab()
    assert list(converted.parent.iterdir()) == [converted]
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    testbed.load_model("smollm2")


def test_interrupted_conversion_leaves_nothing(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            testbed.load_model("smollm2")
    assert list(converted.parent.iterdir()) == []
    testbed.load_model("smollm2")


def test_two_processes_convert_at_once(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is faster: its folder is there when this one is ready."""
    own = os.rename

    def late(made: Path, folder: Path) -> None:
        monkeypatch.setattr("os.rename", own)
        testbed.load_model("smollm2")
        own(made, folder)

    monkeypatch.setattr("os.rename", late)
    testbed.load_model("smollm2")
    assert list(converted.parent.iterdir()) == [converted]


# The training scripts run end to end on a small folder in BLiMP's format


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
    model, tokenizer = testbed.load_model(str(tmp_path / "m"))
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
        measured = [figures[paradigm] for paradigm in testbed.HELD_OUT_PARADIGMS if paradigm in figures]
        pairs = figures["overall"]["pairs"]
        assert pairs == sum(one["pairs"] for one in measured) == 5 * (PAIRS // 2) - figures["dropped"]
        right = sum(one["pairs"] * one["accuracy"] for one in measured)
        assert figures["overall"]["accuracy"] == pytest.approx(right / pairs, abs=1e-3)


def test_training_pairs_leave_out_held_out(blimp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_masked, "GRAMMAR_SEED", BLIMP_SEED)
    evaluation = {record["sentence_good"] for records in testbed.held_out(blimp).values() for record in records}
    grammar = {record["sentence_good"] for record in testbed.agreement_sentences(5 * PAIRS, BLIMP_SEED)}
    assert grammar > evaluation
    pairs = train_masked.training_pairs(blimp, grammar_pairs=5 * PAIRS)
    assert {record["sentence_good"] for record in pairs} == grammar - evaluation
