"""What the prefill kernel supports, and its launch parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ..failures import Kernel, failure
from ..forest_decode.limits import MAX_HEAD_DIM, refusal_of_any_shape


def refusal(query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[Tensor] = ()) -> str | None:
    """Why the kernel does not support these tensors, shaped as for `prefill_partial`; None when it does.

    Args:
        stored: Keys and values of contexts.
    """
    if reason := refusal_of_any_shape(keys, query, values, *stored):
        return reason
    others = {(part.dtype, part.device) for part in (query, keys, values, *stored)}
    if len(others) > 1:
        return f"query, keys and values need one dtype and device, got {', '.join(sorted(map(str, others)))}"
    head_dim = keys.shape[-1]
    if values.shape[-1] != head_dim:
        return f"it needs one head_dim for keys and values, got {head_dim} and {values.shape[-1]}"
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"it takes head_dim up to {MAX_HEAD_DIM} in multiples of 16, got {head_dim}"
    return failure(Kernel.PREFILL, keys.device)


@dataclass(frozen=True)
class Config:
    """Launch parameters.

    Attributes:
        block_m: Packed queries per tile.
        block_n: Keys per tile.
        warps: Warps per program.
        stages: Key tiles in flight.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory for the queries, and the keys and values in flight, of 16 bits each."""
        return 2 * padded(head_dim) * (self.block_m + 2 * self.stages * self.block_n)


_CANDIDATES = {
    64: (Config(128, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 32, 4, 2)),
    256: (Config(128, 64, 8, 2), Config(128, 32, 8, 2), Config(64, 32, 4, 2)),
}
"""By padded head_dim, the fastest first as measured on an H100, smaller ones for GPUs with less shared memory."""


def padded(head_dim: int) -> int:
    """Columns of a tile: a power of two that matrix products take."""
    return max(16, 1 << (head_dim - 1).bit_length())


@lru_cache
def choose_config(head_dim: int, shared_memory: int) -> Config:
    """Launch parameters for heads of a size, within the bytes of shared memory of a program."""
    candidates = _CANDIDATES[max(64, padded(head_dim))]
    return next((one for one in candidates if one.shared_bytes(head_dim) <= shared_memory), candidates[-1])
