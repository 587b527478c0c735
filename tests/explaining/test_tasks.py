"""`explain` for models with heads: predictions, and rows that equal naive twins and the classes called by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import Saliency
from PIL import Image
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, pipeline

import captum_vz
from captum_vz import ValueZeroing, ValueZeroingEffect, find_layers
from captum_vz.errors import ArgumentError
from captum_vz.generation import attribute_generation
from captum_vz.methods import METHODS
from captum_vz.study import Batch
from captum_vz.subjects.heads import label_number
from captum_vz.testbed import load_model
from tests.explaining.models import (
    NAMES,
    SENTENCE,
    SOUND,
    SPEECH,
    byte_tokenizer,
    chooser,
    classifier,
    image_classifier,
    one_by_one,
    reader,
    sound_model,
    t5,
    tagger,
    tokenizer,
    twin,
    write_sound,
)

MASKED = "the pictures of some hat [MASK] small."
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def explain(model: Any, text: Any, *more: Any, **options: Any) -> Any:
    return captum_vz.explain(model, text, *more, **({"tokenizer": tokenizer()} | options))


def effect(model: Any, inputs: Any, **asked: Any) -> Tensor:
    found: Tensor = ValueZeroingEffect(model, find_layers(model)).attribute(inputs, **asked)[0]
    return found


# Classes of a text


def test_classifier_explains_its_label() -> None:
    model, inputs = classifier(), tokenizer()(SENTENCE, return_tensors="pt")
    shares = model(**inputs).logits[0].softmax(-1)
    label = int(shares.argmax())
    found = explain(model, SENTENCE)
    assert found.predictions[0] == (NAMES[label], pytest.approx(shares[label].item(), abs=1e-6))
    assert [row.name for row in found.rows] == [NAMES[label]]
    expected = twin(model, lambda: model(**inputs).logits[0, label], one_by_one(len(inputs.tokens())), "self.value")
    torch.testing.assert_close(found.scores, expected, **CLOSE)


@pytest.mark.parametrize(
    ("texts", "asked", "numbers"),
    [
        ([SENTENCE], {"target": "person"}, {"target": 1}),
        ([SENTENCE], {"target": 2, "foil": "O"}, {"target": 2, "foil": 0}),
        (["some hat", "the pictures"], {"target": "1", "foil": 0}, {"target": 1, "foil": 0}),
    ],
)
def test_target_and_foil_are_labels(texts: list[str], asked: Any, numbers: Any) -> None:
    model, inputs = classifier(), tokenizer()(*texts, return_tensors="pt")
    found = explain(model, *texts, **asked)
    assert found.tokens == inputs.tokens()
    torch.testing.assert_close(found.scores, effect(model, inputs, **numbers))


def test_labels_with_one_name_and_special_tokens() -> None:
    model = classifier()
    model.config.id2label = {0: "SAME", 1: "SAME", 2: "other"}
    found = explain(model, SENTENCE, target=1)
    assert {name for name, _ in found.predictions} == {"SAME (0)", "SAME (1)", "other"}
    torch.testing.assert_close(explain(model, SENTENCE, target="same (1)").scores, found.scores)
    with pytest.warns(UserWarning, match="are not doubled"):
        found = captum_vz.explain("agreement", "[CLS] the hat [MASK] small. [SEP]")
    expected = captum_vz.explain("agreement", "the hat [MASK] small.")
    assert found.tokens == expected.tokens
    torch.testing.assert_close(found.scores, expected.scores)


def test_label_is_named_or_numbered() -> None:
    names = {0: "2", 1: "1", 2: "0"}
    assert label_number("2", names, "target") == 0  # names come before numbers
    assert label_number(2, names, "target") == 2
    with pytest.raises(ArgumentError, match="did you mean PERSON"):
        label_number("PERSONS", NAMES, "target")


WRONG = [(name, value) for name in ("target", "foil", "token", "layer") for value in (1.0, True, ["PERSON"], b"1")]


@pytest.mark.parametrize(
    ("make", "asked", "told"),
    [
        (classifier, {"target": 1, "method": "value-zeroing"}, "^target is .* leave "),
        (classifier, {"foil": 1, "method": "attention"}, "^foil is .* leave "),
        (classifier, {"token": 1}, "^token is .* leave "),
        (classifier, {"target": "PERSON", "foil": 1}, "foil is 1, which is"),
        (classifier, {"foil": 0}, "foil is 0, which is"),  # the prediction
        *((lambda: "agreement", {name: value}, "pass a whole number") for name, value in WRONG),
    ],
)
def test_refusals_of_labels_and_types(make: Any, asked: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        explain(make(), SENTENCE if make is classifier else MASKED, **asked)


def test_map_of_a_decoder_is_the_row_of_its_last_token() -> None:
    words = byte_tokenizer(pad_token="<pad>")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(words), n_embd=16, n_layer=2, n_head=2, pad_token_id=words.pad_token_id)
    model = GPT2ForSequenceClassification(config).eval()
    inputs = words("a is b", return_tensors="pt")
    found = explain(model, "a is b", tokenizer=words, method="value-zeroing")
    assert found.token == len(inputs["input_ids"][0]) - 1
    by_hand = ValueZeroing(model, find_layers(model)[-1]).attribute(inputs, token=-1)[0]
    torch.testing.assert_close(found.scores, by_hand)
    label = int(model(**inputs).logits.argmax())
    torch.testing.assert_close(explain(model, "a is b", tokenizer=words).scores, effect(model, inputs, target=label))


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression", None])
def test_predictions_follow_the_problem_type(kind: str | None) -> None:
    model = classifier(problem_type=kind)
    logits = model(**tokenizer()(SENTENCE, return_tensors="pt")).logits[0]
    numbers = {"regression": logits, None: logits.softmax(-1)}.get(kind, logits.sigmoid())
    found = dict(explain(model, SENTENCE, method="random").predictions)
    assert found == {NAMES[i]: pytest.approx(number.item(), abs=1e-6) for i, number in enumerate(numbers)}


def test_layer_is_never_ignored() -> None:
    model, inputs = classifier(), tokenizer()(SENTENCE, return_tensors="pt")
    found = explain(model, SENTENCE, target=1, layer=0)
    assert (found.method, found.layer) == ("value-zeroing-effect-layer", 0)
    expected = ValueZeroingEffect(model, find_layers(model)[0]).attribute(inputs, target=1)[0]
    torch.testing.assert_close(found.scores, expected)
    with pytest.raises(ArgumentError, match="leave layer= out"):
        explain(model, SENTENCE, method="value-zeroing-effect", layer=0)
    with pytest.raises(ArgumentError, match="2 is out of range"):
        explain(model, SENTENCE, layer=2)


PIECES = "the wug of some hat"  # "wug" has three tokens


@pytest.mark.parametrize("kind", ["function", Saliency])
def test_words_have_the_sum_of_the_scores_of_a_method_of_your_own(kind: Any) -> None:
    def places(batch: Batch) -> Tensor:
        return torch.arange(1.0, 1 + batch.inputs["input_ids"].shape[1])[None]

    method = places if kind == "function" else kind
    apart, joint = (explain(classifier(), PIECES, method=method, target=1, words=one).scores for one in (False, True))
    torch.testing.assert_close(joint, torch.cat([apart[:2], apart[2:5].sum(0, keepdim=True), apart[5:]]))
    assert kind is Saliency or joint.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("task", ["label", "answer", "image"])
def test_shares_of_gates_sum_to_the_effect_of_all(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapley values explain each task: they sum to f(1) - f(0), with signs, for any number of samples."""
    monkeypatch.setitem(METHODS["value-zeroing-shapley"].options, "n_samples", 2)  # type: ignore[arg-type]  # a dict
    (made, processor), image = image_classifier(), Image.new("RGB", (8, 8), "red")
    model, given, more, inputs = {
        "label": (classifier(), [SENTENCE], {}, tokenizer()(SENTENCE, return_tensors="pt")),
        "answer": (reader(), ["some hat?", SENTENCE], {}, tokenizer()("some hat?", SENTENCE, return_tensors="pt")),
        "image": (made, [image], {"tokenizer": processor}, dict(processor(image, return_tensors="pt"))),
    }[task]
    shapley = explain(model, *given, method="value-zeroing-shapley", **more)
    torch.manual_seed(5)  # the random numbers are the same each time, and leave no trace
    before = torch.get_rng_state()
    assert torch.equal(explain(model, *given, method="value-zeroing-shapley", **more).scores, shapley.scores)
    assert torch.equal(torch.get_rng_state(), before)
    told = "The numbers say how much each token supports " in shapley.view().subtitle
    assert shapley.is_signed and told == (len(shapley.rows) == 1)
    place, label = shapley.rows[0].token, int(model(**inputs)[0][0].argmax())
    target: Any = label if task != "answer" else lambda output: output.start_logits[:, place]
    together = torch.zeros(1, len(shapley.scores), dtype=torch.long)
    expected = effect(model, inputs, target=target, feature_mask=together)[0]
    torch.testing.assert_close(shapley.scores.sum(), expected, rtol=0, atol=1e-4)


