"""The embedded causal model: its files, its accuracy, its training script."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_causal import causal_records, continues_well, main, next_logits, prefers_good_next
from train_masked import GRAMMAR_PAIRS, GRAMMAR_SEED
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from captum_vz.testbed import agreement_sentences, held_out, load_model
from captum_vz.testbed.model import CAUSAL_FOLDER
from captum_vz.text import encode_record

Causal = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]
CAUSAL_KINDS = ("anaphor", "relational_noun", "subject_verb")
CAUSAL_PARADIGMS = (
    "anaphor_number_agreement",
    "distractor_agreement_relational_noun",
    "regular_plural_subject_verb_agreement_1",
)


@pytest.fixture(scope="module")
def causal() -> Causal:
    return load_model("causal")


def test_causal_files_are_small() -> None:
    assert sum(path.stat().st_size for path in CAUSAL_FOLDER.iterdir()) <= 2e6


def test_loading_causal_model_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model, _ = load_model("causal")
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_transformers_loads_the_causal_model(causal: Causal) -> None:
    model, tokenizer = causal
    batch = AutoTokenizer.from_pretrained(CAUSAL_FOLDER)("the pictures of some hat", return_tensors="pt")
    assert batch["input_ids"].equal(tokenizer("the pictures of some hat", return_tensors="pt")["input_ids"])
    loaded = AutoModelForCausalLM.from_pretrained(CAUSAL_FOLDER)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_texts_are_open_at_the_end(causal: Causal) -> None:
    _, tokenizer = causal
    assert tokenizer("the pictures").tokens() == ["[CLS]", "the", "pictures"]
    assert tokenizer.get_vocab() == load_model()[1].get_vocab()


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("the pictures of some hat", {"are", "were", "have", "do"}),
        ("the picture of some hats", {"is", "was", "has", "does"}),
        ("your princes in the garden will hurt", {"themselves"}),
    ],
)
def test_greedy_continuation_agrees(causal: Causal, text: str, forms: set[str]) -> None:
    model, tokenizer = causal
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    new = tokenizer.convert_ids_to_tokens(output[inputs["input_ids"].shape[1] :])
    assert new[0] in forms
    assert new[-1] == "[SEP]"  # a sentence ends


def test_accuracy_on_new_sentences(causal: Causal) -> None:
    trained = {record["sentence_good"] for record in agreement_sentences(GRAMMAR_PAIRS, GRAMMAR_SEED)}
    for kind in CAUSAL_KINDS:
        fresh = [r for r in agreement_sentences(220, seed=77, paradigm=kind) if r["sentence_good"] not in trained]
        assert len(fresh) >= 200
        assert prefers_good_next(*causal, fresh).double().mean() >= 0.95, kind


def test_continuations_of_1000_new_prefixes(causal: Causal) -> None:
    trained = {record["sentence_good"] for record in agreement_sentences(GRAMMAR_PAIRS, GRAMMAR_SEED)}
    prefixes = agreement_sentences(1100, seed=78, paradigm="relational_noun")
    fresh = [record for record in prefixes if record["sentence_good"] not in trained][:1000]
    assert len(fresh) == 1000
    assert continues_well(*causal, fresh).double().mean() >= 0.97


def test_bad_continuation_is_counted(causal: Causal) -> None:
    """The forms of the other number are no good continuations."""
    records = agreement_sentences(100, paradigm="relational_noun")
    other = {"singular": "plural", "plural": "singular"}
    swapped = [record | {"label": other[record["label"]], "good": record["bad"]} for record in records]
    assert continues_well(*causal, swapped).double().mean() < 0.1


def test_accuracy_on_causal_card() -> None:
    figures = json.loads((CAUSAL_FOLDER / "card.json").read_text(encoding="utf-8"))["accuracy"]
    assert figures["held_out"]["overall"]["accuracy"] >= 0.97
    assert all(figures["held_out"][paradigm]["accuracy"] >= 0.95 for paradigm in CAUSAL_PARADIGMS)
    assert all(figures["grammar"][kind]["accuracy"] >= 0.95 for kind in CAUSAL_KINDS)
    assert figures["continuations"]["pairs"] == 1000
    assert figures["continuations"]["accuracy"] >= 0.97


@pytest.mark.skipif(
    "CAPTUM_VZ_BLIMP" not in os.environ,
    reason="BLiMP is not part of this repository: set CAPTUM_VZ_BLIMP to the folder with its .jsonl files",
)
def test_causal_accuracy_on_held_out_blimp(causal: Causal) -> None:
    card = json.loads((CAUSAL_FOLDER / "card.json").read_text(encoding="utf-8"))["accuracy"]["held_out"]
    for paradigm, records in held_out(os.environ["CAPTUM_VZ_BLIMP"]).items():
        usable = causal_records(causal[1], records)
        assert bool(usable) == (paradigm in CAUSAL_PARADIGMS)
        if usable:
            share = prefers_good_next(*causal, usable).double().mean().item()
            assert share == pytest.approx(card[paradigm]["accuracy"], abs=0.005)


def test_logits_are_those_of_each_prefix(causal: Causal) -> None:
    model, tokenizer = causal
    records = causal_records(tokenizer, agreement_sentences(12))
    for record, logits in zip(records, next_logits(model, tokenizer, records, batch_size=5), strict=True):
        encoded = encode_record(tokenizer, record)
        prefix = encoded.encoding["input_ids"][:, : encoded.target]
        torch.testing.assert_close(logits, model(prefix).logits[0, -1], rtol=1e-4, atol=1e-4)


def test_causal_script_writes_loadable_model(blimp: Path, tmp_path: Path) -> None:
    tiny = ["--epochs=1", "--grammar-pairs=100", "--layers=1", "--width=16", "--heads=2"]
    main(["--blimp", str(blimp), "--output", str(tmp_path / "causal"), *tiny])
    model, tokenizer = load_model(str(tmp_path / "causal"))
    assert isinstance(model, LlamaForCausalLM)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 16)
    assert {one.dtype for one in load_file(tmp_path / "causal" / "model.safetensors").values()} == {torch.float16}
    card = json.loads((tmp_path / "causal" / "card.json").read_text(encoding="utf-8"))
    assert card["command"].startswith("python tutorials/training/train_causal.py --blimp PATH --seed 0 --epochs 1")
    assert str(blimp) not in json.dumps(card)
    assert model(**tokenizer("a hat", return_tensors="pt")).logits.shape[-1] == len(tokenizer)


def test_causal_script_with_wrong_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--blimp", str(tmp_path), "--output", str(tmp_path / "never")])
    assert stop.value.code == 2
    assert "is missing: expected BLiMP's" in capsys.readouterr().err
