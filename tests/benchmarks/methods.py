"""Print what each class costs, in CPU time of forward passes: all layers of models of bert-base's size, 32 tokens.

python -m tests.benchmarks.methods
python -m tests.benchmarks.methods --tokens 128 --rounds 3
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BartConfig, BartModel, BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import captum_vz as vz
from captum_vz.testbed import agreement_sentences, load_model
from tests.benchmarks.measure import medians
from tests.benchmarks.models import token_ids

Contenders = dict[str, Callable[[], Any]]


def of_encoder(ids: Tensor) -> tuple[nn.Module, Contenders]:
    """The methods that explain bert-base. A flow is computed for one row."""
    model = BertForSequenceClassification(BertConfig()).eval()
    layers = vz.find_layers(model)
    gradient = vz.LayerAttentionGradient(model, layers)
    maps = [
        "ValueZeroing",
        "ValueZeroingRollout",
        "LayerAttention",
        "AttentionRollout",
        "LayerAttentionNorm",
        "GlobEnc",
    ]
    maps += ["LayerALTI", "ALTI"]
    return model, {
        **{name: lambda name=name: getattr(vz, name)(model, layers).attribute(ids) for name in maps},
        "ValueZeroing, one row": lambda: vz.ValueZeroing(model, layers).attribute(ids, token=1),
        "ValueZeroingEffect": lambda: vz.ValueZeroingEffect(model, layers).attribute(ids, target=0),
        "ValueZeroingEffect, function": lambda: vz.ValueZeroingEffect(lambda x: model(x), layers).attribute(ids, 0),
        "a loop of hooks": lambda: loop_of_hooks(model, layers, ids),
        "LayerAttentionGradient": lambda: gradient.attribute(ids, 0),
        "AttnLRP": lambda: vz.AttnLRP(model).attribute(ids, target=0),
        "AttentionFlow, one row": lambda: vz.AttentionFlow(model, layers).attribute(ids, token=1),
    }


def loop_of_hooks(model: nn.Module, layers: list[nn.Module], ids: Tensor) -> list[Tensor]:
    """What ValueZeroingEffect is compared with: one forward pass for each token."""
    numbers = [model(ids).logits[:, 0]]
    for token in range(ids.shape[1]):
        with ExitStack() as hooks:
            for layer in layers:
                value = layer.get_submodule("attention.self.value")
                hooks.enter_context(value.register_forward_hook(partial(_without, token)))
            numbers.append(numbers[0] - model(ids).logits[:, 0])
    return numbers


def _without(token: int, module: nn.Module, args: Any, values: Tensor) -> Tensor:
    values = values.clone()
    values[:, token] = 0
    return values


def of_derivatives(ids: Tensor) -> tuple[nn.Module, Contenders]:
    """HiddenTokenAttribution of one row of bert-base, which takes minutes."""
    model = BertForSequenceClassification(BertConfig()).eval()
    derivative = vz.HiddenTokenAttribution(model, vz.find_layers(model)[-1])
    return model, {"HiddenTokenAttribution, one row": lambda: derivative.attribute(ids, token=1)}


def of_encoder_decoder(ids: Tensor) -> tuple[nn.Module, Contenders]:
    """ALTIPlus of a model of bart-base's size."""
    size = {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    model = BartModel(BartConfig(use_cache=False, **size, **heads)).eval()
    layers = [*vz.find_layers(model, "encoder"), *vz.find_layers(model, "decoder")]
    return model, {
        "ALTIPlus": lambda: vz.ALTIPlus(model, layers).attribute({"input_ids": ids, "decoder_input_ids": ids})
    }


def of_decoder(ids: Tensor) -> tuple[nn.Module, Contenders]:
    """ALTILogit of a model of gpt2's size."""
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    logit = vz.ALTILogit(model, vz.find_layers(model))
    return model, {"ALTILogit, one row": lambda: logit.attribute(ids, target=(ids.shape[1] - 1, 7))}


class OwnBlock(nn.Module):
    """A pre-norm block of a user, whose attention goes through torch's kernel."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.norm_after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = (one(self.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        context = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(context.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_after(x))


def of_own_blocks(ids: Tensor) -> tuple[Any, Contenders]:
    """Maps of six own blocks, and the definition: each block runs once for each token, by a hook on its values."""
    model, x = nn.Sequential(*(OwnBlock() for _ in range(6))).eval(), torch.randn(1, ids.shape[1], 128)
    layers = list(model)

    def definition() -> list[Tensor]:
        given, maps = x, []
        for layer in layers:
            clean, scores = layer(given), []
            for token in range(x.shape[1]):
                with layer.value.register_forward_hook(partial(_without, token)):
                    scores.append(1 - torch.cosine_similarity(layer(given), clean, dim=-1))
            maps.append(torch.stack(scores, -1))
            given = clean
        return maps

    return lambda input_ids: model(x), {
        "own blocks, definition": definition,
        "own blocks, ValueZeroing": lambda: vz.ValueZeroing(model, layers).attribute(x),
        "own blocks, one row": lambda: vz.ValueZeroing(model, layers).attribute(x, token=-1),
        "own blocks, LayerAttention": lambda: vz.LayerAttention(model, layers).attribute(x),
    }


def of_texts(ids: Tensor) -> tuple[Any, Contenders]:
    """Rows of 40 texts with the embedded model: one after another, and in batches of similar length."""
    model, tokenizer = load_model()
    texts = [record["masked"] for record in agreement_sentences(40)]
    method = vz.ValueZeroing(model)
    return lambda input_ids: model(input_ids % len(tokenizer)), {
        "40 texts, one by one": lambda: [method.attribute(tokenizer(x, return_tensors="pt"), token=1) for x in texts],
        "40 texts, attribute_texts": lambda: vz.attribute_texts(method, texts, tokenizer, token=1),
    }


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.methods", description=__doc__)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--derivatives", action="store_true", help="also measure HiddenTokenAttribution, for minutes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ids = token_ids(options.tokens, "cpu")
    builds = [of_encoder, of_encoder_decoder, of_decoder, of_own_blocks, of_texts]
    builds += [of_derivatives] if options.derivatives else []
    for build in builds:
        model, contenders = build(ids)
        given = {"input_ids": ids} | ({"decoder_input_ids": ids} if build is of_encoder_decoder else {})
        forward: Contenders = {"forward pass": lambda model=model, given=given: model(**given)}
        seconds = medians(forward | contenders, options.rounds, "cpu", time.process_time)
        for name in contenders:
            print(f"{name:32} {seconds[name] / seconds['forward pass']:6.1f} forward passes", flush=True)


if __name__ == "__main__":
    main()
