"""What the names of a config's fields do not tell, a row for each model type that needs one."""

from __future__ import annotations

from typing import Any

# Rotary embeddings in three sections for heads of 16.
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
HALF_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
ONE_THAT_ATTENDS = {"layer_types": ["linear_attention", "full_attention"]}
FORECAST = {"prediction_length": 6, "context_length": 8}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": {**FORECAST, "label_length": 4},
    "bamba": {"attn_layer_indices": [1]},
    "clvp_encoder": {"num_attention_heads": 2},
    "donut-swin": {"image_size": 128},
    "deepseek_v2": EXPERTS,
    "dots1": {**EXPERTS, "moe_intermediate_size": 32},
    "esm": {"vocab_size": 128, "mask_token_id": 3, "pad_token_id": 1},
    "exaone4_5_vision": {"window_size": 64},
    "glm4v_moe_text": HALF_SECTIONS,
    "glm4v_text": SECTIONS,
    "glm_image_text": SECTIONS,
    "glm_ocr_text": SECTIONS,
    "granitemoehybrid": ONE_THAT_ATTENDS,
    "hunyuan_vl_text": SECTIONS,
    "informer": FORECAST,
    "gemma3n_text": {"intermediate_size": 96},
    "glm5_next": {"text_config": {"index_topk": 32}},
    "glm5_next_text": {"index_topk": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "llama4_vision_model": {"intermediate_size": 256},  # four tokens in one
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {"n_groups": 2},
    "paddleocr_vl_text": SECTIONS,
    "qwen2_5_vl": {"vision_config": {"window_size": 64}},
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_5_vl_vision": {"window_size": 64},
    "qwen2_vl_text": SECTIONS,
    "qwen2_5_omni_text": SECTIONS,
    "qwen2_5_omni_vision_encoder": {"window_size": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "sam_hq_vision_model": {"output_channels": 64, "num_pos_feats": 32},
    "sam_vision_model": {"output_channels": 64, "num_pos_feats": 32},
    "seggpt": {"image_size": [128, 64]},
    "step3p5": {"sliding_window": 4},
    "swin": {"image_size": 128},
    "swinv2": {"image_size": 128},
    "time_series_transformer": FORECAST,
    "vits": {"vocab_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 32},
}
