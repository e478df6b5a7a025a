"""Tiny Llama models with multi-head attention, and what they become."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim

from ..tiny_models import VOCABULARY, ragged_prompts, seeded, tiny_model

TEXT = torch.randint(3, VOCABULARY, (256,), generator=torch.Generator().manual_seed(5))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
PLANS: dict[str, Any] = {"k": "k", "k+r": (("k+r", 4), ("k+r", 9)), "mixed": (("kv", 0), ("k+r", 8)), "auto": "auto"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "wide-heads": {"head_dim": 24},  # 96 coordinates of keys for 64 inputs
}
PROMPTS = ragged_prompts(40, 31)
CALLS: dict[str, dict[str, Any]] = {
    "samples": {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 8},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 8},
    "beam-sample": {"num_beams": 3, "do_sample": True, "top_k": 0, "max_new_tokens": 8},
}


def tiny_variant(variant: str, **overrides: Any) -> PreTrainedModel:
    """An ordinary model in fp32, none of whose biases could be left out unnoticed."""
    model = tiny_model("llama-mha", **VARIANTS[variant], **overrides)
    if variant == "biases":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("_proj.bias"):
                    parameter.normal_(std=0.5)
    return model


@lru_cache
def pair(plan: str = "k+r", variant: str = "plain", rope: Any = "raw") -> tuple[PreTrainedModel, PreTrainedModel]:
    """An ordinary model in fp32 and its slim form; not to be changed."""
    model = tiny_variant(variant)
    return model, to_slim(model, TEXT, plan=PLANS[plan], rope=rope)


@lru_cache
def two_heads(plan: str = "k+r") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A Llama in fp32 and its slim form, not to be changed; interpreting takes time by the head."""
    model = tiny_model("llama-mha", num_attention_heads=2, num_key_value_heads=2)
    return model, to_slim(model, TEXT, plan=PLANS[plan])


def condition(model: PreTrainedModel) -> float:
    """The largest condition number of a layer's key projection."""
    values = [torch.linalg.svdvals(layer.self_attn.k_proj.weight.double()) for layer in model.model.layers]
    return max((one[0] / one[-1]).item() for one in values)


def relative(value: Tensor, oracle: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return (torch.linalg.norm(value.double() - oracle.double()) / torch.linalg.norm(oracle.double())).item()


ROWS = ragged_prompts(40, 9, 31)


def generate(model: PreTrainedModel, **options: Any) -> Any:
    """Greedy tokens of `ROWS`, and their logits."""
    settings = {"max_new_tokens": 10, "do_sample": False, **ROWS, **options}
    return seeded(lambda: model.generate(**settings, return_dict_in_generate=True, output_logits=True))


def logits(model: PreTrainedModel, cache: Any = None) -> Tensor:
    """Logits of a text in two parts, the second of which reads the first from the cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        return torch.cat([model(part[None], **{CACHE: cache}).logits for part in TEXT[:96].split(90)], 1)
