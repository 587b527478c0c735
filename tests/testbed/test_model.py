"""The embedded model: its size, its loading, its inputs and its accuracy."""

import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from train_masked import GRAMMAR_PAIRS, GRAMMAR_SEED
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertForMaskedLM, PreTrainedTokenizerFast

from captum_vz import find_layers
from captum_vz.testbed import agreement_sentences, held_out, load_model, mask_target, prefers_good
from captum_vz.testbed.data import HELD_OUT_PARADIGMS, Record
from captum_vz.testbed.model import AGREEMENT_FOLDER, EMBEDDED
from captum_vz.text import form_ids
from tests.testbed.conftest import KINDS

Embedded = tuple[BertForMaskedLM, PreTrainedTokenizerFast]

ODD_TEXTS = [
    "",
    " ",
    ".",
    "The [MASK] costs $3.50 (or 2 for €6,99)!",
    "“Curly” ‘quotes’ — and\ttabs\nand lines…",
    "Zoë's naïve café, Łódź, Straße, Ærø.",
    "smile 😀👩‍👩‍👧 please",
    "她看见了 её",
    "x" * 5000,
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "http://example.org/a?b=c&d=e#f user@example.org C++ <b>&amp;</b> \\n \x00 \u200b",
]


def test_model_files_are_small() -> None:
    files = {path.name: path.stat().st_size for path in AGREEMENT_FOLDER.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert sum(files.values()) <= 4e6


@pytest.mark.parametrize(("name", "layers", "least"), [("six-layers", 6, 0.98), ("pre-norm", 5, 0.97)])
def test_models_that_were_trained_otherwise(name: str, layers: int, least: float) -> None:
    """They are small, transformers loads them too, and they are right on sentences that they were not trained on."""
    folder = EMBEDDED[name]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4e6
    model, tokenizer = load_model(name)
    assert tokenizer.get_vocab() == load_model()[1].get_vocab()
    assert model.config.num_hidden_layers == layers == len(find_layers(model))
    batch = tokenizer("The pictures of some hat [MASK] scaring Marcus.", return_tensors="pt")
    loaded = AutoModelForMaskedLM.from_pretrained(folder)
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)
    figures = json.loads((folder / "card.json").read_text(encoding="utf-8"))["accuracy"]
    assert figures["held_out"]["overall"]["accuracy"] >= least
    trained = {record["sentence_good"] for record in agreement_sentences(GRAMMAR_PAIRS, GRAMMAR_SEED)}
    fresh = [record for record in agreement_sentences(220, seed=77) if record["sentence_good"] not in trained]
    assert len(fresh) >= 200
    assert prefers_good(model, tokenizer, fresh).double().mean() >= 0.98