# Other heads of a text


def test_tagger_has_a_row_for_each_labelled_word() -> None:
    model, inputs = tagger(), tokenizer()(SENTENCE, return_tensors="pt")
    logits = model(**inputs).logits[0]
    best, words = logits.argmax(-1).tolist(), inputs.word_ids()
    firsts = [i for i in range(1, len(best) - 1) if best[i] != 0 and words.index(words[i]) == i]
    found = explain(model, SENTENCE)
    assert 1 < len(firsts) < len(best) - 2
    assert [row.token for row in found.rows] == firsts
    for row, (said, share) in zip(found.rows, found.predictions, strict=True):
        label = best[row.token]
        assert row.name == said
        assert said.endswith(f": {NAMES[label]}")
        assert share == pytest.approx(logits[row.token].softmax(-1)[label].item(), abs=1e-6)
    row = found.rows[0]
    torch.testing.assert_close(row.scores, effect(model, inputs, target=(row.token, best[row.token])))
    assert [row.name for row in explain(model, SENTENCE, token="hat", target="THING").rows] == ["hat: THING"]
    of_pieces = explain(model, PIECES, token="wug")
    assert [(row.name.partition(":")[0], row.token) for row in of_pieces.rows] == [("wug", 2)]
    # Asked for all words, those whose label is "O" have rows too; the others are as before.
    every = explain(model, SENTENCE, token="*")
    assert [row.token for row in every.rows] == list(range(1, len(best) - 1))
    assert [said for said, _ in every.predictions] == [row.name for row in every.rows]
    assert any(row.name.endswith(": O") for row in every.rows)
    for row in found.rows:
        assert torch.equal(next(one.scores for one in every.rows if one.token == row.token), row.scores)
    with pytest.raises(ArgumentError, match="none of the tokens"):
        captum_vz.explain("agreement", SENTENCE, token="*")


