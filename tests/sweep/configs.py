"""Tiny configs of any model type: numeric fields of the default config are shrunk by rules for their names."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.sweep.exceptions import EXCEPTIONS, RELEASED

WIDTH = 64
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS
LAYERS = 2
VOCABULARY = 128
IMAGE = 64
PATCH = 16

# (pattern of a field's name, its new value); the first match counts; lists are shrunk entry by entry.
RULES: list[tuple[str, Any]] = [
    (r"(^|_)(in_chan\w*|num_channels|channels|audio_channels|mask_input_channels|in_channels)$", lambda v: v),
    (r"type_vocab|kernel|stride|padding|dilation|ratio|factor|frequency|interval|_every_|_step$", lambda v: v),
    (r"vocab_size|num_embeddings$|codebook_size|n_words|additional_vocab", lambda v: min(v, VOCABULARY)),
    (r"position_embedding|max_position|n_positions|max_(source|target|seq)|max_length", lambda v: min(v, 512)),
    (r"image_size|^img_size|^input_size$|crop_size", lambda v: IMAGE if v > IMAGE else v),
    (r"patch_size", lambda v: PATCH if v > 8 else v),
    (r"window_size$", lambda v: 4 if v > 4 else v),
    (r"(^|_)(kv|key_value)_?heads|multi_query_group|num_key_value", lambda v: min(v, HEADS // 2)),
    (r"heads$|n_head$|attention_heads|heads_per_stage|^nhead$", lambda v: 1 << (min(v, HEADS).bit_length() - 1)),
    (r"experts?_per_tok|moe_k$|top_?k(_experts)?$|num_selected|moe_topk", lambda v: min(v, 2)),
    (r"shared_experts?$|n_group$|topk_group$|num_expert_group", lambda v: min(v, 1)),
    (r"experts?$|num_groups$", lambda v: min(v, 4)),
    (r"^(qk_)?(head_dim|nope_head_dim|d_kv|dim_head|kv_channels|v_head_dim|d_head|attention_head_dim)$", HEAD_WIDTH),
    (r"rope_head_dim|rotary_dim|latent_dim", lambda v: min(v, HEAD_WIDTH // 2)),
    (r"head_(dim|size)$", lambda v: min(v, HEAD_WIDTH)),
    (r"lora_rank|rank$", lambda v: min(v, HEAD_WIDTH)),
    (r"max_window_layers|first_k_dense|num_dense_layers|kv_shared_layers", lambda v: min(v, 1)),
    (r"^(n|num)_(feat_extract|feature|nextn)\w*", lambda v: v),
    (r"(layers?|^depths?|n_layer|num_blocks|blocks_per_stage|block_repeats)$", lambda v: min(v, LAYERS)),
    (r"quer(y|ies)(_tokens)?$|num_frames|context_length", lambda v: min(v, 8)),
    (r"intermediate|ffn|ff$|mlp_dim|linear_units|d_inner", lambda v: min(v, 96)),
    (r"chunk_size|block_size|window|context|sequence|_length|sampling|mel_bins|num_\w*_buckets", lambda v: v),
    (r"(size|dim|dims|width|channels|rank|n_embd|d_model|units|hidden|d_ff)$", lambda v: min(v, WIDTH)),
]
SPECIAL = re.compile(r"(token_id|token_index|_idx|_index|eos|bos|pad)$")
# The fields that a shallow model keeps.
WIDTHS = (
    r"^(?!.*(vocab|image_size))"
    r".*(size|dim|width|channels|rank|n_embd|d_model|units|hidden|d_ff|heads|n_head|ffn|d_kv|^d_|rope)"
)
KEPT = {"transformers_version", "id2label", "label2id", "torch_dtype", "dtype", "vision_feature_layer"}


def tiny_config(model_type: str, shallow: bool = False, released: str = "") -> PretrainedConfig:
    """The config of a small model of this type; `shallow` keeps all widths, `released` names an entry of RELEASED."""
    config_class = CONFIG_MAPPING[model_type]
    fields = _merged(_shrunk(config_class(), shallow), EXCEPTIONS.get(model_type, {}))
    return config_class(**fields | RELEASED.get(model_type, {}).get(released, {}))


def _merged(fields: dict[str, Any], exceptions: dict[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in exceptions.items():
        nested = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if nested else deepcopy(value)  # configs change their arguments
    return merged


def _shrunk(config: PretrainedConfig, shallow: bool) -> dict[str, Any]:
    """The fields of a config that change. Nested configs become dicts."""
    fields: dict[str, Any] = {}
    special = iter(range(VOCABULARY - 60, VOCABULARY))
    default = vars(config)
    stock = vars(type(config)())  # a nested config takes omitted fields from its own class
    for name, value in default.items():
        if name.startswith("_") or name in KEPT:
            continue
        if isinstance(value, PretrainedConfig):
            own = _merged(_shrunk(value, shallow), EXCEPTIONS.get(value.model_type, {}))
            fields[name] = {"model_type": value.model_type, **own}
        elif name in ("layer_types", "layers_block_type", "attention_layers") and isinstance(value, list):
            fields[name] = _kinds(value)
        elif SPECIAL.search(name) and isinstance(value, int) and value >= VOCABULARY:
            fields[name] = next(special)
        else:
            small = value if shallow and re.search(WIDTHS, name) else _shrink(name, value)
            if small != stock.get(name):
                fields[name] = small
    if not shallow:
        _keep_relations(default, fields)
    layers = fields.get("layer_types", fields.get("layers_block_type"))
    for name in ("num_hidden_layers", "num_layers", "n_layer"):
        if layers and name in default:
            fields[name] = len(layers)
    return fields


def _keep_relations(default: dict[str, Any], fields: dict[str, Any]) -> None:
    """Keep fields equal to others, or sums of others, if they are in the default config."""

    def was(name: str) -> Any:
        return default.get(name)

    def now(name: str) -> Any:
        return fields.get(name, default.get(name))

    for name in [name for name in default if "key_value_heads" in name or name == "num_kv_heads"]:
        heads = name.replace("key_value", "attention").replace("kv", "attention")
        if was(name) is not None and was(name) == was(heads):
            fields[name] = now(heads)
    if was("head_dim") is None and "head_dim" in default and "hidden_size" in default:
        fields["head_dim"] = HEAD_WIDTH
    rope, plain = was("qk_rope_head_dim"), was("qk_nope_head_dim")
    if rope and plain:
        for name in ("head_dim", "qk_head_dim"):
            if was(name) == rope:
                fields[name] = now("qk_rope_head_dim")
            elif was(name) == rope + plain:
                fields[name] = now("qk_rope_head_dim") + now("qk_nope_head_dim")
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(was(name), dict) and "mrope_section" in was(name):
            width = was("head_dim") or was("hidden_size") // was("num_attention_heads")
            sections = was(name)["mrope_section"]
            total = round(sum(sections) / width * now("head_dim")) if now("head_dim") else HEAD_WIDTH // 2
            quarter = total // 4
            fields[name] = {**was(name), "mrope_section": [total - 2 * quarter, quarter, quarter]}


def _kinds(layers: list[Any]) -> list[Any]:
    """Each kind of layer once, in the order of the config, and at least two layers."""
    kinds = list(dict.fromkeys(layers))
    return kinds if len(kinds) >= LAYERS else kinds * LAYERS


def _shrink(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and value and all(type(entry) is int for entry in value):
        return type(value)(_shrink(name, entry) for entry in value)
    if type(value) is not int:
        return value
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return rule(value) if callable(rule) else rule
    return value
