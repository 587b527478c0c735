"""Equal numbers of examples, tokens, heads and features a head: lengths do not identify axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captum_vz import ValueZeroing, find_layers
from tests.engine.compare import assert_same
from tests.engine.parameters import quick
from tests.reference.case import built

SIZE = 4
WIDTH = SIZE * SIZE
BERT = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": SIZE,
    "intermediate_size": 24,
}
BOTH = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
BOTH |= {"encoder_attention_heads": SIZE, "decoder_attention_heads": SIZE, "max_position_embeddings": 64}
FSMT = BOTH | {"langs": ["en", "de"], "src_vocab_size": 50, "tgt_vocab_size": 50}

# name -> (model, sizes, the stack)
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "BERT": ("BertModel", BERT, None),
    "BLOOM": ("BloomModel", {"vocab_size": 50, "hidden_size": WIDTH, "n_layer": 2, "n_head": SIZE}, None),
    "XLNet": ("XLNetModel", {"vocab_size": 50, "d_model": WIDTH, "n_layer": 2, "n_head": SIZE, "d_inner": 24}, None),
    "BART decoder": ("BartModel", BOTH | {"vocab_size": 50}, "decoder"),
    "FSMT encoder": ("FSMTModel", FSMT, "encoder"),
}
ATTENTIONS = [*((name, "self") for name in CASES), ("BART decoder", "cross")]


def case(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    inputs = {"input_ids": torch.randint(4, 50, (SIZE, SIZE))}
    inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    if CASES[name][2]:
        inputs["decoder_input_ids"] = torch.randint(4, 50, (SIZE, SIZE))
    return built(CASES[name][0], **CASES[name][1]), inputs


@pytest.mark.parametrize(
    ("name", "attention"), quick(ATTENTIONS, ("BERT", "self"), ("XLNet", "self"), ("BART decoder", "cross"))
)
def test_batch_equals_its_examples(name: str, attention: str) -> None:
    model, inputs = case(name)
    layers = find_layers(model, CASES[name][2])
    method = ValueZeroing(model, layers, attention=attention)
    together = method.attribute(inputs)
    for example in range(SIZE):
        alone = method.attribute({key: value[example : example + 1] for key, value in inputs.items()})
        for layer_map, expected in zip(together, alone, strict=True):
            assert_same(layer_map[example], expected[0])
            assert expected.any()


def test_assertion_of_the_layer_is_quoted() -> None:
    model, inputs = case("FSMT encoder")
    layer = find_layers(model, "encoder")[0]
    runs: list[Any] = []

    def once(*_: Any) -> None:
        runs.append(None)
        assert len(runs) == 1, "runs once"

    layer.self_attn.register_forward_pre_hook(once)
    with pytest.raises(AssertionError, match="cannot be replayed"):
        ValueZeroing(model, layer).attribute(inputs)
