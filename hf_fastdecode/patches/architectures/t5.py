"""T5 and its relatives: biases by distance, which their attention makes over all slots of the cache.

They are made once per distance here, by the module's own code, and added to the scores of self-attention. Biases of
cross-attention are zeros. transformers rounds biases to the model's dtype; here they are added in fp32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._compat import takes_old_name
from ...attention.interface import attend_encoded, attend_shared
from ...attention.own_code import OwnCode
from ...errors import Unsupported


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    mask: Any = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Stands in for `T5Attention.forward`, whose first layer makes the biases of all."""
    if key_value_states is not None:
        return _cross(module, hidden_states, key_value_states, cache, mask), None, None
    if position_bias is None and module.has_relative_attention_bias:
        position_bias = biases_by_distance(module)
    return _self(module, hidden_states, cache, position_bias), position_bias, None


@takes_old_name
def attend_with_own_biases(
    module: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `UMT5Attention.forward`, where each layer has biases of its own."""
    if encoder_hidden_states is not None:
        return _cross(module, hidden_states, encoder_hidden_states, cache, attention_mask), None
    return _self(module, hidden_states, cache, biases_by_distance(module)), None


def biases_by_distance(module: Any) -> Tensor:
    """``[heads, distances]`` fp32, up to the distance from which all have one bias."""
    farthest = module.relative_attention_max_distance
    return module.compute_bias(1, farthest + 1, past_seen_tokens=farthest)[0, :, 0].flip(-1).float().contiguous()


def _self(module: Any, hidden_states: Tensor, cache: Any, biases: Tensor | None) -> Tensor:
    if hidden_states.shape[1] > 1 and not getattr(module, "is_causal", True):  # of UMT5 before transformers 5.24
        raise Unsupported(f"{type(module).__name__} does not attend causally (is_causal=False)")
    query, key, value = (_heads(module, part(hidden_states)) for part in (module.q, module.k, module.v))
    kv, _ = cache.self_attention_cache.update(key, value, module.layer_idx)
    return module.o(attend_shared(module, query, kv, scaling=module.scaling, distances=biases).flatten(2))


def _cross(module: Any, hidden_states: Tensor, encoded: Tensor, cache: Any, mask: Any) -> Tensor:
    query = _heads(module, module.q(hidden_states))
    out = attend_encoded(
        module,
        query,
        cache,
        mask,
        scaling=module.scaling,
        project=lambda: (_heads(module, module.k(encoded)), _heads(module, module.v(encoded))),
    )
    return module.o(out.flatten(2))


def _heads(module: Any, projected: Tensor) -> Tensor:
    """``[rows, heads, tokens, head_dim]``."""
    return projected.unflatten(-1, (-1, module.key_value_proj_dim)).transpose(1, 2)


def _of(name: str) -> OwnCode:
    return OwnCode({name: {"forward": attend}}, counts_hidden=True, adds_biases=True)


T5_FAMILY = {
    "longt5": _of("LongT5Attention"),
    "mt5": _of("MT5Attention"),
    "switch_transformers": _of("SwitchTransformersAttention"),
    "t5": _of("T5Attention"),
    "umt5": OwnCode({"UMT5Attention": {"forward": attend_with_own_biases}}, counts_hidden=True, adds_biases=True),
}
