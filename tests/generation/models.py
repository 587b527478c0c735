"""Tiny random models that generate, their tokenizer, and the naive twin: one pass for each step."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from captum_vz import ValueZeroing
from captum_vz.generation import GenerationAttribution, attribute_generation
from tests.reference.case import Case, Family
from tests.reference.families import FAMILIES
from tests.reference.inputs import VOCABULARY
from tests.reference.naive import naive_value_zeroing_maps, value_zeroing_of_run

CAUSAL = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", "transformer.h"),
    "llama": ("llama", "LlamaForCausalLM", "model.layers"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "model.layers"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", "model.layers"),
}
ENCODER_DECODER = {
    "t5": ("t5-decoder", "T5ForConditionalGeneration", "decoder.block"),
    "bart": ("bart-decoder", "BartForConditionalGeneration", "model.decoder.layers"),
}
PROMPT = [5, 17, 9, 33, 8]
NEW = [41, 12, 12, 27]

CHAT = (
    "{% for message in messages %}{{ message['role'] }} : {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
TEXT = (
    "<pad> <bos> <eos> <unk> the pictures of some hat a woman 's theater , that anna likes . has upset marcus doctor "
    "user assistant system : ? ! and s not have hurt themselves Of $"
)
WORDS = TEXT.split()


@cache
def case_of(name: str, dtype: torch.dtype = torch.float64) -> Case:
    """A model with a head. Tests must not change it."""
    row, model, layers = (CAUSAL | ENCODER_DECODER)[name]
    family: Family = replace(FAMILIES[row], model=model, layers=layers)
    return family.build(dtype)


@cache
def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with a chat template."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    vocabulary |= {f"word{index}": index for index in range(len(WORDS), VOCABULARY)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Strip()
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = CHAT
    return tokenizer


def inputs_of(name: str, prompt: list[int], before: list[int]) -> dict[str, Tensor]:
    """The inputs of the model at one step, after the tokens `before`."""
    if name in CAUSAL:
        return {"input_ids": torch.tensor([prompt + before])}
    start = case_of(name).model.config.decoder_start_token_id
    return {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([[start, *before]])}


def steps_of(name: str, prompt: list[int], new: list[int]) -> list[Case]:
    case = case_of(name)
    return [replace(case, inputs=inputs_of(name, prompt, new[:step])) for step in range(len(new))]


def naive_rows(name: str, prompt: list[int], new: list[int]) -> list[Tensor]:
    """The row of the last position in each step, `(in, layers)`: Value Zeroing by hand, on growing texts."""
    rows = []
    for case in steps_of(name, prompt, new):
        if name in ENCODER_DECODER:
            count = len(case.layers)
            maps = [value_zeroing_of_run(case, layer, attention="cross")[0] for layer in range(count)]
        else:
            maps = [one[0] for one in naive_value_zeroing_maps(case)]
        rows.append(torch.stack([one[-1] for one in maps], dim=-1))
    return rows


def found_by(
    method: Any = ValueZeroing, name: str = "gpt2", prompt: Any = PROMPT, new: Any = NEW
) -> GenerationAttribution:
    found: GenerationAttribution = attribute_generation(
        (case_of(name).model, tokenizer_of_words()), prompt, method, generated=new
    )
    return found


def generate(name: str, prompt: list[int], **options: Any) -> Tensor:
    ids = torch.tensor([prompt])
    return case_of(name).model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