def test_tagger_says_what_decides() -> None:
    """If values change less than half of the logit, a remark names the token with the largest relevance."""
    model = tagger()
    found = explain(model, SENTENCE, token="hat")
    (row,) = found.rows
    logits = model(**tokenizer()(SENTENCE, return_tensors="pt")).logits[0, row.token]
    assert row.explained == pytest.approx(logits.max().item(), abs=1e-5)
    size = 100 * row.scores.abs().sum().item() / abs(row.explained)
    assert f"size of all scores together: {row.name} {size:.0f} % of {row.explained:+.2f}" in str(found)
    assert bool(found.told) == (size < 50)
    with torch.no_grad():
        model.classifier.bias[int(logits.argmax())] += 100 * size  # the values' part becomes small
    found = explain(model, SENTENCE, token="hat")
    relevance = explain(model, SENTENCE, token="hat", method="attn-lrp").scores
    best = int(relevance.abs().argmax())
    assert f"{found.rows[0].name} on {found.tokens[best]} {relevance[best]:+.2f}" in found.told[0]


def test_answer_has_a_start_and_an_end() -> None:
    model, words, text = reader(), tokenizer(), "the pictures of marcus are scaring the teacher."
    inputs = words("some hat?", text, return_tensors="pt")
    output = model(**inputs)
    inside = [i for i, one in enumerate(inputs.sequence_ids()) if one == 1]
    pairs = [(i, j) for i in inside for j in inside if i <= j]
    first, last = max(pairs, key=lambda pair: (output.start_logits[0, pair[0]] + output.end_logits[0, pair[1]]).item())
    found = explain(model, "some hat?", text)
    assert found.predictions[0][0] == words.decode(inputs["input_ids"][0, first : last + 1])
    assert [row.token for row in found.rows] == [first, last]
    of_start = effect(model, inputs, target=lambda output: output.start_logits[:, first])
    of_end = effect(model, inputs, target=lambda output: output.end_logits[:, last])
    torch.testing.assert_close([row.scores for row in found.rows], [of_start, of_end])
    chosen = explain(model, "some hat?", text, target="the teacher")
    assert [chosen.tokens[row.token] for row in chosen.rows] == ["the", "teacher"]
    part = explain(model, "some hat?", "the wug", target="ug")
    assert ([row.token for row in part.rows], part.predictions[0][0]) == ([7, 8], "ug")
    assert [row.name for row in part.rows] == ["start: ##u", "end: ##g"]
    by_words = explain(model, "some hat?", "the wug", target="ug", words=True)
    named = [(row.name, by_words.tokens[row.token]) for row in by_words.rows]
    assert named == [("start: wug", "wug"), ("end: wug", "wug")]
    assert [row.token for row in explain(model, "some hat?", text, method="attention", token=7).rows] == [7]
    with pytest.raises(ArgumentError, match="text as text_pair"):
        explain(model, "some hat?")
    with pytest.raises(ArgumentError, match="answer could begin"):
        explain(model, "some hat?", " ")


