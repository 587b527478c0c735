"""The registry, and one text by many methods: numbers equal those of the classes, and tables are exported."""

import csv
import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import InputXGradient
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

import captum_vz as vz
from captum_vz.errors import RefusedError, UnsupportedLayerError
from captum_vz.functional import normalize_rows
from captum_vz.methods import Question
from captum_vz.metrics import MaskedSentences, Prediction, blank_out, kendall
from captum_vz.result import Explanation, Part, Row
from captum_vz.study import COMPARED_METHODS, DEFAULT_METHODS, METHODS, Batch, Example, compare, value_patching
from captum_vz.study.comparison import truth_of
from captum_vz.subjects import Subject, text_subject_of
from captum_vz.subjects.texts import content_specials, prepare_text
from captum_vz.testbed import load_model
from captum_vz.text import split_words
from tests.study.conftest import Decoder, Shipped

SENTENCE = "the pictures of some hat [MASK] scaring marcus."
MASK = 6
LAYER_METHODS = {
    "value-zeroing": vz.ValueZeroing,
    "attention": vz.LayerAttention,
    "attention-norm": vz.LayerAttentionNorm,
    "globenc-layer": partial(vz.LayerAttentionNorm, include="encoder"),
    "alti-layer": vz.LayerALTI,
}
ROLLED_OUT = {
    "value-zeroing-rollout": partial(vz.ValueZeroingRollout, residual=0.5),
    "attention-rollout": vz.AttentionRollout,
    "globenc": vz.GlobEnc,
    "alti": vz.ALTI,
    "value-zeroing-rollout-paper": vz.ValueZeroingRollout,
    "attention-rollout-paper": partial(vz.AttentionRollout, residual=None),
    "attention-norm-rollout": lambda model, layers: vz.Rollout(vz.LayerAttentionNorm(model, layers), residual=0.5),
}


@pytest.mark.parametrize("layer", [-1, 1])
def test_columns_equal_their_classes(layer: int, shipped: Shipped) -> None:
    model, tokenizer = shipped
    layers = vz.find_layers(model)
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    expected = {name: kind(model, layers[layer]).attribute(inputs, token=MASK) for name, kind in LAYER_METHODS.items()}
    upto = layers if layer == -1 else layers[: layer + 1]
    expected |= {name: kind(model, upto).attribute(inputs, token=MASK) for name, kind in ROLLED_OUT.items()}
    expected["attention-flow"] = vz.AttentionFlow(model, layers).attribute(inputs, token=MASK)
    expected["random"] = vz.RandomAttribution().attribute(inputs, token=MASK)
    expected["position"] = vz.PositionAttribution().attribute(inputs, token=MASK)
    right, wrong = tokenizer.convert_tokens_to_ids(["are", "is"])
    summed = vz.TokenAttribution(model, InputXGradient, tokenizer, reduce="sum")
    by_length = vz.TokenAttribution(model, InputXGradient, tokenizer, reduce="l2")
    for name, gradients in (("input-x-gradient", summed), ("input-x-gradient-l2", by_length)):
        amounts = gradients.attribute(inputs, target=(MASK, right), foil=(MASK, wrong))
        expected[name] = normalize_rows(amounts.abs())
    if layer == 1:
        hidden = vz.HiddenTokenAttribution(model, layers[layer], probes=64)
        expected["hidden-token-attribution"] = hidden.attribute(inputs, token=MASK)

    def choice(output: Any) -> torch.Tensor:
        difference: torch.Tensor = output.logits[:, MASK, right] - output.logits[:, MASK, wrong]
        return difference

    by_gradient = vz.LayerAttentionGradient(model, layers[layer])
    expected["attention-gradient"] = by_gradient.attribute(inputs, (MASK, right), foil=(MASK, wrong), token=MASK)
    for name, zeroed in {"value-zeroing-effect": layers, "value-zeroing-effect-layer": layers[layer]}.items():
        expected[name] = normalize_rows(vz.ValueZeroingEffect(model, zeroed).attribute(inputs, target=choice).abs())
    table = compare((model, tokenizer), SENTENCE, list(expected), layer=layer, target="are", foil="is")
    assert table.tokens == inputs.tokens()
    assert (table.token, table.layer, table.refused) == (MASK, layer % 4, {})
    for name, row in expected.items():
        # In float32, and in another order of summation where several methods share a pass.
        torch.testing.assert_close(table.shares[name], row[0].double(), rtol=1e-4, atol=1e-6, msg=name)
    for column in table.shares.values():
        assert column.min() >= 0
        assert column.sum() == pytest.approx(1)


