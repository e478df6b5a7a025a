"""Decoders with an encoder whose attention is BART's, but computed by their own code: LED, SpeechT5, TrOCR."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import EncoderDecoderCache

from ..._compat import CACHE_LENGTH, cache_in, takes_old_name
from ...attention.interface import attend_encoded, attend_shared
from ...attention.own_code import OwnCode
from ...errors import Unsupported


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `SpeechT5Attention.forward`: attention to a decoder's own tokens, or to the encoder's output."""
    if position_bias is not None or not isinstance(cache, EncoderDecoderCache):
        raise Unsupported(f"{type(module).__name__} biases its scores, or has no cache of a decoder")
    encoded = hidden_states if key_value_states is None else key_value_states

    def project() -> tuple[Tensor, Tensor]:
        return _heads(module, module.k_proj(encoded)), _heads(module, module.v_proj(encoded))

    query = _heads(module, module.q_proj(hidden_states))
    if key_value_states is None:
        kv, _ = cache.self_attention_cache.update(*project(), module.layer_idx)
        out = attend_shared(module, query, kv, scaling=module.scaling)
    else:
        out = attend_encoded(module, query, cache, attention_mask, scaling=module.scaling, project=project)
    return module.out_proj(out.flatten(2)), None


def attend_and_return_cache(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None, Any]:
    """Stands in for `LEDDecoderAttention.forward`."""
    out, weights = attend(module, *args, **kwargs)
    return out, weights, cache_in(kwargs)


def embed_slots(module: Any, shape: torch.Size, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for `LEDLearnedPositionalEmbedding.forward` where the cache's length is a tensor, as in a capture."""
    length = kwargs.get(CACHE_LENGTH, args[0] if args else 0)
    return F.embedding(length + torch.arange(shape[1], device=module.weight.device), module.weight)


def _heads(module: Any, projected: Tensor) -> Tensor:
    """``[rows, heads, tokens, head_dim]``."""
    return projected.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)


LED = OwnCode(
    {"LEDDecoderAttention": {"forward": attend_and_return_cache}},
    in_captures={"LEDLearnedPositionalEmbedding": {"forward": embed_slots}},
)