def test_choice_explains_the_chosen_answer() -> None:
    model, words, text = chooser(), tokenizer(), "the pictures are"
    answers = ["the hat", "marcus is some teacher", "pictures"]
    inputs = words([text] * 3, answers, return_tensors="pt", padding=True)
    logits = model(**{name: one[None] for name, one in inputs.items()}).logits[0]
    found, best = explain(model, text, answers), int(logits.argmax())
    assert found.rows[0].name == found.predictions[0][0] == answers[best]
    assert found.predictions[0][1] == pytest.approx(logits.softmax(0)[best].item(), abs=1e-5)
    alone = {name: one[None] for name, one in words(text, answers[best], return_tensors="pt").items()}
    count = alone["input_ids"].shape[-1]
    expected = twin(model, lambda: model(**alone).logits[0, 0], one_by_one(count), "self.value")
    torch.testing.assert_close(found.scores, expected, **CLOSE)
    mapped = explain(model, text, answers, method="attention")
    assert (mapped.token, len(mapped.maps)) == (0, 2)
    for text, given, asked, told in [
        ("hat " * 70, answers, {}, "pass a shorter text"),
        ("hat " * 70, answers, {"window": True}, "is read alone, with"),
        ("the hat", ["a", 3], {}, "an object of type"),
        ("the hat", ["a", "a"], {"target": "a"}, "name of 2 labels"),
    ]:
        with pytest.raises(ArgumentError, match=told):
            explain(model, text, given, **asked)


