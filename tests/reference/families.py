"""The table of model families that the tests run on. Each row is one tiny random model.

With ``family = FAMILIES["gpt2"]``, ``family.case`` is the shared float64 model with inputs, and ``family.build()`` is a
new one. Each feature must work on `FIRST_FAMILIES`. `SEQUENCE_TO_SEQUENCE` has a row for each encoder and decoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.reference.case import BEFORE_5, HEAD_WIDTH, HEADS, LAYERS, WIDTH, Attention, Family
from tests.reference.inputs import (
    VOCABULARY,
    barely_padded_tokens,
    padded_token_pairs,
    padded_tokens,
    padded_waves,
    pixels,
    spectrogram_and_tokens,
)

ENCODER_SIZE = {
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
SEQ2SEQ_SIZE = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

WHISPER_SIZE = {**SEQ2SEQ_SIZE, "num_mel_bins": 8, "max_source_positions": 7, "max_target_positions": 8}
T5_SIZE = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "decoder_start_token_id": 0,
}
IMAGE_SIZE = {"image_size": 8, "patch_size": 4}
WAVE_SIZE = {
    "conv_dim": (8, 8),
    "conv_kernel": (4, 1),
    "conv_stride": (4, 1),
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}

BART_ATTENTION = Attention("self_attn.v_proj", "self_attn.out_proj")
BART_CROSS = Attention("encoder_attn.v_proj", "encoder_attn.out_proj")
T5_ATTENTION = Attention("layer.0.SelfAttention.v", "layer.0.SelfAttention.o", head_width=6)
T5_CROSS = Attention("layer.1.EncDecAttention.v", "layer.1.EncDecAttention.o", head_width=6)


def bert(model: str, **settings: Any) -> Family:
    """An encoder whose code is derived from BERT's."""
    attention = Attention("attention.self.value", "attention.output.dense")
    return Family(model, {**ENCODER_SIZE, **settings}, "encoder.layer", attention)


def albert(layers_in_group: int, times: int) -> Family:
    """Layers that run several times in turn."""
    size = {**ENCODER_SIZE, "embedding_size": 16, "num_hidden_layers": times, "inner_group_num": layers_in_group}
    layers = "encoder.albert_layer_groups.0.albert_layers"
    return Family("AlbertModel", size, layers, Attention("attention.value", "attention.dense"))


def llama(model: str, head_width: int = HEAD_WIDTH, **settings: Any) -> Family:
    """A decoder whose code is derived from LLaMA's. Two query heads share one head of keys and values."""
    size = {**ENCODER_SIZE, "num_key_value_heads": 2, "head_dim": head_width}
    attention = Attention("self_attn.v_proj", "self_attn.o_proj", value_heads=2, head_width=head_width)
    inputs = barely_padded_tokens if "sliding_window" in settings else padded_tokens
    return Family(model, {**size, **settings}, "layers", attention, causal=True, norm="norm", inputs=inputs)


def vit(model: str) -> Family:
    """An encoder of image patches."""
    attention = Attention("attention.v_proj", "attention.o_proj")
    if BEFORE_5:
        attention = Attention("attention.attention.value", "attention.output.dense")
    layers = "encoder.layer" if BEFORE_5 else "layers"
    return Family(model, ENCODER_SIZE | IMAGE_SIZE, layers, attention, norm="layernorm", inputs=pixels, mask=None)


def encoder_of(model: str, size: dict[str, Any], layers: str, attention: Attention, **rest: Any) -> Family:
    """The encoder of an encoder-decoder model."""
    attention = replace(attention, weights="encoder_attentions")
    return Family(model, size, layers, attention, **{"inputs": padded_token_pairs, **rest})


def decoder_of(
    model: str, size: dict[str, Any], layers: str, attention: Attention, cross: Attention, **rest: Any
) -> Family:
    """The decoder of an encoder-decoder model, with two attentions in each layer."""
    attention = replace(attention, weights="decoder_attentions")
    cross = replace(cross, weights="cross_attentions")
    rest = {"inputs": padded_token_pairs, **rest}
    return Family(model, size, layers, attention, cross=cross, causal=True, mask="decoder_attention_mask", **rest)


