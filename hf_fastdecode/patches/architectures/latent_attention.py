"""Multi-head latent attention: DeepSeek-V2 and V3, and those that follow them.

Their attention makes keys and values of all latents that ``update`` returns, by ``expand_kv``. Passes of prefill get
keys and values that `LatentStorage` has made. In steps, each head's query takes in the product that would make its
keys of latents, and the mean of the latents that it sees becomes that of its values (DeepSeek-V2, section 2.1.2).
Nodes that are expanded are attended to by the query as it is, and merged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._compat import local_part
from ...attention.kv import Partial, Scoring, SharedKV
from ...attention.overrides import OwnCode
from ...cache.layers.latent import multiplying


class _OfLatents(SharedKV):
    """Keys and values of a layer, which are made of latents or read as such.

    Attributes:
        absorbed: Queries that have taken in the product, where who attends has made them; else None.
    """

    absorbed: Tensor | None = None

    def __init__(self, kv: SharedKV, module: Any):
        self._kv, self._module = kv, module
        self.stored_window, self.device = kv.stored_window, kv.device

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        module = self._module
        if not self._kv.reads_latents:
            query = F.pad(query, (0, max(0, module.v_head_dim - query.shape[-1])))  # keys are as wide as values
            return self._kv.attend(query, scoring)[..., : module.v_head_dim]
        rows, _, queries, _ = query.shape
        widths = [module.qk_nope_head_dim, module.v_head_dim]
        weight, bias = _weight_and_bias(module, query)
        to_keys, to_values = weight.unflatten(0, (-1, sum(widths))).split(widths, 1)  # [heads, width, latent]
        plain, rotated = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
        if (absorbed := self.absorbed) is None:
            absorbed = torch.bmm(plain.transpose(0, 1).flatten(1, 2), to_keys)  # [heads, rows * queries, latent]
            absorbed = torch.cat([absorbed.unflatten(1, (rows, queries)).transpose(0, 1), rotated], -1)
        nodes, stored = self._kv.expanded, None
        if nodes is None:
            mean = self._kv.attend(absorbed, scoring)  # [rows, queries, heads, latent]
        else:
            stored = self._kv.attend_as_stored(absorbed, scoring)
            mean = stored.out.transpose(1, 2)
        out = _by_heads(mean.flatten(0, 1), to_values.mT)
        lse = None if stored is None else stored.lse
        if bias is not None:  # of keys, it moves all scores of a query alike, which changes none of its weights
            of_keys, of_values = bias.unflatten(0, (-1, sum(widths))).split(widths, 1)
            out = out + of_values
            if lse is not None:  # but those of expanded nodes have it
                lse = lse + scoring.scale * (plain.float() @ of_keys.float()[..., None])[..., 0]
        out = out.unflatten(0, (rows, queries))
        if nodes is None or lse is None:
            return out
        return nodes.attend(query, scoring, Partial(out.transpose(1, 2), lse)).transpose(1, 2)


def _by_heads(x: Tensor, weights: Tensor) -> Tensor:
    """Products of each head, ``[tokens, heads, width]`` by ``[heads, width, columns]``, contiguous without a copy."""
    if torch.is_grad_enabled():  # which operators with memory for their result refuse
        return torch.bmm(x.transpose(0, 1), weights).transpose(0, 1)
    out = x.new_empty(*x.shape[:2], weights.shape[-1])
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
    return out


def _weight_and_bias(module: Any, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """From latents to keys and values of this process's heads: ``[heads * (key + value), latent]``, and a bias."""
    projection = module.kv_b_proj
    hooks = projection._forward_hooks or projection._forward_pre_hooks or "forward" in vars(projection)
    if type(projection) is nn.Linear and not hooks:
        weight, bias = local_part(projection.weight).to(like.dtype), projection.bias
        return weight, None if bias is None else local_part(bias).to(like.dtype)
    # What another module computes, such as one with an adapter, or with weights that are quantized or elsewhere.
    unit = torch.eye(module.kv_lora_rank, dtype=like.dtype, device=like.device)
    with multiplying(projection, unit):
        made: Tensor = projection(F.pad(unit, (0, 0, 0, 1))).to(like.dtype)
    of_zeros = made[-1]
    return (made[:-1] - of_zeros).mT, of_zeros


def expand(module: Any, latents: Any, rotated: Any) -> tuple[Any, Any]:
    if not isinstance(latents, SharedKV):  # a pass without a cache
        keys, values = type(module).expand_kv(module, latents, rotated)
        return keys, values
    kv = _OfLatents(latents, module)
    return kv, kv


LATENT_ATTENTION = {
    folder: OwnCode({attention: {"expand_kv": expand}})
    for folder, attention in {
        "axk1": "AXK1Attention",
        "bailing_hybrid": "BailingHybridAttention",
        "deepseek_v2": "DeepseekV2Attention",
        "deepseek_v3": "DeepseekV3Attention",
        "glm4_moe_lite": "Glm4MoeLiteAttention",
        "kimi_linear": "KimiLinearAttention",
        "longcat_flash": "LongcatFlashMLA",
        "minicpm3": "MiniCPM3Attention",
        "mistral4": "Mistral4Attention",
        "youtu": "YoutuAttention",
    }.items()
}
"""Overrides by folder of ``transformers.models``."""