def test_error_of_a_method_or_a_model_is_raised(shipped: Shipped) -> None:
    """Studies record it with the example. `compare` raises it, if the method was named or the error is the model's."""
    model, tokenizer = shipped

    def picky(batch: Batch) -> torch.Tensor:
        raise UnsupportedLayerError("this layer has no norm")

    with pytest.raises(RefusedError, match="layer has no norm"):
        compare(shipped, SENTENCE, ["random", picky])

    class Broken(type(model)):  # type: ignore[misc]  # a class that is known at run time only
        def forward(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the model's own")

    with pytest.raises(AssertionError, match="the model's own"):
        compare((Broken(model.config).eval(), tokenizer), SENTENCE)


def test_decoder_explained_at_last_token(decoder: Decoder) -> None:
    model, tokenizer = decoder
    short = compare((model, tokenizer), "some hat is small.")
    assert list(short.shares) == [name for name in COMPARED_METHODS if name not in short.refused]
    assert len(COMPARED_METHODS) == 5
    table = compare((model, tokenizer), "some hat is small.", "all")
    assert table.token == len(table.tokens) - 1
    assert sorted(table.refused) == ["globenc", "globenc-layer"]
    assert "pre-norm" in table.refused["globenc"]
    assert list(table.shares) == [name for name in DEFAULT_METHODS if name not in table.refused]
    first = compare((model, tokenizer), "some hat is small.", "all", token=0)
    for name, column in first.shares.items():
        assert column.tolist() == [1, 0, 0, 0, 0], name  # later tokens are not seen
    with pytest.raises(RefusedError, match="pre-norm"):
        compare((model, tokenizer), "some hat is small.", "globenc")


def test_headless_encoders_and_shared_layers(shipped: Shipped) -> None:
    _, tokenizer = shipped
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model: Any = BertModel(BertConfig(vocab_size=len(tokenizer), **size)).eval()
    table = compare((model, tokenizer), tokenizer(SENTENCE, return_tensors="pt"), ["alti", "value-zeroing"])
    torch.testing.assert_close(table.shares["alti"], compare((model, tokenizer), SENTENCE, "alti").shares["alti"])
    with pytest.raises(RefusedError, match="explains a logit"):
        compare((model, tokenizer), SENTENCE, "saliency")
    size = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = AlbertModel(AlbertConfig(vocab_size=len(tokenizer), intermediate_size=16, **size)).eval()
    table = compare((model, tokenizer), SENTENCE, ["attention", "attention-rollout"])
    assert table.layer == 2
    expected = vz.AttentionRollout(model, vz.find_layers(model)).attribute(
        tokenizer(SENTENCE, return_tensors="pt"), token=6
    )
    torch.testing.assert_close(table.shares["attention-rollout"], expected[0].double())
    with pytest.raises(ValueError, match="3 is out of range"):
        compare((model, tokenizer), SENTENCE, "attention", layer=3)


@pytest.mark.parametrize(
    ("passed", "complaint"),
    [
        ({"methods": ["value-zeroing", "magic"]}, "'magic'"),
        ({"methods": []}, r"methods is \[\]"),
        ({"target": "exasperate"}, "no single token"),
        ({"text": ""}, "the text is empty"),
        ({"text": ["one", "two"]}, "of type list"),
        ({"text": {"input_ids": torch.ones(2, 3, dtype=torch.long)}}, r"input_ids \(2, 3\)"),
        ({"patch": ("hats", "hat")}, "0 times in the text"),
        ({"patch": ("pictures", "xylophones")}, "with 'xylophones'"),
        ({"patch": ("some", "this")}, "with this too"),
        ({"patch": ("some", "this"), "foil": "is"}, "takes away at least"),
    ],
)
def test_bad_comparison_refused(passed: dict[str, Any], complaint: str, shipped: Shipped) -> None:
    with pytest.raises(ValueError, match=complaint):
        compare(shipped, **{"text": SENTENCE, "methods": ["value-zeroing"], **passed})


def test_table_is_printed_and_exported_whole(tmp_path: Path) -> None:
    scores = {"value-zeroing": torch.tensor([0.0004, 1.0, 0.0]), "alti": torch.tensor([0.5, 0.25, 0.25])}
    parts = {
        name: Part(name, METHODS[name], [Row("[MASK]", 2, row)], row[None, None], (METHODS[name].scope(3),), 3)
        for name, row in scores.items()
    }
    table = Explanation(["$a|b$", "it", "[MASK]"], parts, refused={"globenc": "it is pre-norm"})
    assert str(table).splitlines() == [
        "               value",
        "             zeroing    alti",
        "  0  $a|b$    0.000   0.500*",
        "  1  it       1.000*  0.250",
        "> 2  [MASK]   0.000   0.250",
        "without globenc: it is pre-norm",
    ]
    table = replace(table, truth=torch.tensor([0.75, 0.25, float("nan")], dtype=torch.float64))
    lines = str(table).splitlines()
    assert lines[2].split() == ["0", "$a|b$", "0.750*", "0.000", "0.500*"]
    assert lines[4].split() == [">", "2", "[MASK]", "0.000", "0.250"]
    assert lines[5] == "agrees with blank-out: value-zeroing 0.25, alti 0.75"
    labels = [label.get_text() for label in table.plot().axes[0].get_yticklabels()]
    assert labels == ["blanking out", "value-zeroing, layer 3", "alti, layers 0 to 3"]
    found = json.loads(table.to_json(tmp_path / "t.json"))
    assert (found["tokens"], found["token"], found["layer"]) == (["$a|b$", "it", "[MASK]"], 2, 3)
    assert found["scores"]["alti"] == [0.5, 0.25, 0.25]
    assert (found["truth"], found["kendall"]) == ([0.75, 0.25, None], {"value-zeroing": None, "alti": None})
    assert found["agreement"] == pytest.approx({"value-zeroing": 0.2504, "alti": 0.75}, abs=1e-6)
    assert found == json.loads((tmp_path / "t.json").read_text("utf-8"))
    head, *rows = csv.reader(io.StringIO(table.to_csv(tmp_path / "t.csv")))
    assert head == ["token", "explained", "blank-out", "value-zeroing", "alti"]
    assert rows[2] == ["[MASK]", "True", "", "0.0", "0.25"]
    assert table.to_csv() == (tmp_path / "t.csv").read_text("utf-8")
    frame = table.to_pandas()
    assert frame["alti"].tolist() == [0.5, 0.25, 0.25]
    assert frame["blank-out"].tolist()[:2] == [0.75, 0.25]
    assert frame["token"][frame["explained"]].tolist() == ["[MASK]"]
    page = table._repr_html_()
    assert (page.count("<tr"), page.count("<td></td>")) == (4, 1)
    assert "it is pre-norm" in page


@pytest.mark.parametrize("foil", [None, "is"])
@pytest.mark.parametrize("name", ["agreement", "causal"])
def test_truth_is_that_of_blank_out(name: Any, foil: str | None) -> None:
    """An unknown token that ends documents, such as GPT-2's, is not put in: the mean of all word vectors is."""
    model, tokenizer = load_model(name)
    causal = name == "causal"
    if causal:
        tokenizer.unk_token, tokenizer.mask_token = tokenizer.sep_token, None
    text = "the pictures of some hat" if causal else SENTENCE
    found = truth_of(text, text_subject_of(model, tokenizer), foil=foil)
    prepared = prepare_text(model, tokenizer, text)
    ids, token = prepared.inputs["input_ids"], prepared.token
    answers = [int(model(ids).logits[0, token].argmax()), *tokenizer.convert_tokens_to_ids([foil] if foil else [])]
    kept = [place for place in range(ids.shape[1]) if place not in (token, *([0] if causal else [0, ids.shape[1] - 1]))]
    assert found.falls.isfinite().nonzero()[:, 0].tolist() == kept
    content = torch.isin(torch.arange(ids.shape[1]), torch.tensor(kept))[None]
    sentence = MaskedSentences(ids, None, token, content, torch.tensor(answers) if foil else None)
    expected = blank_out(Prediction(model, sentence, "mean" if causal else tokenizer.unk_token_id))[0, kept]
    torch.testing.assert_close(found.falls[kept].double(), expected.double(), rtol=0, atol=1e-4)
    torch.testing.assert_close(found.shares[kept], found.falls[kept].abs() / found.falls[kept].abs().sum())
    assert found.how == f"blanking out ({'the mean word vector' if causal else '[UNK]'} in its place)"
    word = tokenizer.decode(answers[:1])
    assert found.answer == (f"lead of {word} over is" if foil else f"log-probability of {word}")


def test_unknown_token_that_is_never_written() -> None:
    """SmolLM2's tokenizer of bytes knows each text, and its unknown token ends documents."""
    _, tokenizer = load_model("causal")
    assert content_specials(tokenizer).keys() == {"unk", "mask"}
    tokenizer.add_special_tokens({"unk_token": "<|endoftext|>"})
    assert content_specials(tokenizer).keys() == {"mask"}


def test_methods_agree_with_the_truth(shipped: Shipped) -> None:
    table = compare(shipped, SENTENCE, ["value-zeroing", "position"], truth=True)
    assert table.truth is not None
    torch.testing.assert_close(table.truth, truth_of(SENTENCE, text_subject_of(*shipped)).shares, equal_nan=True)
    known = ~table.truth.isnan()
    for name, column in table.shares.items():
        tau = kendall(column[None], table.truth.nan_to_num()[None], known[None]).item()
        assert table.kendall[name] == pytest.approx(tau)


def test_patching_takes_values_together(shipped: Shipped) -> None:
    """The truth of a study for methods that join layers. Without a foil, the other text's answer is the foil."""
    example = Example("1", tuple(split_words(SENTENCE)), 5, (1,), "are", "was", text=SENTENCE, other_cue=("picture",))
    expected = value_patching(*shipped, example, together=True)
    table = compare(shipped, SENTENCE, ["value-zeroing", "saliency"], patch=("pictures", "picture"))
    assert table.truth is not None and table.falls is not None
    torch.testing.assert_close(table.truth, expected.shares[-1])
    torch.testing.assert_close(table.falls, expected.falls[-1])
    named = compare(shipped, SENTENCE, "saliency", target="are", foil="was")
    torch.testing.assert_close(table.shares["saliency"], named.shares["saliency"])
    assert "agrees with patching: value-zeroing 0.9" in str(table)
    assert list(table.columns()) == ["fall", "patching", "value-zeroing", "saliency"]
    assert "patching" in [label.get_text() for label in table.plot().axes[0].get_yticklabels()]


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("value-zeroing", "layer 2"),
        ("alti", "layers 0 to 2"),
        ("value-zeroing-rollout", "layers 0 to 2, residual 0.5"),
        ("value-zeroing-rollout-paper", "layers 0 to 2, no residual"),
        ("value-zeroing-effect", ""),
        ("attention-flow", "all layers, residual 0.5"),
    ],
)
def test_scope_names_the_layers_shown(name: str, scope: str) -> None:
    assert METHODS[name].scope(2) == scope


def test_maps_are_computed_once(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = shipped
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    subject, question = Subject(model, model, vz.find_layers(model), tokenizer), Question(inputs, 6)
    METHODS["attention-rollout"].scores(subject, question)
    monkeypatch.setattr(vz.LayerAttention, "attribute", None)
    monkeypatch.setattr(vz.LayerAttention, "run", None)  # so there is no other pass
    whole = METHODS["attention"].layer_maps(subject, replace(question, token=3))
    torch.testing.assert_close(METHODS["attention"].scores(subject, question)[1], whole[1][0, 6])
