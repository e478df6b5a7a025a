"""`prefill_partial` and `prefill_attention`: attention of tokens over the intervals of keys that they see.

PyTorch's fused operators compute dense and causal attention. This kernel is for what they leave out: a soft cap, a
sliding window in time that follows the window, and sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..ahead import launch
from ..device import interpreted, power_of_two, shared_memory
from ..failures import Kernel, failure, launching
from ..forest_decode.limits import refusal_of_heads
from ..limits import (
    FLOATS,
    MAX_HEAD_DIM,
    check_numbers,
    check_rows,
    check_table,
    refusal_of_any_shape,
    refusal_of_mixture,
)


def refusal(query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[Tensor] = ()) -> str | None:
    """Why the kernel does not support these tensors, shaped as for `prefill_partial`; None when it does.

    Args:
        stored: Keys and values of contexts.
    """
    parts = (keys, query, values, *stored)
    reason = refusal_of_any_shape(*parts) or refusal_of_mixture(parts) or refusal_of_heads(keys, values)
    return reason or failure(Kernel.PREFILL, keys.device)


@dataclass(frozen=True)
class Config:
    block_m: int  # packed queries per tile
    block_n: int  # keys per tile
    warps: int  # warps per program
    stages: int  # key tiles in flight

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of shared memory for the queries, and the keys and values in flight, of 16 bits each."""
        return 2 * padded(head_dim) * (self.block_m + 2 * self.stages * self.block_n)


_CANDIDATES = {
    64: (Config(128, 64, 4, 3), Config(64, 64, 4, 2)),
    128: (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(64, 32, 4, 2)),
    256: (Config(128, 64, 8, 2), Config(128, 32, 8, 2), Config(64, 32, 4, 2)),
}
"""Configs by padded head_dim, fastest first as measured on an H100, smaller ones for GPUs with less shared memory."""


def padded(head_dim: int) -> int:
    """Columns of a tile: a power of two that matrix products take."""
    return max(16, power_of_two(head_dim))


@lru_cache
def choose_config(head_dim: int, shared_memory: int) -> Config:
    """Launch parameters for heads of a size, within the bytes of shared memory of a program."""
    candidates = _CANDIDATES[max(64, padded(head_dim))]
    return next((one for one in candidates if one.shared_bytes(head_dim) <= shared_memory), candidates[-1])


def prefill_partial(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    intervals: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    earlier: tuple[Tensor, Tensor],
    config: Config | None = None,
) -> None:
    """Merge the attention of some tokens over these keys into a partial, in place.

    Args:
        query: ``[heads, tokens, head_dim]``, fp16, bf16 or fp32; query head ``i`` uses KV head
            ``i // (heads / kv_heads)``. The last dimension of all tensors is contiguous.
        keys: ``[kv_heads, length, head_dim]``, in the query's dtype.
        values: The same.
        intervals: ``[3 or 5, count]`` int32, contiguous: different tokens, and the first and the last key that each
            sees of one run of keys or two; none where the last comes before the first. Tokens next to each other
            should see nearly the same keys.
        scale: Factor on the scores, positive.
        soft_cap: When given, scores become ``soft_cap * tanh(scores / soft_cap)``.
        earlier: Partial of other keys: ``out`` ``[heads, tokens, head_dim]`` and natural-log log-sum-exp
            ``[heads, tokens]``, both fp32. Where the latter is ``-inf``, ``out`` is undefined.
        config: Launch parameters.
    """
    _launch(query, keys, values, intervals, scale, soft_cap, None, earlier, None, None, config)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    intervals: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    earlier: tuple[Tensor, Tensor] | None = None,
    lse: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Attention of tokens over these keys, merged with that over others.

    Args:
        query: As for `prefill_partial`, and likewise the arguments not named here.
        intervals: Of all tokens: the result of others is undefined.
        sinks: ``[heads]`` fp32: when given, one more score per query head, without a value.
        earlier: The partial of other keys, if there are any.
        lse: When given, gets the log-sum-exp, ``[heads, tokens]`` fp32; with `earlier`, that of it.

    Returns:
        ``[heads, tokens, head_dim]`` in the query's dtype, a view of contiguous ``[tokens, heads, head_dim]``.
    """
    heads, tokens, head_dim = query.shape
    out = torch.empty(tokens, heads, head_dim, dtype=query.dtype, device=query.device).transpose(0, 1)
    _launch(query, keys, values, intervals, scale, soft_cap, sinks, earlier, out, lse, config)
    return out


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    intervals: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    earlier: tuple[Tensor, Tensor] | None,
    out: Tensor | None,
    lse: Tensor | None,
    config: Config | None,
) -> None:
    (heads, _, head_dim), kv_heads = query.shape, keys.shape[0]
    _check(query, keys, values, intervals, earlier)
    if lse is not None:
        check_rows("lse", lse, query.shape[:2], torch.float32)
    check_numbers(scale, soft_cap)
    check_table("sinks", sinks, (heads,), torch.float32)
    count, group = intervals.shape[1], heads // kv_heads
    if not count:
        return
    config = config or choose_config(head_dim, shared_memory(query.device))
    result = query if out is None else out
    merged = earlier or (result, result if lse is None else lse)
    with launching(Kernel.PREFILL, query.device):
        from .kernel import attend_intervals  # it imports triton, which may be missing

        launch(
            attend_intervals,
            (-(-count * group // config.block_m) * kv_heads,),
            *(query, keys, values, intervals, result, *merged, sinks),
            *(count, kv_heads, scale, soft_cap or 1.0),
            *(*query.stride()[:2], *keys.stride()[:2], *values.stride()[:2]),
            *(*result.stride()[:2], *merged[0].stride()[:2], *merged[1].stride()[:2]),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.stages,
            SOFT_CAP=soft_cap is not None,
            SINKS=sinks is not None,
            EARLIER=earlier is not None,
            FINAL=out is not None,
            LSE=out is None or lse is not None,
            SPANS=len(intervals) // 2,
            IN_HARDWARE=not interpreted(),
            num_warps=config.warps,
            enable_fp_fusion=True,  # as in the decode kernels
        )


def _check(
    query: Tensor, keys: Tensor, values: Tensor, intervals: Tensor, earlier: tuple[Tensor, Tensor] | None
) -> None:
    heads, _, head_dim = query.shape
    kv_heads, length = keys.shape[:2]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of the KV heads, got {heads} and {kv_heads}")
    if query.dtype not in FLOATS or head_dim > MAX_HEAD_DIM:
        takes = f"query must be fp16, bf16 or fp32, with head_dim up to {MAX_HEAD_DIM}"
        raise ValueError(f"{takes}, got {query.dtype} and {head_dim}")
    check_rows("query", query, query.shape, query.dtype)
    for name, part in (("keys", keys), ("values", values)):
        check_rows(name, part, (kv_heads, length, head_dim), query.dtype)
    check_table("intervals", intervals, (5 if len(intervals) == 5 else 3, *intervals.shape[1:2]), torch.int32)
    if earlier is not None:
        check_rows("earlier[0]", earlier[0], query.shape, torch.float32)
        if earlier[1].shape != query.shape[:2] or earlier[1].dtype != torch.float32:
            raise ValueError(f"earlier[1] must be {[*query.shape[:2]]} float32, got {[*earlier[1].shape]}")
