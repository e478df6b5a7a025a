"""A layer that stores nothing: a feed-forward layer, or one that reads what others store."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..state import SharedState


class EmptyLayer(CacheLayerMixin):
    """Takes the place of a layer that stores nothing, so that the others keep their indices."""

    is_sliding = False
    is_croppable = True
    appended = 0

    def __init__(self, state: SharedState):
        super().__init__()
        self.state = state
        self.ran: dict[str, str] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: there is nothing to allocate."""

    def for_nodes_of(self, state: SharedState) -> EmptyLayer:
        """The same layer of another cache."""
        return EmptyLayer(state)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse tokens, as `SharedContextCache.update` does before with a better message."""
        raise TypeError("this cache layer stores nothing")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.padded_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.state.padded_length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """No-op: there are no tokens."""
