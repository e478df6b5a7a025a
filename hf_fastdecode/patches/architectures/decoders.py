"""Decoders whose attention code computes with cached keys itself, and text models with other code beside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import CACHE, cache_in, takes_old_name, with_cache
from ...attention.interface import attend_shared, positions_of_pass, shared_context_attention
from ...attention.kv import SharedKV
from ...attention.overrides import Method, OwnCode
from ...cache.layers.cross import ImageView
from .encoder_decoders import embed_positions, project_heads


@takes_old_name
def attend_bert(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    cache: Any = None,
    output_attentions: bool = False,
    sinusoidal_pos: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Overrides `forward` of layers of BERT's shape without cross attention: RemBERT, BigBird, RoFormer...

    BigBird decodes with full attention, whatever its config asks for; a model makes these layers in its first pass, so
    that its first call runs stock. RoFormer rotates keys, and by its config values, at positions that begin at the
    cache's length.
    """
    query, key, value = project_heads(
        hidden_states, module.attention_head_size, module.query, module.key, module.value
    )
    if sinusoidal_pos is not None:
        angles = sinusoidal_pos[0, 0][:, None]  # [rows or 1, 1, tokens, head_dim], see `embed_positions`
        if module.rotary_value:
            query, key, value = module.apply_rotary_position_embeddings(angles, query, key, value)
        else:
            query, key = module.apply_rotary_position_embeddings(angles, query, key)
    kv, _ = cache.update(key, value, module.layer_idx)
    return attend_shared(module, query, kv, scaling=module.attention_head_size**-0.5).flatten(2), None


def attend_gpt2(module: Any, query: Tensor, key: SharedKV, value: Any, mask: Any = None) -> tuple[Tensor, None]:
    """Overrides `_attn`, which returns ``[rows, heads, tokens, head_dim]``."""
    return attend_shared(module, query, key, scaling=query.shape[-1] ** -0.5).transpose(1, 2), None


def attend_imagegpt(module: Any, query: Tensor, key: SharedKV, value: Any, mask: Any = None) -> tuple[Tensor, None]:
    """Overrides `ImageGPTAttention._attn`, of which the config chooses the scale."""
    scale = query.shape[-1] ** -0.5 if module.scale_attn_weights else 1.0
    if module.scale_attn_by_inverse_layer_idx:
        scale /= module.layer_idx + 1
    return attend_shared(module, query, key, scaling=scale).transpose(1, 2), None


def attend_gpt_neo(module: Any, query: Tensor, key: SharedKV, value: Any, mask: Any = None) -> tuple[Tensor, None]:
    """Overrides `GPTNeoSelfAttention._attn`, which returns ``[rows, heads, tokens, head_dim]``.

    Local layers have a window of slots, for which it takes no mask; scores are not scaled.
    """
    window = module.config.window_size if module.attention_type == "local" else None
    return attend_shared(module, query, key, scaling=1.0, window=window).transpose(1, 2), None


@takes_old_name
def attend_jetmoe(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_embeddings: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None, Tensor]:
    """Overrides `JetMoeAttention.forward`: each token's experts have their queries, all over the same KV heads.

    It repeats keys and values once for each expert of a token before it calls the interface.
    """
    query, router_logits, topology = module.experts.map(hidden_states)
    key, value = module.kv_proj(hidden_states).chunk(2, -1)
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (part.view(heads).transpose(1, 2) for part in (query, key, value))
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    kv, _ = cache.update(key, value, module.layer_idx)
    # Head `expert * kv_heads + i` reads KV head `i`; operators expect the queries of a KV head side by side.
    grouped = query.unflatten(1, (module.top_k, -1)).transpose(1, 2).flatten(1, 2)
    out = attend_shared(module, grouped, kv, scaling=module.scaling)  # [rows, tokens, heads, head_dim]
    of_experts = out.unflatten(2, (-1, module.top_k)).transpose(2, 3).flatten(3)  # [rows, tokens, experts, width]
    reduced = module.experts.reduce(of_experts, topology)
    return reduced.view(*hidden_states.shape[:-1], -1), None, router_logits


