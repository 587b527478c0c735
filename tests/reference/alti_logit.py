"""ALTI-Logit in loops: the contribution to a logit of each vector that an attention adds to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import sqrt

import numpy as np
import torch
from torch import Tensor, nn

from tests.reference.alti_plus import self_map
from tests.reference.case import WIDTH, Case, Family
from tests.reference.families import FAMILIES, VOCABULARY
from tests.reference.naive import record
from tests.reference.norms import seen, vectors_of_run


def with_head(name: str, model: str, stack: str, **settings: bool) -> Family:
    """A family with its language modelling head. `stack` is the dotted name of the model without the head."""
    family = FAMILIES[name]
    layers, norm = f"{stack}.{family.layers}", f"{stack}.{family.norm}"
    return replace(family, model=model, config={**family.config, **settings}, layers=layers, norm=norm)


LANGUAGE_MODELS = {
    "gpt2": with_head("gpt2", "GPT2LMHeadModel", "transformer"),
    "llama": with_head("llama", "LlamaForCausalLM", "model", attention_bias=True),
    "qwen2": with_head("qwen2", "Qwen2ForCausalLM", "model"),
    # Phi runs its feed-forward parallel to its attention, and its unembedding has a bias.
    "phi": with_head("phi", "PhiForCausalLM", "model"),
    "opt": with_head("opt", "OPTForCausalLM", "model"),
}


@cache
def language_model(name: str) -> Case:
    return LANGUAGE_MODELS[name].case


@dataclass
class NaiveLogit:
    """The terms of each logit at each position, with the standard deviation of the last norm held fixed."""

    sources: np.ndarray  # (layer, batch, out, in, entry)
    embedding: np.ndarray  # (batch, out, entry), as the next two
    bias: np.ndarray
    feed_forward: np.ndarray
    constant: np.ndarray  # (entry,)
    maps: np.ndarray  # ALTI's, (layer, batch, out, in)
    logits: np.ndarray  # the model's own

    def contributions(self, b: int, t: int, entry: int) -> np.ndarray:
        """The contribution of each input token to one logit through attention, ``(in,)``."""
        tokens = self.maps.shape[-1]
        result = np.zeros(tokens)
        drawn = np.eye(tokens)
        for layer in range(len(self.sources)):
            for k in range(tokens):
                for j in range(tokens):
                    result[j] += self.sources[layer, b, t, k, entry] * drawn[k, j]
            drawn = self.maps[layer, b] @ drawn
        return result


@cache
@torch.no_grad()
def naive_logit(name: str, norm: str = "l1") -> NaiveLogit:
    case = language_model(name)
    runs, output = record(case)
    final, head = case.final_norm, case.model.get_output_embeddings()
    matrix = head.weight.double().numpy()
    gamma = final.weight.double().numpy()
    beta = np.zeros(WIDTH) if getattr(final, "bias", None) is None else final.bias.double().numpy()
    given = runs[-1].hidden.double().numpy()
    batch, tokens, _ = given.shape

    def logits_of(vector: np.ndarray, b: int, t: int) -> np.ndarray:
        """The logits of a summand of the last hidden state at (b, t)."""
        x = given[b, t]
        if isinstance(final, nn.LayerNorm):
            deviation = sqrt(((x - x.mean()) ** 2).mean() + final.eps)
            return matrix @ (gamma * (vector - vector.mean()) / deviation)
        return matrix @ (gamma * vector / sqrt((x**2).mean() + final.eps))

    sources = np.zeros((len(runs), batch, tokens, tokens, VOCABULARY))
    embedding, bias, feed_forward = (np.zeros((batch, tokens, VOCABULARY)) for _ in range(3))
    for layer, run in enumerate(runs):
        naive = vectors_of_run(case, layer, "attention")
        layer_input = (run.args[0] if run.args else run.kwargs["hidden_states"]).double().numpy()
        projected = seen(run, case.family.attention.output)[1]
        for b, t in np.argwhere(naive.real):
            if layer == 0:
                embedding[b, t] = logits_of(layer_input[b, t], b, t)
            for k in range(tokens):
                sources[layer, b, t, k] = logits_of(naive.vectors[b, t, k], b, t)
            bias[b, t] += logits_of(naive.rest[b, t], b, t)
            added = run.hidden[b, t].double().numpy() - layer_input[b, t] - projected[b, t]
            feed_forward[b, t] += logits_of(added, b, t)
    constant = matrix @ beta + (0 if head.bias is None else head.bias.double().numpy())
    maps = np.stack([self_map(case, layer, False, norm) for layer in range(len(runs))])
    return NaiveLogit(sources, embedding, bias, feed_forward, constant, maps, output.logits.double().numpy())


def naive_alti_logit(name: str, entries: Tensor, norm: str = "l1") -> Tensor:
    """The whole map ``(batch, out, in)`` for entries ``(batch, out)``."""
    naive = naive_logit(name, norm)
    real = language_model(name).inputs["attention_mask"].bool().numpy()
    result = np.zeros(naive.maps.shape[1:])
    for b, t in np.argwhere(real):
        result[b, t] = naive.contributions(b, t, int(entries[b, t]))
    return torch.from_numpy(result)
