"""The command `captum-vz generate`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import captum_vz
from captum_vz import ValueZeroing, ValueZeroingEffect, ValueZeroingRollout, find_layers
from captum_vz.cli import main
from captum_vz.generation import attribute_generation
from captum_vz.study import METHODS
from captum_vz.testbed import load_model
from tests.command import refused
from tests.generation.models import case_of, tokenizer_of_words

TEXT = "the pictures of some hat"
MODEL = case_of("llama", torch.float32).model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder where the command runs, with a model in `llama`."""
    monkeypatch.chdir(tmp_path)
    MODEL.save_pretrained(tmp_path / "llama")
    tokenizer_of_words().save_pretrained(tmp_path / "llama")
    capsys.readouterr()
    return tmp_path


def generate(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["generate", TEXT, "--model", "llama", "--max-new-tokens", "3", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def from_api(method: Any, **options: Any) -> Any:
    return attribute_generation((MODEL, tokenizer_of_words()), TEXT, method, 3, **{"do_sample": False, **options})


def test_json_equals_the_api(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    record = json.loads(generate(capsys, "--json", "--mask", "stop"))
    found = from_api(partial(ValueZeroingRollout, residual=0.5))
    torch.testing.assert_close(torch.tensor(record["scores"]).permute(1, 2, 0), found.scores)
    torch.testing.assert_close(torch.tensor(record["prefix"]).permute(1, 2, 0), found.prefix)
    assert record["generated"] == list(found.generated.labels)
    assert record["mask"] == [True, False, True, True, False]
    assert (record["model"], record["method"]) == ("llama", "value-zeroing-rollout")
    assert list(folder.glob("*.png")) == []


def test_table_names_the_strongest_tokens(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    options = "--method value-zeroing --layer 0 --mask stop --output steps.png"
    lines = generate(capsys, *options.split()).splitlines()
    found = from_api(ValueZeroing)
    assert lines[0] == f"text: {TEXT} {found.text}"
    assert lines[1] == "value-zeroing, layer 0: the prompt tokens that each new token draws on most"
    for step, line in enumerate(lines[2:5]):
        assert line.split()[:2] == [str(step), found.generated.labels[step]]
        kept = {"pictures": found.scores[step, 1, 0], "hat": found.scores[step, 4, 0]}
        first, second = sorted(kept, key=lambda word: -kept[word])
        assert line.endswith(f"{first} {kept[first]:.2f}  {second} {kept[second]:.2f}")
        assert f"prompt {found.prompt_share[step, 0]:.2f}:" in line
    assert lines[5] == "picture: steps.png"
    assert Image.open(folder / "steps.png").size[0] > 300


def test_one_step_has_all_prompt_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    lines = generate(capsys, "--step", "-1").splitlines()
    found = from_api(partial(ValueZeroingRollout, residual=0.5))
    assert lines[1].endswith(f"how much {found.generated.labels[2]} (step 2) draws on each prompt token")
    assert [line.split()[1] for line in lines[2:7]] == TEXT.split()
    assert [float(line.split()[2]) for line in lines[2:7]] == pytest.approx(found.scores[2, :, -1].tolist(), abs=1e-4)


def test_word_that_is_not_in_the_prompt_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TEXT, "--model", "llama", "--max-new-tokens", "1", "--mask", "hat,unheardof"]) == 0
    assert capsys.readouterr().err == "captum-vz: --mask: 'unheardof' is no word of the prompt.\n"


def test_new_tokens_must_fit_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "generate", "the pictures", "--max-new-tokens", "500")
    assert "the text is 3 tokens long, and the model takes at most 128: ask for at most 126 new tokens." in told
    assert main(["generate", "the pictures", "--max-new-tokens", "126", "--json"]) == 0


def test_unknown_word_of_a_prompt_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "the \N{CJK UNIFIED IDEOGRAPH-732B} hat [MASK]", "--max-new-tokens", "1"]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert "does not know what stands at position 2: the model is given [UNK]" in first
    assert "[MASK] is no mask for a model that predicts the next token" in second


