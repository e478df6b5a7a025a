"""A tiny config of any class: its defaults, with every size replaced by a small one that fits the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
FIRST_SPECIAL = 100
"""Ids from here on are those of images and the like; prompts take ids below."""
WINDOW = 24
"""Windows end inside the prompts."""

# The most that a number in a config may be, by the first pattern that matches its field's whole name.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_per_layer_input)?|num_embeddings", VOCABULARY),
    (r"qk_(rope|nope)_head_dim|rotary_dim", 8),
    (r"(.*_)?head_dim|d_head|d_kv|kv_channels|mamba_d_head|dim_head|query_pre_attn_scalar", 16),
    (r"hidden_size_per_layer_input|kv_lora_rank|laurel_rank|(.*_)?state_size|mamba_d_state", 16),
    (r"q_lora_rank|o_lora_rank", 32),
    (r"index_topk", 16),
    (r"mamba_n(um)?_heads|n_mamba_heads", 8),
    (r"linear_num_key_heads", 2),
    (r"(.*_)?num_(.*_)?heads?|(.*_)?attention_heads|(.*_)?n_heads?", 4),
    (r"(moe_)?num_(local_|routed_|moe_|conditional_)?experts|n_routed_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|router_top_k|moe_router_topk", 2),
    (r"(n|num_expert)_groups?|topk_group|mamba_n_groups|n_shared_experts|num_kv_shared_layers|max_window_layers", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|mlp_dim)|d_ff|n_inner|intermediate_size_mlp", 96),
    (r"(.*_)?(hidden_size|hidden_dim|embed_dim|embd|emb_dim|model_dim)|d_model|hidden_size_global|lru_width", 64),
    (r"(dim|output|projection|word_embed_proj)(_dim)?|embedding_size", 64),
    (r"num_feat_extract_layers", 7),
    (r"depth|(.*_)?layers?|num_blocks|resampler_depth", 2),
    (r"(.*_)?max_position_embeddings|n_positions|max_seq_len|max_sequence_length|model_max_length", 512),
    (r"(.*_)?num_query_tokens|num_latents|resampler_n_latents|latent_query_num", 8),
    (r"sliding_window(_size)?", WINDOW),
)
_LISTS: dict[str, list[int]] = {
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "global_attn_indexes": [1],
    "cross_attention_layers": [1],
}
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers")
# What transformers derives from other fields, or what says nothing about sizes.
_DERIVED = (
    *("transformers_version", "architectures", "model_type", "_name_or_path", "dtype", "per_layer_config"),
    "merged_hidden_size",
)


def shrunken(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """A tiny config of the class.

    Args:
        config_class: The class; its defaults say what it has.
        overrides: Fields that shall have these values; a mapping stands for a config inside.
    """
    fields = _shrunken(config_class().to_dict())
    return config_class(**_merged(fields, overrides))


def _merged(fields: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(fields)
    for name, value in overrides.items():
        inside = isinstance(value, Mapping) and isinstance(fields.get(name), dict)
        merged[name] = _merged(fields[name], value) if inside else value
    return merged


def _shrunken(fields: dict[str, Any]) -> dict[str, Any]:
    kept = _kept_layers(fields)
    total = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), None)
    ids = iter(range(FIRST_SPECIAL, VOCABULARY))
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _DERIVED:
            continue
        if isinstance(value, dict):
            small[name] = _shrunken(value) | {"model_type": value["model_type"]} if "model_type" in value else value
            if "mrope_section" in value:
                small[name] = value | {"mrope_section": [2, 3, 3]}
        elif name == "is_decoder":
            small[name] = not fields.get("is_encoder_decoder")
        elif name in TOKENS:
            small[name] = None if value is None else TOKENS[name]
        elif re.fullmatch(r".*_(token_id|token_index|id)", name) and type(value) is int:
            small[name] = next(ids)
        elif isinstance(value, list):
            small[name] = [value[index] for index in kept] if len(value) == total else _LISTS.get(name, value)
        elif name in _LAYERS and isinstance(value, int):
            small[name] = len(kept) if value == total else 2
        elif name.endswith("num_key_value_heads") and isinstance(value, int):
            heads = fields.get(name.replace("key_value", "attention"))
            small[name] = 4 if value == heads else min(value, 2)
        elif name == "head_dim" and value is not None and value == fields.get("qk_rope_head_dim"):
            small[name] = _small("qk_rope_head_dim", value)
        elif name == "head_dim" and value is None:
            small[name] = 16  # as hidden_size and num_attention_heads say, for classes that do not look
        elif name == "image_size" and isinstance(value, int) and isinstance(fields.get("patch_size"), int):
            small[name] = min(value, 4 * fields["patch_size"])
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _small(name, value)
        else:
            small[name] = value
    return small


def _small(name: str, value: int) -> int:
    bound = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)
    return min(value, bound)


def _kept_layers(fields: dict[str, Any]) -> list[int]:
    """Indices of layers that stay: one of each kind, and at least two.

    A kind is what the lists of the config that have an entry for each layer say of one.
    """
    total = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), 0)
    lists = [value for value in fields.values() if isinstance(value, list) and len(value) == total]
    firsts: dict[str, int] = {}
    for index in range(total):
        firsts.setdefault(repr([entry[index] for entry in lists]), index)
    kept = list(firsts.values())[:6]
    return sorted({*kept, *range(min(2, total))} if len(kept) < 2 else kept)
