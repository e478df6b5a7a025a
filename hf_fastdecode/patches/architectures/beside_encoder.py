"""Decoders with an encoder whose attention is BART's, but computed by their own code: LED, SpeechT5, TrOCR."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import EncoderDecoderCache

from ...attention.interface import shared_context_attention
from ...attention.own_code import OwnCode
from ...attention.placeholders import SharedKV
from ...attention.stand_in_calls import attend_shared
from ...errors import Unsupported


def attend(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `SpeechT5Attention.forward`: attention to a decoder's own tokens, or to the encoder's output."""
    cache, layer = past_key_values if cache is None else cache, module.layer_idx
    if position_bias is not None or not isinstance(cache, EncoderDecoderCache):
        raise Unsupported(f"{type(module).__name__} biases its scores, or has no cache of a decoder")
    query = _heads(module, module.q_proj(hidden_states))
    if key_value_states is None:
        parts = (_heads(module, projection(hidden_states)) for projection in (module.k_proj, module.v_proj))
        kv, _ = cache.self_attention_cache.update(*parts, layer)
        out = attend_shared(module, query, kv, scaling=module.scaling)
    else:
        stored = cache.cross_attention_cache
        kv = stored.layers[layer].keys
        if not cache.is_updated.get(layer):
            parts = (_heads(module, projection(key_value_states)) for projection in (module.k_proj, module.v_proj))
            kv, _ = stored.update(*parts, layer)
            cache.is_updated[layer] = True
        out = _cross(module, query, kv, attention_mask)
    return module.out_proj(out.flatten(2)), None


def attend_and_return_cache(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None, Any]:
    """Stands in for `LEDDecoderAttention.forward`."""
    out, weights = attend(module, *args, **kwargs)
    return out, weights, kwargs.get("cache", kwargs.get("past_key_values"))


def _cross(module: Any, query: Tensor, kv: SharedKV, mask: Any) -> Tensor:
    out, _ = shared_context_attention(module, query, kv, kv, mask, module.scaling)
    return out


def _heads(module: Any, projected: Tensor) -> Tensor:
    """``[rows, heads, tokens, head_dim]``."""
    return projected.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)


LED = OwnCode({"LEDDecoderAttention": {"forward": attend_and_return_cache}})
SPEECHT5 = OwnCode({"SpeechT5Attention": {"forward": attend}})
