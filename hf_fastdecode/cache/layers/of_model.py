"""Makes the layers of a cache by a model's layout, and checks that those of a filled cache suit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..layout import ModelLayout
from ..state import SharedState
from ..storage import TokenStorage
from .attention import REMEDY, SharedContextLayer, other_heads
from .latent import LatentStorage
from .own import OwnStorage
from .state import StateAndAttentionLayer, StateLayer


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


CacheLayer = SharedContextLayer | StateLayer | EmptyLayer


def layers_of(layout: ModelLayout, state: SharedState, held: Sequence[CacheLayer]) -> list[CacheLayer]:
    """The layers of a cache for a model: new ones, or those held, which are then known to be the model's.

    Raises ValueError if those held have tokens of a model with other layers.
    """
    if held and len(held) != len(layout.layers):
        raise ValueError(f"the cache holds {len(held)} layers, the model has {len(layout.layers)}; {REMEDY}")
    layers: list[CacheLayer] = []
    for index in range(len(layout.layers)):
        store, own, layer = layout.per_token.get(index), layout.own.get(index), held[index] if held else None
        state_store = layout.states.get(index)
        if layer is not None and isinstance(layer, StateLayer) is (state_store is None):
            raise ValueError(f"the cache and the model differ in whether layer {index} stores a state; {REMEDY}")
        if store is None:
            if isinstance(layer, SharedContextLayer):
                raise ValueError(f"the cache holds tokens of layer {index}, where the model stores none; {REMEDY}")
            if layer is None or state_store is None:
                layer = EmptyLayer(state) if state_store is None else StateLayer(state, state_store)
            layers.append(layer)
            continue
        if not isinstance(layer, SharedContextLayer):
            if state_store is None:
                layer = SharedContextLayer(state, index, store, _storage(layout, index))
            else:
                layer = StateAndAttentionLayer(state, index, store, state_store, _storage(layout, index))
        elif (node := layer.storage.node_example) is not None:
            rest = store.head_dim - store.value_dim if layer.storage.holds_latents else store.value_dim
            widths = (store.value_dim if layer.storage.holds_latents else store.head_dim, rest)
            for part, width in zip(node, widths, strict=True):
                got = part.shape[-3], part.shape[-1]
                if 0 not in (store.kv_heads, width) and got != (store.kv_heads, width):
                    raise ValueError(other_heads(got, (store.kv_heads, width)))
        if own is not None and isinstance(layer.storage, OwnStorage):
            layer.storage.layer = ref(own)  # a cache that was loaded or copied has none, or that of another model
        if isinstance(layer.storage, LatentStorage):
            layer.storage.layer = ref(layout.expanding[index])
        layer.store = store
        layers.append(layer)
    return layers


def _storage(layout: ModelLayout, index: int) -> TokenStorage | None:
    """A storage for what a layer's own code makes of its tokens; None for keys and values as they come."""
    if (own := layout.own.get(index)) is not None:
        return OwnStorage(ref(own))
    expanding = layout.expanding.get(index)
    return None if expanding is None else LatentStorage(ref(expanding), layout.per_token[index].kernel_heads)