FIRST_FAMILIES: dict[str, Family] = {
    "bert": bert("BertModel"),
    "roberta": bert("RobertaModel"),
    "electra": bert("ElectraModel", embedding_size=16),
    "distilbert": Family(
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48},
        "transformer.layer",
        Attention("attention.v_lin", "attention.out_lin"),
    ),
    "albert": albert(layers_in_group=1, times=3),
    "albert-two-in-turn": albert(layers_in_group=2, times=2),
    "modernbert": Family(
        "ModernBertModel",
        {**ENCODER_SIZE, "global_attn_every_n_layers": 2, "local_attention": 4, "attention_bias": True},
        "layers",
        Attention("attn.Wqkv", "attn.Wo", offset=2 * WIDTH),
        norm="final_norm",
        inputs=barely_padded_tokens,
    ),
    "gpt2": Family(
        "GPT2Model",
        ENCODER_SIZE,
        "h",
        Attention("attn.c_attn", "attn.c_proj", offset=2 * WIDTH),
        causal=True,
        norm="ln_f",
    ),
    "llama": llama("LlamaModel"),
    "mistral": llama("MistralModel", sliding_window=3),
    "gemma2": llama("Gemma2Model", head_width=6, query_pre_attn_scalar=6, attn_logit_softcapping=2.0, sliding_window=3),
    "qwen3": llama("Qwen3Model", head_width=6),
    "gpt-neox": Family(
        "GPTNeoXModel",
        ENCODER_SIZE,
        "layers",
        Attention("attention.query_key_value", "attention.dense", offset=2 * HEAD_WIDTH, stride=3 * HEAD_WIDTH),
        causal=True,
        norm="final_layer_norm",
    ),
    "opt": Family(
        "OPTModel",
        {**ENCODER_SIZE, "ffn_dim": 48, "word_embed_proj_dim": WIDTH},
        "decoder.layers",
        BART_ATTENTION,
        causal=True,
        norm="decoder.final_layer_norm",
    ),
    "phi": Family(
        "PhiModel",
        ENCODER_SIZE,
        "layers",
        Attention("self_attn.v_proj", "self_attn.dense"),
        causal=True,
        norm="final_layernorm",
    ),
    "vit": vit("ViTModel"),
}

FURTHER_FAMILIES: dict[str, Family] = {
    "deit": vit("DeiTModel"),
    "clip-text": Family(
        "CLIPTextModel",
        ENCODER_SIZE,
        "text_model.encoder.layers" if BEFORE_5 else "encoder.layers",
        BART_ATTENTION,
        causal=True,
        norm="text_model.final_layer_norm" if BEFORE_5 else "final_layer_norm",
    ),
    "clip-vision": Family(
        "CLIPVisionModel",
        ENCODER_SIZE | IMAGE_SIZE,
        "vision_model.encoder.layers" if BEFORE_5 else "encoder.layers",
        BART_ATTENTION,
        inputs=pixels,
        mask=None,
    ),
    "gemma3": llama("Gemma3TextModel", head_width=6, query_pre_attn_scalar=6, sliding_window=3),
    "starcoder2": llama("Starcoder2Model", sliding_window=3),
    "cohere": llama("CohereModel"),
    "olmo2": llama("Olmo2Model"),
    "stablelm": llama("StableLmModel"),
    "granite": llama("GraniteModel", attention_multiplier=0.5, residual_multiplier=0.7),
    "qwen2": llama("Qwen2Model"),
    "nemotron": llama("NemotronModel"),
    "gpt-oss": llama(
        "GptOssModel", num_local_experts=4, num_experts_per_tok=2, sliding_window=3, experts_implementation="eager"
    ),
    "wav2vec2": Family(
        "Wav2Vec2Model",
        ENCODER_SIZE | WAVE_SIZE,
        "encoder.layers",
        Attention("attention.v_proj", "attention.out_proj"),
        inputs=padded_waves,
    ),
}

SEQUENCE_TO_SEQUENCE: dict[str, Family] = {
    "bart-encoder": encoder_of("BartModel", SEQ2SEQ_SIZE, "encoder.layers", BART_ATTENTION),
    "bart-decoder": decoder_of("BartModel", SEQ2SEQ_SIZE, "decoder.layers", BART_ATTENTION, BART_CROSS),
    "t5-encoder": encoder_of("T5Model", T5_SIZE, "encoder.block", T5_ATTENTION, norm="encoder.final_layer_norm"),
    "t5-decoder": decoder_of(
        "T5Model", T5_SIZE, "decoder.block", T5_ATTENTION, T5_CROSS, norm="decoder.final_layer_norm"
    ),
    "whisper-encoder": encoder_of(
        "WhisperModel",
        WHISPER_SIZE,
        "encoder.layers",
        BART_ATTENTION,
        norm="encoder.layer_norm",
        inputs=spectrogram_and_tokens,
        mask=None,
    ),
    "whisper-decoder": decoder_of(
        "WhisperModel",
        WHISPER_SIZE,
        "decoder.layers",
        BART_ATTENTION,
        BART_CROSS,
        norm="decoder.layer_norm",
        inputs=spectrogram_and_tokens,
        source_mask=None,
    ),
}

FAMILIES: dict[str, Family] = FIRST_FAMILIES | FURTHER_FAMILIES | SEQUENCE_TO_SEQUENCE
