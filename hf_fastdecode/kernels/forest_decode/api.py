"""The operator: one decode step of one layer over a forest, in two launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from .schedule import Schedule
from .triton import node_partials, suffix_and_merge


@dataclass(frozen=True)
class Config:
    """Launch parameters of both kernels.

    Attributes:
        block_m: Packed queries of a tile, 16 to 128.
        block_n: Keys of a node's tile.
        warps: Warps of a program of `node_partials`.
        stages: Key tiles in flight in `node_partials`.
        per_sm: Programs of `node_partials` for each multiprocessor.
        suffix_block_n: Keys of a suffix tile.
        suffix_warps: Warps of a program of `suffix_and_merge`.
        merge: Partials of one query that `suffix_and_merge` loads at once.
        overlap: Launch `suffix_and_merge` while `node_partials` still runs; needs compute capability 9.0.
    """

    block_m: int
    block_n: int = 64
    warps: int = 4
    stages: int = 3
    per_sm: int = 2
    suffix_block_n: int = 16
    suffix_warps: int = 2
    merge: int = 8
    overlap: bool = True


def choose_config(packed: int, head_dim: int, *, overlap: bool, shared_memory: int = 227 * 1024) -> Config:
    """Launch parameters, as measured on an H200, shrunk to what a program can hold elsewhere.

    Args:
        packed: Packed queries of the widest node for a KV head.
        head_dim: Numbers per head.
        overlap: Whether the device can overlap the two launches.
        shared_memory: Bytes that a program may take.
    """
    block_m = min(128, max(16, triton.next_power_of_2(packed)))
    if block_m == 128:
        config = Config(128, warps=8, per_sm=1, overlap=overlap)
    else:
        config = Config(block_m, overlap=overlap)

    def needed() -> int:  # queries, and keys and values of every stage, at two bytes a number
        return 2 * triton.next_power_of_2(head_dim) * (config.block_m + 2 * config.stages * config.block_n)

    while needed() > shared_memory and config.stages > 2:
        config = replace(config, stages=config.stages - 1)
    while needed() > shared_memory and config.block_n > 32:
        config = replace(config, block_n=config.block_n // 2)
    if head_dim > 128:  # the accumulator fills the registers
        config = replace(config, block_m=min(64, config.block_m), warps=8 if config.block_m > 32 else 4)
    return config


def forest_decode(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    nodes: Tensor,
    suffix: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: Schedule,
    config: Config,
    *,
    scale: float,
    soft_cap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Append the new tokens' keys and values to the suffixes, and attend to nodes and suffixes.

    Query ``j`` sees its row's nodes, the suffix as it was, and new tokens ``0..j``. Nothing that differs between
    steps, or between calls with as many rows, is an argument on the host: keys and values are found through device
    addresses, so that a captured CUDA graph serves other prompts, lengths and storage.

    Args:
        query: ``[rows, heads, queries, head_dim]``, fp16, bf16 or fp32; the last dimension contiguous.
        new_keys: ``[rows, kv_heads, queries, head_dim]``, likewise.
        new_values: The same shape and strides.
        nodes: ``[3, capacity]`` int64: device address of each node's keys ``[kv_heads, length, head_dim]``, of its
            values, and elements from one KV head to the next in both.
        suffix: ``[4]`` int64: device address of the suffixes' keys ``[slots, kv_heads, capacity, head_dim]``, of their
            values, and elements from one slot and from one KV head to the next in both; written at ``lengths``.
        slots: ``[rows]`` int32: where in there each row's suffix lies; a row with -1 takes no part, its output is 0.
        lengths: ``[rows]`` int32: tokens in each suffix before this step.
        schedule: For these nodes, rows, and ``heads / kv_heads * queries`` packed queries.
        config: Launch parameters; its blocks are the schedule's.
        scale: Factor on the scores.
        soft_cap: When given, scores become ``soft_cap * tanh(scores / soft_cap)``.
        return_lse: Also return the log-sum-exp.

    Returns:
        ``out`` ``[rows, heads, queries, head_dim]`` in the query's dtype, and when asked for the natural-log
        log-sum-exp ``[rows, heads, queries]`` fp32.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = new_keys.shape[1]
    group = heads // kv_heads
    out = torch.empty(rows, heads, queries, head_dim, dtype=query.dtype, device=query.device)
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=query.device) if return_lse else None
    partial_out = query.new_empty(schedule.piece_count, schedule.block_m, head_dim, dtype=torch.float32)
    partial_lse = query.new_empty(schedule.piece_count, schedule.block_m, dtype=torch.float32)
    block_d = max(16, triton.next_power_of_2(head_dim))
    # Suffixes are attended to while the last nodes still are; only the merge waits (programmatic dependent launch).
    overlap = config.overlap and schedule.piece_count > 0 and query.is_cuda
    pdl = {"launch_pdl": True} if overlap else {}
    if schedule.piece_count:
        node_partials[(schedule.programs,)](
            query,
            nodes,
            schedule.pieces,
            partial_out,
            partial_lse,
            nodes.shape[1],
            scale,
            soft_cap or 0.0,
            *query.stride()[:3],
            GROUP=group,
            QUERIES=queries,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=schedule.block_m,
            BLOCK_N=schedule.block_n,
            SOFT_CAP=soft_cap is not None,
            STAGES=config.stages,
            PDL=overlap,
            num_warps=config.warps,
            **pdl,
        )
    each = group * queries
    suffix_and_merge[(rows * kv_heads,)](
        query,
        new_keys,
        new_values,
        suffix,
        slots,
        lengths,
        schedule.row_units,
        schedule.row_offsets,
        schedule.row_tiles,
        schedule.unit_slots,
        partial_out,
        partial_lse,
        out,
        lse if lse is not None else out,
        rows,
        kv_heads,
        scale,
        soft_cap or 0.0,
        *query.stride()[:3],
        *new_keys.stride()[:3],
        GROUP=group,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_P=1 if each == 1 else max(16, triton.next_power_of_2(each)),
        BLOCK_M=schedule.block_m,
        BLOCK_N=config.suffix_block_n,
        MERGE=config.merge,
        DEPTHS=schedule.row_units.shape[0],
        SOFT_CAP=soft_cap is not None,
        LSE=return_lse,
        PDL=overlap,
        num_warps=config.suffix_warps,
        **pdl,
    )
    return out, lse