def test_generated_words_of_an_encoder_decoder() -> None:
    words = byte_tokenizer(eos_token="</s>", pad_token="<pad>")
    model = t5(vocabulary=len(words))
    for asked, given in (
        ({}, {"method": "value-zeroing"}),
        ({"layer": -2}, {"method": "value-zeroing", "layer": 0}),
        ({"foil": "b"}, {"method": "value-zeroing-effect", "foil": "b"}),
    ):
        found = explain(model, "a is b", tokenizer=words, **asked)
        expected = attribute_generation((model, words), "a is b", **given)
        assert torch.equal(found.all_scores, expected.all_scores)
        assert found.predictions[0][0] == expected.text
        assert f"the model writes: {expected.text}" in str(found)
    with pytest.raises(ArgumentError, match="text_pair=, target="):
        explain(model, "a is b", tokenizer=words, target="b")
    encoder = model.get_encoder()
    maps = ValueZeroing(encoder, find_layers(encoder)).attribute(words("a is b", return_tensors="pt"))
    states = explain(model, "a is b", tokenizer=words, stack="encoder")
    torch.testing.assert_close(states.maps, [one[0] for one in maps])
    assert states.told == ["T5Stack has no head: no decision is explained, but the row of b"]


# Images and sound


def test_image_from_a_file(tmp_path: Path) -> None:
    model, processor = image_classifier()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    image.save(tmp_path / "image.png")
    inputs = processor(image, return_tensors="pt")
    label = int(model(**inputs).logits.argmax())
    found = explain(model, tmp_path / "image.png", tokenizer=processor)
    assert found.rows[0].name == found.predictions[0][0] == NAMES[label]
    assert found.tokens == ["[CLS]", "patch 0,0", "patch 0,1", "patch 1,0", "patch 1,1"]
    torch.testing.assert_close(found.scores, effect(model, dict(inputs), target=label))
    mapped = explain(model, image, tokenizer=processor, method="value-zeroing")
    by_hand = ValueZeroing(model, find_layers(model)[-1]).attribute(dict(inputs), token=0)[0]
    torch.testing.assert_close(mapped.scores, by_hand)
    mapped.plot()


def test_sound_from_a_file(tmp_path: Path) -> None:
    sound = np.random.default_rng(0).integers(-9000, 9000, 4000, dtype=np.int16)
    path = write_sound(tmp_path / "sound.wav", sound)
    model, processor = sound_model(SOUND)
    inputs = processor((sound / 32768).astype(np.float32), sampling_rate=16000, return_tensors="pt")
    label = int(model(**inputs).logits.argmax())
    found = explain(model, path, tokenizer=processor)
    assert found.rows[0].name == NAMES[label]
    samples = inputs["input_values"]
    torch.testing.assert_close(found.scores, effect(model, samples, target=label))
    speech, processor = sound_model(SPEECH)
    letters = explain(speech, path, tokenizer=processor)
    best = speech(**inputs).logits[0].argmax(-1).tolist()
    assert [row.token for row in letters.rows] == [
        i for i, one in enumerate(best) if one != 0 and (i == 0 or best[i - 1] != one)
    ]
    row = letters.rows[0]
    torch.testing.assert_close(row.scores, effect(speech, samples, target=(row.token, best[row.token])))
    processor.sampling_rate = 8000
    with pytest.raises(ArgumentError, match="samples a second"):
        explain(speech, path, tokenizer=processor)


def test_pipelines() -> None:
    make: Any = pipeline
    (images, processor), (sounds, extractor) = image_classifier(), sound_model(SOUND)
    masked, causal, words = load_model(), load_model("causal"), tokenizer()
    for task, model, parts, given in (
        ("text-classification", classifier(), {"tokenizer": words}, SENTENCE),
        ("token-classification", tagger(), {"tokenizer": words}, SENTENCE),
        ("fill-mask", masked[0], {"tokenizer": masked[1]}, MASKED),
        ("text-generation", causal[0], {"tokenizer": causal[1]}, "the hat"),
        ("image-classification", images, {"image_processor": processor}, Image.new("RGB", (8, 8), "red")),
        ("audio-classification", sounds, {"feature_extractor": extractor}, np.sin(np.arange(3000, dtype=np.float32))),
    ):
        found = captum_vz.explain(make(task, model=model, **parts), given)
        expected = captum_vz.explain(model, given, tokenizer=next(iter(parts.values())))
        torch.testing.assert_close(found.scores, expected.scores)
