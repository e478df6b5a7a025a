"""A tiny model of every architecture that has a slim form, and the configs that have none."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_fastdecode.conversion.to_slim import to_slim

from ..tiny_models import VOCABULARY
from .slim_models import TEXT, YARN

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
_GATED = {**_SIZES, "intermediate_size": 96, "num_key_value_heads": 4}
_LONGROPE = {  # of a head's 8 pairs of coordinates
    **{"rope_type": "longrope", "rope_theta": 10000.0},
    **{"short_factor": [1.0 + 0.1 * at for at in range(8)], "long_factor": [2.0 + at for at in range(8)]},
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_OPT = {**_SIZES, "ffn_dim": 96}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", _GATED),
    "phi3-window": ("phi3", {**_GATED, "sliding_window": 40}),
    "phi3-partial": ("phi3", {**_GATED, "partial_rotary_factor": 0.5}),
    "phi3-long": ("phi3", {**_GATED, "original_max_position_embeddings": 64, "rope_parameters": _LONGROPE}),
    "olmo": ("olmo", _GATED),
    "olmo2": ("olmo2", _GATED),
    "gpt_neox": ("gpt_neox", {**_SIZES, "intermediate_size": 96}),
    "gpt_neox-serial": (
        "gpt_neox",
        {**_SIZES, "intermediate_size": 96, "use_parallel_residual": False, "attention_bias": False},
    ),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-scaled": ("gpt2", {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "opt": ("opt", _OPT),
    "opt-350m": ("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32, "enable_bias": False}),
    "qwen2": ("qwen2", _GATED),
    "gemma": ("gemma", {**_GATED, "head_dim": 24}),  # 96 coordinates of keys for 64 inputs
    "cohere": ("cohere", _GATED),
    "cohere-norm": ("cohere", {**_GATED, "use_qk_norm": True}),
    "codegen": ("codegen", {**_GPT2, "n_head": 8, "rotary_dim": 4}),
    "stablelm": ("stablelm", _GATED),
    "stablelm-norm": (
        "stablelm",
        {**_GATED, "qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    ),
    "llama": ("llama", _GATED),
    "llama-yarn": ("llama", {**_GATED, "attention_bias": True, "rope_parameters": YARN}),
}
"""Name -> model type and config arguments."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2-long": ("qwen2", {"rope_parameters": _LONGROPE}, "RoPE of type 'longrope'"),
    "phi3-gqa": ("phi3", {"num_key_value_heads": 2}, "got 2 != 4"),
    "olmo-gqa": ("olmo", {"num_key_value_heads": 2}, "got 2 != 4"),
    "olmo-clipped": ("olmo", {"clip_qkv": 8.0}, r"clipped to 8 \(clip_qkv\)"),
    "olmo-clipped-to-zero": ("olmo", {"clip_qkv": 0.0}, r"clipped to 0 \(clip_qkv\)"),
    "olmo2-gqa": ("olmo2", {"num_key_value_heads": 2}, "got 2 != 4"),
    "gpt2-cross": ("gpt2", {"add_cross_attention": True}, "cross-attention"),
    "qwen2-gqa": ("qwen2", {"num_key_value_heads": 2}, "got 2 != 4"),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
        r"sliding window beside others \(use_sliding_window\)",
    ),
    "gemma-gqa": ("gemma", {"num_key_value_heads": 2}, "got 2 != 4"),
    "gemma-bidirectional": ("gemma", {"use_bidirectional_attention": True}, "bidirectional"),
    "cohere-gqa": ("cohere", {"num_key_value_heads": 2}, "got 2 != 4"),
    "stablelm-gqa": ("stablelm", {"num_key_value_heads": 2}, "got 2 != 4"),
}
"""Name -> name in `FAMILIES`, config arguments, reason."""

PLANS: dict[str, Any] = {"k": "k", "k+r": (("k+r", 4), ("k+r", 9)), "mixed": (("kv", 0), ("k+r", 8)), "x": "x"}

NOT_BY_KERNEL: list[tuple[str, str, dict[str, Any], str]] = [
    ("gpt2", "x", {}, "the layer caches inputs"),
    ("olmo2", "k", {}, "keys are normalised when they are read"),
    ("stablelm-norm", "k", {}, "keys are normalised when they are read"),
    ("codegen", "k", {}, "RoPE pairs neighbouring coordinates"),
    ("qwen2", "k+r", {"rope": "unrotate"}, "slim_rope is 'unrotate'"),
]
"""Names, plans and options of models whose layers `slim_decode` does not take, and the reasons."""

WITH_INPUTS = [name for name, (model_type, _) in FAMILIES.items() if model_type in ("gpt2", "opt")]
"""Those that may cache inputs, in the place of keys and values."""


def pairs(*plans: str) -> list[tuple[str, str]]:
    """Names in `FAMILIES`, each with the plans that the architecture can have."""
    return [(name, plan) for name in FAMILIES for plan in plans if plan != "x" or name in WITH_INPUTS]


def family_model(name: str, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode, none of whose biases and norms could be left out unnoticed."""
    model_type, arguments = FAMILIES[name]
    torch.manual_seed(0)
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **{**special, **arguments, **overrides})
    model = with_all_redrawn(AutoModelForCausalLM.from_config(config).eval())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def with_all_redrawn(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, with weights, biases and norms drawn anew."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() == 1 or "norm" in name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
            else:
                parameter.normal_(std=0.15)
    return model


@lru_cache
def family_pair(name: str, plan: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """An ordinary model in fp32 and its slim form; not to be changed."""
    model = family_model(name)
    return model, to_slim(model, TEXT, plan=PLANS[plan])


def family_condition(slim: PreTrainedModel) -> float:
    """The largest condition number of a slim layer's key projection."""
    projections = [one for name, one in slim.state_dict().items() if name.endswith(".k_proj.weight")]
    values = [torch.linalg.svdvals(one.double()) for one in projections]
    return max((one[0] / one[-1]).item() for one in values)
