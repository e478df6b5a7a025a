"""Cache for captured decode steps; its layers attend through tables at fixed addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..attention.autocast import cast
from ..attention.interface import SharedKV
from ..attention.launch.static_tables import StaticTables
from ..attention.scoring import Scoring


class CapturedCache(Cache):
    """Replaces the `SharedContextCache` while a decode step is captured; holds no keys or values.

    Args:
        tables: Addresses and lengths of the batch's keys and values.
        layers: Number of attention layers in the model.
    """

    def __init__(self, tables: StaticTables, layers: int):
        super().__init__(layers=[_CapturedLayer(tables, index) for index in range(layers)])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return super().update(*args, **kwargs)


class _CapturedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, tables: StaticTables, index: int):
        super().__init__()
        self.tables, self.index, self.is_initialized = tables, index, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: the batch's own cache allocates storage."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[SharedKV, SharedKV]:
        handle = _CapturedKV(self.tables, self.index, cast(key_states), cast(value_states))
        return handle, handle

    # Positions are passed as tensors: lengths read here would be constants in the graph.
    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class _CapturedKV(SharedKV):
    def __init__(self, tables: StaticTables, index: int, keys: Tensor, values: Tensor):
        self.tables, self.index, self.keys, self.values = tables, index, keys, values

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        return self.tables.attend(self.index, query, self.keys, self.values, scoring).transpose(1, 2)