@takes_old_name
def attend_diffllama(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Overrides `DiffLlamaAttention.forward`: each head attends to two values (Ye et al. 2024, eq. 1).

    They are those of a KV head in either half of the KV heads. It calls the interface twice, each time with the keys
    of all KV heads and half of the values, repeated. Here the two values of a KV head are cached side by side, and
    read by one call. Keys get as many zeros: kernels of captured steps take keys and values of one width.
    """
    query, key, value = project_heads(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    both = torch.cat(value.chunk(2, 1), -1).repeat(1, 2, 1, 1)  # [rows, kv_heads, tokens, 2 * head_dim]
    query, key = (F.pad(part, (0, module.head_dim)) for part in (query, key))
    kv, _ = cache.update(key, both, module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.scaling)  # [rows, tokens, heads, 2 * head_dim]
    minuend, subtrahend = out.chunk(2, 2)
    first, second = (
        torch.exp((one * other).sum(-1, dtype=torch.float32)).to(query.dtype)
        for one, other in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    )
    difference = minuend - (first - second + module.lambda_init) * subtrahend
    normed = (1 - module.lambda_init) * module.groupnorm(difference)
    return module.o_proj(normed.flatten(2)), None


def attend_llama4(
    module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Overrides `Llama4TextAttention.forward`, which scales queries of layers without RoPE by their position.

    It counts from the length of the cache. That is the position of a token in a row without padding, but not in a pass
    that several prompts share.
    """
    cache = args[0] if args else cache_in(kwargs)
    if module.use_rope or not module.attn_temperature_tuning:
        out: tuple[Tensor, Tensor | None] = type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, **with_cache(kwargs, cache)
        )
        return out
    query, key, value = project_heads(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    steps = torch.floor((positions_of_pass().float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0  # [rows or 1, tokens]
    query = (query * scales[:, None, :, None]).to(query.dtype)
    kv, _ = cache.update(key, value, module.layer_idx)
    attended, _ = shared_context_attention(module, query, kv, kv, attention_mask, module.scaling)
    return module.o_proj(attended.flatten(2)), None


class _WithoutImages:
    """A shared-context cache of text, or what stands for one in a capture, in whose layers of `images` is nothing."""

    layers = ()

    def __init__(self, cache: Any, images: Any):
        self._cache, self._images = cache, frozenset(images)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return 0 if layer_idx in self._images else int(self._cache.get_seq_length())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def run_mllama(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Overrides `MllamaTextModel.forward`, which its callers hand the cache by name.

    It looks for images among the keys of all layers. Cross-attention layers find images where the cache holds some,
    and do not run where it holds none. With text alone the keys are those of a cache that seems to have no layers.
    """
    cache = cache_in(kwargs)
    if isinstance(cache, ImageView):
        return type(module).forward(module, *args, **kwargs)
    output = type(module).forward(
        module, *args, **kwargs | {CACHE: _WithoutImages(cache, module.cross_attention_layers)}
    )
    output[CACHE] = cache
    return output


def gaussian_topk(module: Any, inputs: Tensor) -> Tensor:
    """Overrides `Gemma3nTextMLP._gaussian_topk`: the largest of ``[..., inputs]`` above a quantile, else 0.

    It copies its share of zeros to the device in every pass, which no CUDA graph can hold.
    """
    mean, deviation = inputs.mean(-1, keepdim=True), inputs.std(-1, keepdim=True, unbiased=False)
    return F.relu(inputs - (mean + deviation * _quantile(module.activation_sparsity, inputs.dtype)))


@cache
def _quantile(share: float, dtype: torch.dtype) -> float:
    """The quantile of the normal distribution below which this share lies, as rounded by transformers."""
    exact = torch.distributions.Normal(0, 1).icdf(torch.tensor(share, dtype=torch.float32, device="cpu"))
    return float(exact.to(dtype))


def no_mask(module: Any, *args: Any, **kwargs: Any) -> None:
    """Overrides `Kosmos2TextTransformer._prepare_decoder_attention_mask`, which is causal and hides padding."""


def _of_kosmos(overrides: Mapping[str, Mapping[str, Method]]) -> OwnCode:
    return OwnCode(
        overrides,
        places_tokens=True,
        not_captured="it derives positions from the length of the cache, which a graph would keep",
    )


_BERT = {
    "big_bird": "BigBirdSelfAttention",
    "blip": "BlipTextSelfAttention",
    "megatron_bert": "MegatronBertSelfAttention",
    "rembert": "RemBertSelfAttention",
}

DECODERS = {
    **{folder: OwnCode({name: {"forward": attend_bert}}, reads_masks=True) for folder, name in _BERT.items()},
    "bark": OwnCode({"BarkSelfAttention": {"_attn": attend_gpt2}}),
    "diffllama": OwnCode(
        {"DiffLlamaAttention": {"forward": attend_diffllama}}, widths=lambda config, key, value: (2 * key, 2 * value)
    ),
    "gemma3n": OwnCode({"Gemma3nTextMLP": {"_gaussian_topk": gaussian_topk}}),
    "gpt_neo": OwnCode({"GPTNeoSelfAttention": {"_attn": attend_gpt_neo}}, reads_masks=True),
    "gpt_neox_japanese": OwnCode({"GPTNeoXJapaneseAttention": {"_attn": attend_gpt2}}, reads_masks=True),
    "imagegpt": OwnCode(
        {"ImageGPTAttention": {"_attn": attend_imagegpt, "_upcast_and_reordered_attn": attend_imagegpt}}
    ),
    "jetmoe": OwnCode(
        {"JetMoeAttention": {"forward": attend_jetmoe}},
        not_captured="the host reads how many tokens each of its experts gets (JetMoeTopKGating)",
    ),
    "kosmos2": _of_kosmos({"Kosmos2TextTransformer": {"_prepare_decoder_attention_mask": no_mask}}),
    "kosmos2_5": _of_kosmos({}),
    "llama4": OwnCode(
        {"Llama4TextAttention": {"forward": attend_llama4}},
        scales_from=lambda config: int(config.floor_scale) if config.attn_temperature_tuning else None,
    ),
    "mllama": OwnCode({"MllamaTextModel": {"forward": run_mllama}}, image_mask="cross_attention_mask"),
    "roformer": OwnCode(
        {
            "RoFormerSelfAttention": {"forward": attend_bert},
            "RoFormerSinusoidalPositionalEmbedding": {"forward": embed_positions},
        },
        reads_masks=True,
        counts_padding=True,
    ),
}
"""Overrides by folder of ``transformers.models``."""
