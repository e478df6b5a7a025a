"""MiniMax: lightning attention has its states in a class of cache that `MiniMaxModel.forward` alone accepts.

transformers leaves these states in place when beams are reordered. Here they follow their rows, so that beams are
those of ``use_cache=False``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._compat import cache_in, with_cache
from ...attention.own_code import OwnCode, OwnStates


class _LightningStates:
    """What `MiniMaxLightningAttention.forward` asks of `MiniMaxCache`, answered by a shared-context cache."""

    def __init__(self, cache: Any):
        self._layers = cache.layers

    def get_linear_cache(self, layer: int) -> Tensor | None:
        """The rows' state of a layer, ``[rows, heads, head_dim, head_dim]``; None before their first token."""
        states = self._layers[layer].kept_states
        return None if states is None else states[0]

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        """Store the rows' state after a pass."""
        self._layers[layer].keep_states((state,))


def attend(module: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Stands in for `MiniMaxLightningAttention.forward`, which continues from a state token by token only."""
    states = _LightningStates(cache_in(kwargs))
    state = states.get_linear_cache(module.layer_idx)
    if state is not None and hidden_states.shape[1] > 1:
        out, state = _continue(module, hidden_states, kwargs.get("attention_mask"), state)
        states.set_linear_cache(module.layer_idx, state)
        return out, state
    return type(module).forward(module, hidden_states, **with_cache(kwargs, states))


def _continue(module: Any, hidden_states: Tensor, mask: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Lightning attention of ``[rows, tokens, hidden]`` behind a state, and the state after it.

    Blocks of tokens are computed at once, as the module does from an empty state (Qin et al. 2024, algorithm 1).
    """
    mixed = module.act_fn(module.qkv_proj(hidden_states))
    if mask is not None:
        mixed = (mixed * mask[:, :, None]).to(mixed.dtype)
    of_heads = mixed.unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2)
    parts = (part.split(module.block_size, 2) for part in of_heads.split(module.head_dim, -1))
    blocks = []
    for query, key, value in zip(*parts, strict=True):  # [rows, heads, tokens, head_dim]
        size = query.shape[2]
        scores = (query @ key.mT) * module.diagonal_decay[:, :, :size, :size]
        blocks.append((query * module.query_decay[:, :size]) @ state + scores @ value)
        state = state * torch.exp(-module.slope_rate * size) + (key * module.key_decay[:, -size:]).mT @ value
    normed = module.norm(torch.cat(blocks, 2).transpose(1, 2).flatten(2))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * normed), state


def run(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `MiniMaxModel.forward`, which checks the class of its cache if told to use one."""
    return type(module).forward(module, *args, **kwargs | {"use_cache": False})


MINIMAX = OwnCode(
    {"MiniMaxLightningAttention": {"forward": attend}, "MiniMaxModel": {"forward": run}},
    states=OwnStates(1, continues=True),
)
