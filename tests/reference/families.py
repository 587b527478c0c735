"""The table of model families that the tests run on: one tiny random model a row.

``family = FAMILIES["gpt2"]``; ``family.case`` is the shared float64 model with inputs, ``family.build()`` a fresh one.
"""

from __future__ import annotations

from tests.reference.case import HEADS, LAYERS, VOCABULARY, WIDTH, Attention, Family

BERT_SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_SIZE = dict(BERT_SIZE, num_key_value_heads=2)

BERT_ATTENTION = Attention("attention.self.value", "attention.output.dense")
LLAMA_ATTENTION = Attention("self_attn.v_proj", "self_attn.o_proj", value_heads=2)


def bert_like(model: str) -> Family:
    """An encoder whose code descends from BERT's."""
    return Family(
        model, dict(BERT_SIZE, embedding_size=WIDTH), "encoder.layer", BERT_ATTENTION
    )


def llama_like(
    model: str, attention: Attention = LLAMA_ATTENTION, **settings: object
) -> Family:
    """A decoder whose code descends from LLaMA's."""
    return Family(
        model,
        dict(LLAMA_SIZE, **settings),
        "layers",
        attention,
        causal=True,
        norm="norm",
    )


FAMILIES: dict[str, Family] = {
    "bert": bert_like("BertModel"),
    "gpt2": Family(
        "GPT2Model",
        BERT_SIZE,
        "h",
        Attention("attn.c_attn", "attn.c_proj", offset=2 * WIDTH),
        causal=True,
        norm="ln_f",
    ),
    "llama": llama_like("LlamaModel"),
}
