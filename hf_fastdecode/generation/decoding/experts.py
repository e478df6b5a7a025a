"""Mixtures of experts in decode steps: which of transformers' implementations they run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from ..._compat import optimized_for_decode

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configs: experts of a layer."""


def decode_context(model: PreTrainedModel, rows: int) -> AbstractContextManager[None]:
    """transformers' context of decode steps, except where it would slow down steps of many rows.

    In its context the experts run by ``batched_mm``, which first copies the weights of each row's experts, and is for
    few rows. Outside of it they run by ``grouped_mm``, which reads the weights of each chosen expert once. From as
    many pairs of row and expert as there are experts, the copies are several times what all experts have. fp32 models
    keep the context, so that they compute what stock computes.
    """
    config = model.config.get_text_config(decoder=True)
    chosen = getattr(config, "num_experts_per_tok", None) or 0
    experts = next((count for name in _COUNTS if (count := getattr(config, name, None))), None)
    half = model.dtype in (torch.float16, torch.bfloat16)
    if half and experts is not None and rows * chosen >= experts:
        return nullcontext()
    return optimized_for_decode(model)
