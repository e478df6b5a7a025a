"""Tiny mixtures of experts, a call that samples from them, and what their routers choose in a pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..tiny_models import ragged_prompts, seeded, tiny_model_of_type

WIDTH, SAMPLES, ENDS = 70, 3, list(range(3, 10))
PROMPTS = ragged_prompts(WIDTH, 60, shared=40)
CALL = {
    **{"return_dict_in_generate": True, "output_router_choices": True, "max_new_tokens": 12},
    **{"do_sample": True, "eos_token_id": ENDS, "num_return_sequences": SAMPLES},
}
_SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"intermediate_size": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16},
    **{"max_position_embeddings": 512, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8},
}
_LATENTS = {
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16},
    **{"n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 4, "topk_group": 2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"decoder_sparse_step": 1, "norm_topk_prob": True},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v2": {**_LATENTS, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENTS, "q_lora_rank": 64},
}


def mixture(family: str = "qwen3_moe", **overrides: Any) -> PreTrainedModel:
    return tiny_model_of_type(family, **{**_SIZES, **FAMILIES.get(family, {}), **overrides})


def sampled(model: PreTrainedModel, **arguments: Any) -> Any:
    return seeded(lambda: model.generate(**PROMPTS, **CALL | arguments))


def rows_of(sequences: Tensor) -> dict[str, Tensor]:
    """Rows as a trainer gives them to a model."""
    tokens = sequences[:, WIDTH:]
    ends = torch.isin(tokens, torch.tensor(ENDS)).long()
    prompts = PROMPTS["attention_mask"].repeat_interleave(SAMPLES, 0)
    return {"input_ids": sequences, "attention_mask": torch.cat([prompts, (ends.cumsum(1) == ends).long()], 1)}


def routers_in(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def chosen_in(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    """What routers choose in a pass of a model that is not enabled: ``[rows, width, layers, experts_per_token]``."""
    found: list[Tensor] = []
    hooks = [one.register_forward_hook(lambda _, __, output: found.append(output[-1])) for one in routers_in(model)]
    with torch.no_grad():
        model(**rows)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).unflatten(0, rows["input_ids"].shape)
