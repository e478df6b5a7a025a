"""MiniMax: lightning attention has its states in a class of cache that `MiniMaxModel.forward` alone accepts.

transformers leaves these states in place when beams are reordered. Here they follow their rows, so that beams are
those of ``use_cache=False``.
"""

from __future__ import annotations

from typing import Any

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


def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `MiniMaxLightningAttention.forward`."""
    return type(module).forward(module, *args, **with_cache(kwargs, _LightningStates(cache_in(kwargs))))


def run(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `MiniMaxModel.forward`, which checks the class of its cache if told to use one."""
    return type(module).forward(module, *args, **kwargs | {"use_cache": False})


MINIMAX = OwnCode(
    {"MiniMaxLightningAttention": {"forward": attend}, "MiniMaxModel": {"forward": run}},
    states=OwnStates(1, continues=True),
)