def test_loading_keeps_random_state(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    load_model()
    assert torch.equal(torch.rand(3), expected)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_loading_in_new_process_is_silent() -> None:
    program = """
from captum_vz.testbed import load_model
model, tokenizer = load_model()
model(**tokenizer("the pictures of some hat [MASK] scaring marcus.", return_tensors="pt"))
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_model_is_float32_in_eval_mode(embedded: Embedded) -> None:
    model, _ = embedded
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_transformers_loaders_give_same_model(embedded: Embedded) -> None:
    model, tokenizer = embedded
    text = "The pictures of some hat [MASK] scaring Marcus."
    batch = AutoTokenizer.from_pretrained(AGREEMENT_FOLDER)(text, return_tensors="pt")
    assert torch.equal(batch["input_ids"], tokenizer(text, return_tensors="pt")["input_ids"])
    loaded = AutoModelForMaskedLM.from_pretrained(AGREEMENT_FOLDER)
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_eager_and_sdpa_give_same_logits(embedded: Embedded) -> None:
    model, tokenizer = embedded
    eager, _ = load_model(attn_implementation="eager")
    batch = tokenizer(["The boys [MASK] Anna.", "My sister"], padding=True, return_tensors="pt")
    output = eager(**batch, output_attentions=True)
    assert len(output.attentions) == model.config.num_hidden_layers
    torch.testing.assert_close(output.logits, model(**batch).logits, rtol=1e-4, atol=1e-4)


def test_folder_without_model(tmp_path: Path) -> None:
    for wrong, meant in ((tmp_path, ""), (str(tmp_path), ""), ("agrement", r" \(did you mean agreement\?\)")):
        with pytest.raises(
            FileNotFoundError,
            match=rf"model\.safetensors is missing{meant}: pass 'agreement', 'six-layers', 'pre-norm', 'causal' or a",
        ):
            load_model(wrong)


def test_default_model_by_its_name(embedded: Embedded) -> None:
    named, _ = load_model("agreement")
    assert {name: weight.sum() for name, weight in named.state_dict().items()} == {
        name: weight.sum() for name, weight in embedded[0].state_dict().items()
    }
    assert inspect.signature(load_model).parameters["name"].default == "agreement"


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_model_runs_on_any_text(embedded: Embedded, text: str) -> None:
    model, tokenizer = embedded
    batch = tokenizer(text, return_tensors="pt", truncation=True)
    assert batch["input_ids"][0, 0] == tokenizer.cls_token_id
    assert batch["input_ids"][0, -1] == tokenizer.sep_token_id
    assert model(**batch).logits.isfinite().all()


def test_english_text_has_no_unknown_token(embedded: Embedded) -> None:
    _, tokenizer = embedded
    texts = [
        "Sphinx of black quartz, judge my vow; the quick brown fox jumps over a lazy dog!",
        "It's 1234567890 o'clock & she'll re-check 'that' \"naïve\" résumé (50% off @ $9.99, £8, 7€) #now…",
        "The wombats aren't weird — they're pneumonoultramicroscopicsilicovolcanoconiosis-prone [MASK].",
    ]
    for text in texts:
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def test_special_tokens(embedded: Embedded) -> None:
    model, tokenizer = embedded
    tokens = tokenizer("The HAT [MASK] red.").tokens()
    assert tokens == ["[CLS]", "the", "hat", "[MASK]", "red", ".", "[SEP]"]
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.pad_token_id == model.config.pad_token_id
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert (
        tokenizer.decode(tokenizer("the wugs blicket.")["input_ids"], skip_special_tokens=True) == "the wugs blicket."
    )


def test_prefers_good_in_padded_batches(embedded: Embedded) -> None:
    model, tokenizer = embedded
    records = agreement_sentences(60, seed=11)
    one_by_one = torch.cat([prefers_good(model, tokenizer, [record]) for record in records])
    assert torch.equal(prefers_good(model, tokenizer, records, batch_size=25), one_by_one)
    swapped = [record | {"good": record["bad"], "bad": record["good"]} for record in records]
    assert torch.equal(prefers_good(model, tokenizer, swapped), ~one_by_one)
    assert prefers_good(model, tokenizer, []).shape == (0,)


def test_prefers_good_of_several_pieces(embedded: Embedded) -> None:
    record: Record = {"masked": "The wugs [MASK].", "target": 2, "good": "blicket", "bad": "blickets"}
    with pytest.raises(ValueError, match=r"'blicket' or 'blickets' in 'The wugs \[MASK\]\.' is not a single token"):
        prefers_good(*embedded, [record])


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("The pictures of some hat are scaring Marcus.", "The pictures of some hat is scaring Marcus."),
        ("The picture of some hats is scaring Marcus.", "The picture of some hats are scaring Marcus."),
        ("The picture of some hats doesn't scare Marcus.", "The picture of some hats don't scare Marcus."),
        ("The boys near the girl hurt themselves.", "The boys near the girl hurt herself."),
        ("Anna bought these old lamps.", "Anna bought this old lamps."),
    ],
)
def test_model_uses_cue_not_distractor(embedded: Embedded, good: str, bad: str) -> None:
    record = mask_target({"sentence_good": good, "sentence_bad": bad})
    assert prefers_good(*embedded, [record]).all()
    assert prefers_good(*embedded, [record | {"masked": record["masked"].lower()}]).all()


def test_accuracy_on_new_grammar_sentences(embedded: Embedded) -> None:
    trained = {record["sentence_good"] for record in agreement_sentences(GRAMMAR_PAIRS, GRAMMAR_SEED)}
    for kind in KINDS:
        fresh = [r for r in agreement_sentences(220, seed=77, paradigm=kind) if r["sentence_good"] not in trained]
        assert len(fresh) >= 200
        assert prefers_good(*embedded, fresh).double().mean() >= 0.95, kind


def test_accuracy_on_card() -> None:
    figures = json.loads((AGREEMENT_FOLDER / "card.json").read_text(encoding="utf-8"))["accuracy"]
    assert figures["held_out"]["overall"]["accuracy"] >= 0.97
    assert all(figures["held_out"][paradigm]["accuracy"] >= 0.95 for paradigm in HELD_OUT_PARADIGMS)
    assert all(figures["grammar"][kind]["accuracy"] >= 0.95 for kind in KINDS)


@pytest.mark.skipif(
    "CAPTUM_VZ_BLIMP" not in os.environ,
    reason="BLiMP is not part of this repository: set CAPTUM_VZ_BLIMP to the folder with its .jsonl files",
)
def test_accuracy_on_held_out_blimp(embedded: Embedded) -> None:
    _, tokenizer = embedded
    evaluation = held_out(os.environ["CAPTUM_VZ_BLIMP"])
    records = [record for half in evaluation.values() for record in half if form_ids(tokenizer, record) is not None]
    assert len(records) >= 0.99 * 2500
    right = prefers_good(*embedded, records)
    assert right.double().mean() >= 0.97
    correct, pairs = Counter[str](), Counter(record["UID"] for record in records)
    for record, is_right in zip(records, right.tolist(), strict=True):
        correct[record["UID"]] += is_right
    assert {paradigm: correct[paradigm] >= 0.95 * pairs[paradigm] for paradigm in HELD_OUT_PARADIGMS} == dict.fromkeys(
        HELD_OUT_PARADIGMS, True
    )
    card = json.loads((AGREEMENT_FOLDER / "card.json").read_text(encoding="utf-8"))["accuracy"]["held_out"]
    for paradigm in HELD_OUT_PARADIGMS:
        # Ties between the two forms may be decided differently on another machine.
        assert correct[paradigm] / pairs[paradigm] == pytest.approx(card[paradigm]["accuracy"], abs=0.005)
