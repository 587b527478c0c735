"""AttnLRP against the relevances of its authors' package, lxt 2.1, kept in a file.

The package needs transformers 4 (4.53.3 was used), so it cannot run here. It patched the classes of each architecture
(`monkey_patch` with its map `attnLRP`, or `cp_LRP`), which ran with the weights and the ids below. Kept is the sum of
gradient times input of the word embeddings, for the lead of `RIGHT` over `WRONG` after the last token.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from captum_vz import AttnLRP, token_scores

KEPT = json.loads((Path(__file__).parent / "attn_lrp_authors.json").read_text("utf-8"))
IDS = torch.tensor([[3, 7, 1, 9, 4, 22, 17, 5], [5, 2, 38, 6, 11, 30, 12, 8]])
RIGHT, WRONG = 6, 9
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SMALL = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SMALL, **ENDS, "num_key_value_heads": 2, "tie_word_embeddings": False}
GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Gemma3Text": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, **GEMMA}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 40, "n_embd": 32, "n_layer": 3, "n_head": 4, **ENDS}),
    "Bert": ("BertForMaskedLM", SMALL),
}


def filled(name: str, attention: str) -> Any:
    """A model whose weights depend on their names alone."""
    head, config = MODELS[name]
    made = getattr(transformers, f"{name}Config")(**config)
    made._attn_implementation = attention
    model = getattr(transformers, head)(made).eval()
    with torch.no_grad():
        for parameter, weights in model.named_parameters():
            draw = torch.Generator().manual_seed(zlib.crc32(parameter.encode()))
            is_scale = weights.ndim == 1 and "bias" not in parameter and name != "Gemma3Text"
            weights.copy_(torch.randn(weights.shape, generator=draw) * 0.2 + is_scale)
    return model


@pytest.mark.all_cases
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kept", KEPT)
def test_relevance_is_that_of_the_authors(kept: str, attention: str) -> None:
    name, rules = kept.split()
    model = filled(name, attention)
    method = AttnLRP(model, model.get_input_embeddings(), cp_lrp=rules == "cp_LRP")
    found = token_scores(method.attribute({"input_ids": IDS}, target=(7, RIGHT), foil=(7, WRONG))).double()
    wanted = torch.tensor(KEPT[kept], dtype=torch.float64)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