def test_seed_samples(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(generate(capsys, "--json", "--sample", "3"))
    assert record["generated"] == list(from_api(ValueZeroing, do_sample=True, seed=3).generated.labels)


def test_method_that_explains_no_generated_text_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(METHODS, "rows-only", replace(METHODS["random"], of_text=None))
    told = refused(capsys, "generate", TEXT, "--model", "llama", "--method", "rows-only")
    assert "--method rows-only cannot explain generated text: pass one of value-zeroing, " in told
    assert "random" in told
    assert told.count("rows-only") == 1  # it is not among those to pass


def test_effect_of_one_layer(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "value-zeroing-effect-layer", "--layer", "0"]
    record = json.loads(generate(capsys, *options, "--json"))
    found = from_api(lambda model, layers: ValueZeroingEffect(model, layers[0]))
    torch.testing.assert_close(torch.tensor(record["scores"]).permute(1, 2, 0), found.scores)
    title = "value-zeroing-effect-layer, layer 0: the prompt tokens that each new token draws on most"
    assert generate(capsys, *options).splitlines()[1] == title


OF_POST_NORM = {"globenc", "globenc-layer"}  # they refuse pre-norm models


@pytest.mark.parametrize("method", sorted(name for name in METHODS.keys() - OF_POST_NORM if METHODS[name].generative))
def test_methods_of_the_command(method: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    record = json.loads(generate(capsys, "--json", "--method", method))
    found = from_api(METHODS[method].with_residual(0.5).generative, method_options=dict(METHODS[method].options))
    torch.testing.assert_close(torch.tensor(record["scores"]).permute(1, 2, 0), found.scores, rtol=1e-4, atol=1e-5)
    assert "picture: x.pdf" in generate(capsys, "--method", method, "--step", "0", "--output", "x.pdf")
    assert (folder / "x.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "3"], "--step 3 is out of range: --max-new-tokens is 3"),
        (["--layer", "3"], "--layer 3 is out of range: the model has"),
        (["--method", "input-x-gradient", "--layer", "1"], "input-x-gradient has no scores of single layers"),
        (["--max-new-tokens", "0"], "argument --max-new-tokens: 0 is less than 1"),
        (["--method", "blank-out"], "--method: there is no method 'blank-out'"),
        (["--output", "nowhere/x.png"], "there is no folder nowhere"),
        (["--output", "x.doc"], "cannot write x.doc: pass a name that ends with one of"),
        (["--mask", "the,pictures,of,some,hat"], "leaves out all prompt tokens"),
        (["--model", "bert"], "is a BertForMaskedLM, which continues no text"),
    ],
)
def test_bad_command_says_why(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "bert" in arguments:
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        BertForMaskedLM(BertConfig(vocab_size=60, **size)).save_pretrained(folder / "bert")
        tokenizer_of_words().save_pretrained(folder / "bert")
        capsys.readouterr()
    options = ["generate", TEXT, "--model", "llama", "--max-new-tokens", "3", *arguments]
    assert message in refused(capsys, *options)


def test_empty_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the text is empty" in refused(capsys, "generate", "", "--model", "llama")


def test_embedded_model_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", TEXT, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    model, tokenizer = load_model("causal")
    found = attribute_generation(
        (model, tokenizer), TEXT, partial(ValueZeroingRollout, residual=0.5), 8, do_sample=False
    )
    assert record["model"] == "causal"
    assert record["prompt"] == ["[CLS]", *TEXT.split()]
    torch.testing.assert_close(torch.tensor(record["scores"]).permute(1, 2, 0), found.scores)


def test_residual_gives_the_prompt_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a residual all of a rollout lies on the first tokens. Names equal classes, here and in Python."""
    model, tokenizer = load_model("causal")
    assert main(["generate", TEXT, "--json", "--max-new-tokens", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    kind = partial(ValueZeroingRollout, residual=0.5)
    found = attribute_generation((model, tokenizer), TEXT, kind, 3, do_sample=False)
    torch.testing.assert_close(torch.tensor(record["scores"]).permute(1, 2, 0), found.scores)
    assert record["residual"] == 0.5


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("layer", [0, -1])
def test_encoder_decoder_is_continued_by_its_cross_attention(
    family: str, layer: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_model()[1]
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "d_model": 16, "decoder_start_token_id": tokenizer.cls_token_id}
    if family == "t5":
        heads = {"num_heads": 2, "d_kv": 8, "num_layers": 3, "d_ff": 32, "num_decoder_layers": 3}
        model: Any = T5ForConditionalGeneration(T5Config(**size, **heads, eos_token_id=tokenizer.sep_token_id))
    else:
        names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
        heads = dict(zip(names, (2, 3, 2, 2), strict=True))
        ends = {"eos_token_id": tokenizer.sep_token_id, "forced_eos_token_id": None, "max_position_embeddings": 64}
        model = BartForConditionalGeneration(
            BartConfig(**size, **heads, encoder_ffn_dim=32, decoder_ffn_dim=32, **ends)
        )
    model.eval().save_pretrained("both")
    tokenizer.save_pretrained("both")
    capsys.readouterr()
    command = ["generate", TEXT, "--model", "both", "--max-new-tokens", "3", "--layer", str(layer)]
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        written = model.generate(ids, max_new_tokens=3, do_sample=False)
    cross = ValueZeroing(model, find_layers(model, "decoder")[layer], attention="cross")
    rows = cross.attribute({"input_ids": ids, "decoder_input_ids": written[:, :-1]})[0]
    found = torch.tensor(record["scores"])[layer]
    torch.testing.assert_close(found[:, : ids.shape[1]], rows, rtol=1e-4, atol=1e-5)
    assert record["method"] == "value-zeroing"
    assert record["generated_ids"] == written[0, 1:].tolist()
    assert main([*command, "--html", "x.html", "--output", "x.png"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"text: {TEXT} → ")
    assert f"value-zeroing, layer {layer % 3}: " in out
    assert "--layer 3 is out of range: the model has 3 layers" in refused(capsys, *command[:-1], "3")
    told = refused(capsys, *command, "--method", "value-zeroing-rollout")
    assert "has no maps from an encoder to its decoder" in told
    words = captum_vz.explain("both", TEXT, stack="decoder", layer=layer)
    assert [row.name for row in words.rows[:3]] == [f"{step} {name}" for step, name in enumerate(record["generated"])]
    torch.testing.assert_close(torch.stack([row.scores for row in words.rows[:3]]), rows, rtol=1e-4, atol=1e-5)
    assert words.plot().axes
    assert captum_vz.explain("both", TEXT, stack="encoder").to_dict() == captum_vz.explain("both", TEXT).to_dict()
