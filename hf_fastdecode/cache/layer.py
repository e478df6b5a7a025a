"""One layer of a shared-context cache, as transformers knows layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.forest import Forest, joined
from ..attention.interface import SharedKV
from ..attention.kv import Segment
from .handles import DecodeKV, PrefillKV, StoredLayer
from .state import SharedState
from .storage import TokenStorage

_REMEDY = "make it with hf_fastdecode.prefill(model, ...) of this model"


class _NoTensor:
    """In the place of an attribute that holds all keys or values of other caches' layers."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: object, owner: type | None = None) -> Any:
        raise AttributeError(
            f"a SharedContextCache has no {self._name!r} of a layer: they lie in nodes and suffixes; for a decoding "
            "loop that reads them, pass past_key_values=transformers.DynamicCache() to generate"
        )

    def __set__(self, layer: object, value: object) -> None:
        """transformers' mixin sets None."""


class SharedContextLayer(CacheLayerMixin):
    """Keys and values of one layer over a forest.

    Outside prefill, ``update`` appends tokens to every row's suffix; during it, to the nodes being prefilled. Both
    return a `SharedKV` in the place of the key and value tensors.

    Args:
        state: What all layers of the cache share.
        storage: What is stored of a token, and where.

    Attributes:
        appended: Tokens that the forward pass under way has appended to each row's suffix.
    """

    is_sliding = False
    is_croppable = True
    keys = _NoTensor()
    values = _NoTensor()

    def __init__(self, state: SharedState, storage: TokenStorage | None = None):
        super().__init__()
        self.stored = StoredLayer(state, storage if storage is not None else TokenStorage())
        self.appended = 0

    @property
    def state(self) -> SharedState:
        return self.stored.state

    @property
    def storage(self) -> TokenStorage:
        return self.stored.storage

    @property
    def window(self) -> int | None:
        """The window of the last pass, where it hid anything."""
        return self.stored.window

    @property
    def ran(self) -> dict[str, str]:
        """What computed which phase, for reports."""
        return self.stored.ran

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[SharedKV, SharedKV]:
        """Store new tokens.

        Args:
            key_states: ``[rows, kv_heads, queries, head_dim]``; during prefill ``[1, kv_heads, tokens, head_dim]``.
            value_states: The same shape.
            args: Handed to the storage, which may keep more of a token than its keys and values.
            kwargs: Likewise.

        Returns:
            The handle that the attention function attends with, twice.

        Raises:
            ValueError: What is stored is of another dtype, or of another number of rows.
        """
        parts = self.storage.parts_of(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(*self.storage.keys_and_values(parts))
        self._check_dtype(parts)
        handle: SharedKV
        if self.state.packed:
            packed = Segment._make(part[0] for part in parts)
            handle = PrefillKV(self.stored, packed)
            for span in (spans := list(joined(item.span for item in self.state.packed))):
                self.storage.segment(span.segment, self.state.segment_lengths[span.segment], packed)
            self.storage.write_nodes(spans, packed)
        else:
            self._make_room(parts)
            handle = DecodeKV(self.stored, parts)
        return handle, handle

    def _check_dtype(self, parts: Segment) -> None:
        stored = self.storage.example
        if stored is not None and stored[0].dtype != parts[0].dtype:
            raise ValueError(
                f"the cache holds keys in {stored[0].dtype}, and this pass computes {parts[0].dtype}: the model was "
                "converted, or runs under another torch.autocast than when the cache was made; make it again"
            )

    def _make_room(self, parts: Segment) -> None:
        """Lengthen the suffixes by the tokens of `parts`, which whatever attends writes."""
        rows, _, queries, _ = parts[0].shape
        state = self.state
        if state.forest is None:
            state.forest = Forest(rows)
        if rows != state.forest.rows:
            raise ValueError(
                f"the cache holds {state.forest.rows} rows, got keys for {rows}; expand it with "
                "batch_repeat_interleave, or pass it to generate of a model that is enabled, which does"
            )
        self._check_shapes(parts)
        after = state.suffix_length + queries
        self.storage.grow(
            rows, after, state.suffix_length, Segment._make(part[0] for part in parts), most=state.max_suffix
        )
        if state.origins is not None:
            state.origins.append(after)
        self.appended = queries

    def _check_shapes(self, parts: Segment) -> None:
        """Refuse tokens of other heads or widths than the stored ones."""
        stored = self.storage.example
        if stored is None:
            if self.state.forest is not None and self.state.forest.nodes:
                raise ValueError(f"the model has more layers than the cache; {_REMEDY}")
            return
        for new, old in zip(parts, stored, strict=True):
            got, held = (new.shape[-3], new.shape[-1]), (old.shape[-3], old.shape[-1])
            if got != held:
                raise ValueError(
                    f"the cache holds {held[0]} KV heads of {held[1]} numbers, the model has {got[0]} of {got[1]}; "
                    f"{_REMEDY}"
                )

    def reserve(self, tokens: int) -> bool:
        """Make every row's suffix hold `tokens` tokens; whether storage moved.

        Raises:
            ValueError: Nothing was stored in this layer yet.
        """
        state = self.state
        if state.forest is None or not self.storage.segments:
            raise ValueError("this cache layer holds no nodes; prefill it first")
        like = next(iter(self.storage.segments.values()))
        return self.storage.grow(state.forest.rows, tokens, state.suffix_length, like, most=state.max_suffix)

    @property
    def batch_size(self) -> int:
        return self.state.forest.rows if self.state.forest is not None else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.state.padded_length + self.appended

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.stored = StoredLayer(self.state, TokenStorage())
        self.is_initialized = False

    def offload(self) -> None:
        raise NotImplementedError("a SharedContextCache cannot be offloaded; use transformers' DynamicCache for that")

    prefetch = offload
