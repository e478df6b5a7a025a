"""View of a shared-context cache for captured decode steps: no keys or values, which change between replays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..attention.interface import SharedKV
from ..attention.kv import Segment
from ..attention.launch.step_tables import StepTables
from ..attention.scoring import Scoring
from .shared import SharedContextCache
from .storage import TokenStorage


class CapturedCache(Cache):
    """Replaces a `SharedContextCache` while a decode step is captured; holds no keys or values.

    Args:
        tables: Addresses and lengths of the batch's keys and values.
        cache: The cache, whose layers' storage decides what is kept of a token.
    """

    def __init__(self, tables: StepTables, cache: SharedContextCache):
        layers = [_CapturedLayer(tables, index, layer.storage.empty()) for index, layer in enumerate(cache.layers)]
        super().__init__(layers=layers)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return super().update(*args, **kwargs)


class _CapturedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, tables: StepTables, index: int, storage: TokenStorage):
        super().__init__()
        self.tables, self.index, self.storage, self.is_initialized = tables, index, storage, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the batch's own cache allocates storage."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[SharedKV, SharedKV]:
        parts = self.storage.parts_of(key_states, value_states, *args, **kwargs)
        handle = _CapturedKV(self.tables, self.index, self.storage.keys_and_values(parts))
        return handle, handle

    # Positions are passed as tensors: lengths read here would be constants in the graph.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class _CapturedKV(SharedKV):
    def __init__(self, tables: StepTables, index: int, new: Segment):
        self.tables, self.index, self.new = tables, index, new

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        return self.tables.attend(self.index, query, *self.new, scoring).transpose(1, 2)
