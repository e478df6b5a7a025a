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
from ..stores import Store
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
    return [_layer_of(layout, state, index, held[index] if held else None) for index in range(len(layout.layers))]


def _layer_of(layout: ModelLayout, state: SharedState, index: int, held: CacheLayer | None) -> CacheLayer:
    store, state_store = layout.per_token.get(index), layout.states.get(index)
    if held is not None and isinstance(held, StateLayer) is (state_store is None):
        raise ValueError(f"the cache and the model differ in whether layer {index} stores a state; {REMEDY}")
    if store is not None:
        layer = _attention_layer(layout, state, index, held if isinstance(held, SharedContextLayer) else None)
        layer.store = store
        return layer
    if isinstance(held, SharedContextLayer):
        raise ValueError(f"the cache holds tokens of layer {index}, where the model stores none; {REMEDY}")
    if state_store is None:
        return EmptyLayer(state)
    return StateLayer(state, state_store) if held is None else held


def _attention_layer(
    layout: ModelLayout, state: SharedState, index: int, held: SharedContextLayer | None
) -> SharedContextLayer:
    """The layer held, or a new one for keys and values of every token."""
    store, state_store = layout.per_token[index], layout.states.get(index)
    if held is not None:
        _check_heads(held, store)
        layer = held
    elif state_store is None:
        layer = SharedContextLayer(state, index, store, _storage(layout, index))
    else:
        layer = StateAndAttentionLayer(state, index, store, state_store, _storage(layout, index))
    # A cache that was loaded or copied has no layers of a model, or those of another one.
    if isinstance(layer.storage, OwnStorage) and (own := layout.own.get(index)) is not None:
        layer.storage.layer = ref(own)
    if isinstance(layer.storage, LatentStorage):
        layer.storage.layer = ref(layout.expanding[index])
    return layer


def _check_heads(layer: SharedContextLayer, store: Store) -> None:
    """Raise ValueError if a layer holds tokens of other heads or widths than a store has, where these are known."""
    if (node := layer.storage.node_example) is None:
        return
    widths = (store.head_dim, store.value_dim)
    if layer.storage.holds_latents:
        widths = (store.value_dim, store.head_dim - store.value_dim)
    for part, width in zip(node, widths, strict=True):
        got = part.shape[-3], part.shape[-1]
        if 0 not in (store.kv_heads, width) and got != (store.kv_heads, width):
            raise ValueError(other_heads(got, (store.kv_heads, width)))


def _storage(layout: ModelLayout, index: int) -> TokenStorage | None:
    """A storage for what a layer's own code makes of its tokens; None for keys and values as they come."""
    if (own := layout.own.get(index)) is not None:
        return OwnStorage(ref(own))
    expanding = layout.expanding.get(index)
    return None if expanding is None else LatentStorage(ref(expanding), layout.per_token[index].kernel_heads)
