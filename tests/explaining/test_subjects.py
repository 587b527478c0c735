"""Models in wrappers, and tokenizers that name no characters or words."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import captum_vz
from captum_vz import find_layers, verify
from captum_vz.errors import ArgumentError, UnsupportedLayerError
from captum_vz.generation import GenerationAttribution, attribute_generation
from captum_vz.study import compare
from captum_vz.subjects import heads, model_sources
from captum_vz.testbed import load_model
from tests.explaining.models import SENTENCE, SIZE, bert, classifier, one_by_one, t5, tokenizer, twin


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


class MyClassifier(transformers.BertForSequenceClassification):
    pass


def as_my_class(model: Any) -> Any:
    made = MyClassifier(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.parametrize(
    "wrap", [Wrapper, nn.DataParallel, lambda model: torch.compile(model, backend="eager"), as_my_class]
)
def test_head_of_a_wrapped_model_is_found(wrap: Callable[[Any], Any]) -> None:
    model = classifier()
    expected = captum_vz.explain(model, SENTENCE, tokenizer=tokenizer())
    found = captum_vz.explain(wrap(model), SENTENCE, tokenizer=tokenizer())
    assert found.task == expected.task
    assert dict(found.predictions) == pytest.approx(dict(expected.predictions))
    torch.testing.assert_close(found.scores, expected.scores)


def test_all_calls_take_a_model_in_one_way() -> None:
    """By its name, as a pair, and with its tokenizer; a tokenizer in the place of a text is refused."""
    model, words = load_model()
    for call in (partial(compare, methods="value-zeroing"), captum_vz.explain):
        found = call("agreement", SENTENCE).scores
        assert torch.equal(call((model, words), SENTENCE).scores, found)
        assert torch.equal(call(model, SENTENCE, tokenizer=words).scores, found)
    causal = load_model("causal")
    found = attribute_generation("causal", "the hat", max_new_tokens=2)
    assert torch.equal(attribute_generation(causal, "the hat", max_new_tokens=2).scores, found.scores)
    assert verify((model, words), "some hat [MASK].", find_layers(model)[0]).passed
    with pytest.raises(ArgumentError, match="without its"):
        compare(model, words, SENTENCE)
    with pytest.raises(ArgumentError, match="prompt is of type"):
        attribute_generation(*causal, SENTENCE)
    for name in ({"a": "agreement"}, "agreement", ["agreement"], {"a": (model, words)}):
        (source,) = model_sources(name).values()
        loaded = source() if callable(source) else source
        assert type(loaded[0]) is type(model)
    with pytest.raises(ArgumentError, match="model 'no-such'"):
        model_sources({"a": "no-such"})


@pytest.mark.parametrize(
    ("model", "words", "told"),
    [
        (nn.TransformerEncoderLayer(4, 2), tokenizer(), "has no config"),
        (classifier(), "agreement", "of type str, "),
        (3, None, "is of type int"),
        (nn.Linear(2, 2), None, "without its token"),
    ],
)
def test_what_is_no_model_or_tokenizer_is_named(model: Any, words: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        captum_vz.explain(model, SENTENCE, tokenizer=words)


def test_models_without_a_head_show_cls() -> None:
    bert, words = load_model()[0].bert, tokenizer()
    found = captum_vz.explain(bert, "the hat", tokenizer=words)
    assert (found.token, found.told) == (0, ["BertModel has no head: no decision is explained, but the row of [CLS]"])
    assert captum_vz.explain(bert, "a [MASK]", tokenizer=words).token == 2


# The name of a class does not say it: models of sound, and language models that also read images, see `task_of`.
BY_CONFIG = {("AUDIO_CLASSIFICATION", heads.SEQUENCE), ("CAUSAL_LM", heads.SEQ2SEQ), ("MASKED_LM", heads.SEQ2SEQ)}


@pytest.mark.parametrize(
    ("mapping", "task"),
    [
        ("SEQUENCE_CLASSIFICATION", heads.SEQUENCE),
        ("TOKEN_CLASSIFICATION", heads.TOKENS),
        ("QUESTION_ANSWERING", heads.ANSWER),
        ("MULTIPLE_CHOICE", heads.CHOICE),
        ("MASKED_LM", heads.MASKED),
        ("CAUSAL_LM", heads.CAUSAL),
        ("SEQ_TO_SEQ_CAUSAL_LM", heads.SEQ2SEQ),
        ("IMAGE_CLASSIFICATION", heads.IMAGE),
        ("AUDIO_CLASSIFICATION", heads.AUDIO),
        ("CTC", heads.SPEECH),
    ],
)
def test_tasks_of_all_classes_of_transformers(mapping: str, task: str) -> None:
    given = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values()
    names = {name for one in given for name in ([one] if isinstance(one, str) else one)}
    # XLM and Flaubert are trained with masks, and are listed twice. Perceiver's and this decoder's names say nothing.
    listed_twice = {"XLMWithLMHeadModel", "FlaubertWithLMHeadModel"} if task == heads.CAUSAL else set()
    names = {name for name in names - listed_twice if not name.startswith(("PerceiverFor", "BertGenerationDecoder"))}
    found = {name: heads.task_of_class(name) for name in names}
    assert {name: one for name, one in found.items() if one != task and (mapping, one) not in BY_CONFIG} == {}


def test_language_model_that_reads_images_is_explained_as_one(saved: Callable[..., str]) -> None:
    """Without an image, Llava is the Llama inside it."""
    words = load_model("causal")[1]
    config = transformers.LlamaConfig(vocab_size=len(words), **{**SIZE, "initializer_range": 0.02})
    both = transformers.LlavaConfig(text_config=config, vision_config=transformers.CLIPVisionConfig(**SIZE))
    model = transformers.LlavaForConditionalGeneration(both).eval()
    inside = transformers.LlamaForCausalLM(config).eval()
    inside.model, inside.lm_head = model.model.language_model, model.lm_head
    folder = saved(model, words)
    for method in ("value-zeroing", "attn-lrp"):
        expected = captum_vz.explain((inside, words), SENTENCE, method=method)
        for given in ((model, words), folder):
            found = captum_vz.explain(given, SENTENCE, method=method)
            assert dict(found.predictions) == pytest.approx(dict(expected.predictions))
            torch.testing.assert_close(found.scores, expected.scores)


def test_translations_and_tokens_that_a_model_adds() -> None:
    """Its class ends in MTModel."""
    words = load_model()[1]
    sizes: dict[str, Any] = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": len(words)}
    sizes |= {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    pad, end = words.pad_token_id, words.sep_token_id
    config = transformers.MarianConfig(**sizes, pad_token_id=pad, eos_token_id=end, decoder_start_token_id=pad)
    found = captum_vz.explain((transformers.MarianMTModel(config).eval(), words), SENTENCE)
    assert isinstance(found, GenerationAttribution)
    peft = pytest.importorskip("peft")
    model, words = load_model("causal")
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    with pytest.raises(UnsupportedLayerError, match="it adds its own"):
        captum_vz.explain(tuned, "the hat", tokenizer=words)


def test_characters_and_words_of_a_tokenizer_of_bytes() -> None:
    words = transformers.ByT5Tokenizer()
    found = captum_vz.explain(t5(transformers.T5EncoderModel), "日 a", tokenizer=words)
    assert found.tokens == ["日₁", "日₂", "日₃", "␣", "a", "</s>"]
    found = captum_vz.explain(t5(transformers.T5ForTokenClassification), "the hat", tokenizer=words)
    assert [row.name.partition(":")[0] for row in found.rows] == ["the", "hat"]
    joint = captum_vz.explain(t5(transformers.T5EncoderModel), "the hat", tokenizer=words, words=True)
    assert joint.tokens == ["the", "hat", "</s>"]


def test_answer_in_a_text_of_a_tokenizer_in_python() -> None:
    """The text of the answer is the second one, also where it repeats the question."""
    model, words = t5(transformers.T5ForQuestionAnswering), transformers.ByT5Tokenizer()
    inputs = words("a hat", "a hat", return_tensors="pt")
    output = model(**inputs)
    inside = range(6, 11)
    pairs = [(i, j) for i in inside for j in inside if i <= j]
    first, last = max(pairs, key=lambda pair: (output.start_logits[0, pair[0]] + output.end_logits[0, pair[1]]).item())
    found = captum_vz.explain(model, "a hat", "a hat", tokenizer=words)
    assert [row.token for row in found.rows] == [first, last]
    expected = twin(model.encoder, lambda: model(**inputs).start_logits[0, first], one_by_one(12), "SelfAttention.v")
    torch.testing.assert_close(found.scores, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config", "field"),
    [
        (transformers.DPRReader, transformers.DPRConfig, "relevance_logits"),
        (transformers.ElectraForPreTraining, transformers.ElectraConfig, "logits"),
        (transformers.TapasForQuestionAnswering, transformers.TapasConfig, "logits"),
        (transformers.XLNetForQuestionAnswering, transformers.XLNetConfig, "cls_logits"),
    ],
)
def test_heads_that_are_not_known_are_named(kind: Any, config: Any, field: str) -> None:
    """The message names two ways. Both work, but where the input is no text: TAPAS reads a table."""
    words = tokenizer()
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16} if config is transformers.XLNetConfig else SIZE
    model = kind(config(vocab_size=len(words), **sizes)).eval()
    told = f"the head of {kind.__name__}: explain a number of its output with captum_vz.ValueZeroingEffect"
    with pytest.raises(ArgumentError, match=told):
        captum_vz.explain(model, SENTENCE, tokenizer=words)
    if kind in (transformers.DPRReader, transformers.ElectraForPreTraining):
        inputs = words(SENTENCE, return_tensors="pt")

        def number(**given: Any) -> Tensor:
            return model(**given)[field].reshape(len(given["input_ids"]), -1).sum(-1)

        effect = captum_vz.ValueZeroingEffect(number, find_layers(model))
        assert effect.attribute(dict(inputs)).any()
        assert captum_vz.explain(model, SENTENCE, tokenizer=words, method="value-zeroing").scores.any()


def test_classifiers_of_two_texts(saved: Callable[..., str]) -> None:
    """Whether a sentence follows another one, and a CrossEncoder, which is the classifier inside it."""
    words = tokenizer()
    follows = bert(transformers.BertForNextSentencePrediction, num_labels=1)
    ranks = bert(transformers.BertForSequenceClassification, num_labels=1)
    found = captum_vz.explain(follows, SENTENCE, "a hat", tokenizer=words)
    inputs = words(SENTENCE, "a hat", return_tensors="pt")
    best = int(follows(**inputs).logits.argmax())
    for model, entry in ((follows, best), (ranks, 0)):
        shown = captum_vz.explain(model, SENTENCE, "a hat", tokenizer=words).scores
        torch.testing.assert_close(shown, captum_vz.ValueZeroingEffect(model).attribute(inputs, target=entry)[0])
    assert dict(found.predictions)["LABEL_0"] == pytest.approx(follows(**inputs).logits.softmax(-1)[0, 0].item())
    made = pytest.importorskip("sentence_transformers")
    reranker = made.CrossEncoder(saved(ranks, words), device="cpu", prompts={"query": "query: "})
    expected = captum_vz.explain(ranks, SENTENCE, "a hat", tokenizer=words)
    torch.testing.assert_close(captum_vz.explain(reranker, SENTENCE, "a hat").scores, expected.scores)
    reranker.default_prompt_name = "query"
    with pytest.raises(ArgumentError, match="puts the prompt"):
        captum_vz.explain(reranker, SENTENCE, "a hat")


def test_simple_answer_of_xlnet() -> None:
    torch.manual_seed(1)
    words, question = tokenizer(), "some hat?"
    sizes = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 16, "initializer_range": 0.4}
    model: Any = transformers.XLNetForQuestionAnsweringSimple(
        transformers.XLNetConfig(vocab_size=len(words), **sizes)
    ).eval()
    inputs = words(question, SENTENCE, return_tensors="pt")
    found = captum_vz.explain(model, question, SENTENCE, tokenizer=words)
    place = found.rows[0].token
    assert place is not None and [row.name.partition(":")[0] for row in found.rows] == ["start", "end"]
    effect = captum_vz.ValueZeroingEffect(model)
    torch.testing.assert_close(found.scores, effect.attribute(inputs, target=lambda one: one.start_logits[:, place])[0])
