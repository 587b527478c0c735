"""Fields that the rules of `configs` shrink wrongly, by model type."""

from __future__ import annotations

from typing import Any

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Rotary embeddings in three sections, for heads of 16 features.
SECTIONS = {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [4, 2, 2]}}
HALF_SECTIONS = {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
ONE_THAT_ATTENDS = {"layer_types": ["linear_attention", "full_attention"]}
KINDS = ["sliding_attention", "full_attention"]
VALUES_OF_LOWER_LAYERS = {
    "layer_types": KINDS * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 4,
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
WITHOUT_TIMM = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": RESNET,
}
LAST_THREE = {"out_features": ["stage2", "stage3", "stage4"]}
THREE_SCALES = {
    "encoder_in_channels": [32, 48, 64],
    "backbone_config": {**RESNET, **LAST_THREE, "model_type": "rt_detr_resnet"},
}
FORECAST = {"prediction_length": 6, "context_length": 8}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "autoformer": {**FORECAST, "label_length": 4},
    "bamba": {"attn_layer_indices": [1]},
    "clvp_encoder": {"num_attention_heads": 2},
    "cohere_compass_text": {"layer_types": KINDS, "rope_parameters": dict.fromkeys(KINDS, DEFAULT_ROPE)},
    "conditional_detr": WITHOUT_TIMM,
    "csm": {"codec_config": {"upsample_groups": 64}},
    "cvt": {"depth": [1, 2, 3], "embed_dim": [32, 48, 64], "num_heads": [1, 3, 4]},
    "dab-detr": WITHOUT_TIMM,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": EXPERTS,
    "deformable_detr": {**WITHOUT_TIMM, "backbone_config": {**RESNET, **LAST_THREE}},
    "detr": WITHOUT_TIMM,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "donut-swin": {"image_size": 128},
    "dots1": {**EXPERTS, "moe_intermediate_size": 32},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [2, 2, 4]}}},
    "esm": {"vocab_size": 128, "mask_token_id": 3, "pad_token_id": 1},
    "exaone4_5_vision": {"window_size": 64},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n_text": {**VALUES_OF_LOWER_LAYERS, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**VALUES_OF_LOWER_LAYERS, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128},
    "glm4v_moe_text": HALF_SECTIONS,
    "glm4v_text": SECTIONS,
    "glm5_next": {"text_config": {"index_topk": 32}},
    "glm5_next_text": {"index_topk": 32},
    "glm_image_text": SECTIONS,
    "glm_ocr_text": SECTIONS,
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "granitemoehybrid": ONE_THAT_ATTENDS,
    "hunyuan_vl_text": SECTIONS,
    "informer": FORECAST,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 96},
    "llama4_vision_model": {"intermediate_size": 256},  # four tokens in one
    "longformer": {"attention_window": [4, 4]},
    "longt5": {"local_radius": 2},
    "mistral_large4_text": {"kv_source_layers": [0, 0]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "nemotron_h": {"n_groups": 2},
    "paddleocr_vl_text": SECTIONS,
    "patchtsmixer": {"context_length": 32},
    "perceiver": {"num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2},
    "qwen2_5_omni_text": SECTIONS,
    "qwen2_5_omni_vision_encoder": {"window_size": 64},
    "qwen2_5_vl": {"vision_config": {"window_size": 64}},
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_5_vl_vision": {"window_size": 64},
    "qwen2_vl_text": SECTIONS,
    "qwen4_exp_text": {
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rt_detr": THREE_SCALES,
    "rt_detr_v2": THREE_SCALES,
    "sam2_hiera_det_model": {
        "hidden_size": 32,
        "embed_dim_per_stage": [32, 64, 128, 256],
        "blocks_per_stage": [1, 2, 2, 1],
        "window_size_per_stage": [8, 4, 4, 2],
        "global_attention_blocks": [4],
    },
    "sam_hq_vision_model": {"output_channels": 64, "num_pos_feats": 32},
    "sam_vision_model": {"output_channels": 64, "num_pos_feats": 32},
    "seggpt": {"image_size": [128, 64]},
    "step3p5": {"sliding_window": 4},
    "swin": {"image_size": 128},
    "swinv2": {"image_size": 128},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "table-transformer": WITHOUT_TIMM,
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

RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
SHARED = {**RELATIVE, "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
# Settings of released models that are not the default of their type: model type -> name -> fields.
RELEASED: dict[str, dict[str, dict[str, Any]]] = {
    "deberta": {"relative attention": RELATIVE},
    "deberta-v2": {"relative attention": SHARED},
}
