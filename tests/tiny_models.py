"""Tiny random models of every supported architecture, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
_LLAMA = {**_SIZES, "intermediate_size": 96}
_WINDOWED = {**_LLAMA, "num_key_value_heads": 2, "sliding_window": 40}
_ALTERNATING = {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("llama", {**_LLAMA, "num_key_value_heads": 4}),
    "llama-gqa": ("llama", {**_LLAMA, "num_key_value_heads": 2}),
    "llama-mqa": ("llama", {**_LLAMA, "num_key_value_heads": 1}),
    "mistral": ("mistral", {**_LLAMA, "num_key_value_heads": 2}),
    "qwen2": ("qwen2", {**_LLAMA, "num_key_value_heads": 2}),
    # The config makes of this a window of 0 tokens, which means none.
    "qwen2_moe": ("qwen2_moe", {**_LLAMA, **_EXPERTS, "num_key_value_heads": 2, "use_sliding_window": False}),
    "qwen3": ("qwen3", {**_LLAMA, "num_key_value_heads": 2, "head_dim": 32}),
    "gemma": ("gemma", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 32}),
    "phi3": ("phi3", {**_LLAMA, "num_key_value_heads": 2, "original_max_position_embeddings": 512}),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", {**_SIZES, "intermediate_size": 96}),
    "opt": ("opt", {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt_bigcode": ("gpt_bigcode", {**_GPT2, "multi_query": True}),
    "mistral-window": ("mistral", _WINDOWED),
    "mixtral-window": ("mixtral", {**_WINDOWED, "num_local_experts": 4}),
    "phi3-window": ("phi3", {**_WINDOWED, "original_max_position_embeddings": 512}),
    "qwen2-window": ("qwen2", {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-window": ("qwen3", {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 32}),
    "starcoder2": ("starcoder2", _WINDOWED),
    "cohere2": ("cohere2", _ALTERNATING),
    "gemma2": ("gemma2", {**_ALTERNATING, "head_dim": 32}),
    "gemma3_text": ("gemma3_text", {**_ALTERNATING, "head_dim": 32}),
    "olmo3": ("olmo3", _ALTERNATING),
    "gpt_oss": (
        "gpt_oss",
        {
            **_ALTERNATING,
            "head_dim": 16,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # Layers differ in KV heads, head_dim and window; in KV heads and window, with narrower values; in query heads.
    "gemma4_text": (
        "gemma4_text",
        {
            **_ALTERNATING,
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **_ALTERNATING,
            **{"num_key_value_heads": 1, "head_dim": 32, "v_head_dim": 16},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        },
    ),
    "laguna": ("laguna", {**_ALTERNATING, **_EXPERTS, "head_dim": 16, "num_attention_heads_per_layer": [8, 4]}),
}
"""Name -> model type and config arguments. docs/architectures.md lists these model types."""

ONE_OF_EACH_TYPE = list({model_type: name for name, (model_type, _) in ARCHITECTURES.items()}.values())
"""Names for tests of modules, which windows and numbers of heads do not change."""


def tiny_model(name: str = "llama-gqa", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode, with weights large enough that what it samples depends on the context."""
    model_type, arguments = ARCHITECTURES[name]
    return tiny_model_of_type(model_type, seed=seed, **{**arguments, **overrides})


def redrawn(model: PreTrainedModel, std: float) -> PreTrainedModel:
    """The model itself, with its matrices drawn anew, of this standard deviation."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)
    return model


def tiny_model_of_type(model_type: str, *, seed: int = 0, **arguments: Any) -> PreTrainedModel:
    """The same of any architecture, by its config's arguments."""
    torch.manual_seed(seed)
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, **{**special, **arguments})
    model = AutoModelForCausalLM.from_config(config).eval()
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # transformers 5.17 chooses sdpa, which leaves the soft cap out
    redrawn(model, 0.15)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # which else weigh nothing
                parameter.copy_(torch.linspace(-1, 3, len(parameter)))
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def ragged_prompts(*lengths: int, shared: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded random prompts of these lengths, of which the first `shared` tokens are the same in all."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    head = torch.randint(3, VOCABULARY, (shared,), generator=generator)
    input_ids = torch.zeros(len(lengths), width, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        own = torch.randint(3, VOCABULARY, (length - shared,), generator=generator)
        input_ids[row, width - length :] = torch.cat([head, own])
        attention_mask[row, width - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def seeded(run: Callable[[], Any], seed: int = 0) -> Any:
    """What `run` returns from a fixed state of torch's random generator."""
    torch.manual_seed(seed)
    return run()
