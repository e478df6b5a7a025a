"""The operator: one decode step of one layer over a forest, in two launches."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any

import torch
import triton
from torch import Tensor

from .config import Config, SuffixConfig, choose_config, choose_suffix_config, hopper_kernel
from .limits import shared_memory
from .memory import ADDRESS_BITS, PLANE, all_memory
from .schedule import Schedule
from .suffix import attend_suffixes
from .triton import node_partials

__all__ = ["Config", "SuffixConfig", "choose_config", "forest_decode"]


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
    window: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Append the new tokens' keys and values to the suffixes, and attend to nodes and suffixes.

    Query ``j`` sees its row's nodes, the suffix as it was, and new tokens ``0..j``. Nothing that differs between
    steps, or between calls with as many rows, is an argument on the host: keys and values are found through device
    addresses, so that a captured CUDA graph serves other prompts, lengths and storage.

    Args:
        query: ``[rows, heads, queries, head_dim]``, fp16, bf16 or fp32; the last dimension contiguous.
        new_keys: ``[rows, kv_heads, queries, head_dim]``, likewise.
        new_values: The same shape, likewise.
        nodes: ``[3, capacity]`` int64: device address of each node's keys ``[kv_heads, length, head_dim]``, of its
            values, and elements from one KV head to the next in both; multiples of 16 bytes. The table, the schedule
            and the nodes must have been written before the kernel that precedes this call in the stream, which may
            still run when they are read.
        suffix: ``[4]`` int64: device address of the suffixes' keys ``[slots, kv_heads, capacity, head_dim]``, of their
            values, and elements from one slot and from one KV head to the next in both; written at ``lengths``.
        slots: ``[rows]`` int32: where in there each row's suffix lies; a row with -1 takes no part, its output is 0.
        lengths: ``[rows]`` int32: tokens in each suffix before this step.
        schedule: For these nodes, rows, and ``heads / kv_heads * queries`` packed queries.
        config: Launch parameters; its blocks are the schedule's.
        scale: Factor on the scores, positive.
        soft_cap: When given, scores become ``soft_cap * tanh(scores / soft_cap)``.
        window: When given, a query sees only so many tokens of its row, of which it is itself the last: first those of
            the nodes, in order of depth, then the suffix and the new ones.
        sinks: ``[heads]`` fp32: when given, a score of each query head that adds to the softmax's denominator, and to
            the log-sum-exp, but stands for no key.
        return_lse: Also return the log-sum-exp.

    Returns:
        ``out`` ``[rows, heads, queries, head_dim]`` in the query's dtype, and when asked for the natural-log
        log-sum-exp ``[rows, heads, queries]`` fp32.

    Raises:
        ValueError: There is a window, and the configuration is of the Hopper kernel.
    """
    if window is not None and config.hopper:
        raise ValueError("the Hopper kernel takes no window; choose_config(..., windowed=True) leaves it out")
    rows, heads, queries, head_dim = query.shape
    kv_heads = new_keys.shape[1]
    group = heads // kv_heads
    each = group * queries
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    out = torch.empty(rows, heads, queries, head_dim, dtype=query.dtype, device=query.device)
    lse = torch.empty(rows, heads, queries, **fp32) if return_lse else None
    partial_out = torch.empty(schedule.piece_count, schedule.block_m, head_dim, **fp32)
    partial_lse = torch.empty(schedule.piece_count, schedule.block_m, **fp32)
    # A kernel may start while the one before it still runs, and wait where it needs that one's results
    # (programmatic dependent launch).
    overlap = config.overlap and schedule.piece_count > 0 and query.is_cuda
    launch: dict[str, Any] = {"launch_pdl": True} if overlap else {}
    depths = schedule.row_units.shape[0]
    memory = shared_memory(query.device)
    own = config.suffix or choose_suffix_config(rows, kv_heads, group, queries, head_dim, shared_memory=memory)
    shape = {"GROUP": group, "QUERIES": queries, "HEAD_DIM": head_dim}
    block_d = max(16, triton.next_power_of_2(head_dim))
    if schedule.piece_count:
        _attend_nodes(
            query,
            nodes,
            schedule,
            partial_out,
            partial_lse,
            config,
            kv_heads,
            scale,
            soft_cap,
            window,
            lengths,
            shape,
            block_d,
            launch,
        )
    unit_tables = (schedule.row_units, schedule.row_offsets, schedule.row_tiles, schedule.unit_slots)
    # Matrix units take sixteen queries at least; what is padded goes through memory to be merged without.
    block_p = 1 if each == 1 else max(16, triton.next_power_of_2(each))
    tile = triton.next_power_of_2(each)
    through_memory = depths > 0 and tile != block_p
    own_out = torch.empty(rows, heads, queries, head_dim, **fp32) if through_memory else out
    own_lse = torch.empty(rows, heads, queries, **fp32) if through_memory else out
    attend_suffixes[(rows * kv_heads,)](
        query,
        new_keys,
        new_values,
        suffix,
        slots,
        lengths,
        *unit_tables,
        partial_out,
        partial_lse,
        own_out,
        own_lse,
        out,
        lse if lse is not None else out,
        sinks if sinks is not None else out,
        rows,
        kv_heads,
        scale,
        soft_cap or 0.0,
        window or 0,
        *query.stride()[:3],
        *new_keys.stride()[:3],
        *new_values.stride()[:3],
        **shape,
        BLOCK_D=block_d,
        BLOCK_P=block_p,
        TILE=tile,
        BLOCK_Q=1 if block_p == 1 else 16,
        BLOCK_M=schedule.block_m,
        BLOCK_N=own.block_n,
        STAGES=own.stages,
        MERGE=own.merge,
        DEPTHS=depths,
        SOFT_CAP=soft_cap is not None,
        WINDOW=window is not None,
        SINKS=sinks is not None,
        LSE=return_lse,
        PDL=overlap,
        num_warps=own.warps,
        **launch,
    )
    return out, lse


def _attend_nodes(
    query: Tensor,
    nodes: Tensor,
    schedule: Schedule,
    partial_out: Tensor,
    partial_lse: Tensor,
    config: Config,
    kv_heads: int,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    lengths: Tensor,
    shape: dict[str, int],
    block_d: int,
    launch: dict[str, Any],
) -> None:
    """Launch the kernel of nodes."""
    tensors = (query, nodes, schedule.pieces, partial_out, partial_lse)
    strides = query.stride()[:3]
    options = shape | {
        "BLOCK_M": schedule.block_m,
        "BLOCK_N": schedule.block_n,
        "SOFT_CAP": soft_cap is not None,
        "STAGES": config.stages,
        "PDL": bool(launch),
    }
    if not config.hopper:
        node_partials[(schedule.programs,)](
            *tensors,
            schedule.contexts,
            lengths,
            nodes.shape[1],
            scale,
            soft_cap or 0.0,
            window or 0,
            *strides,
            **options,
            BLOCK_D=block_d,
            WINDOW=window is not None,
            num_warps=config.warps,
            **launch,
        )
        return

    def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
        if size > schedule.scratch.nbytes:
            raise RuntimeError(
                f"a launch needs {size} bytes for descriptors, but its schedule has {schedule.scratch.nbytes}"
            )
        return schedule.scratch

    def launch_hopper() -> None:
        triton.set_allocator(scratch)
        numbers = (nodes.shape[1], kv_heads, scale, soft_cap or 0.0)
        memory = all_memory(query.dtype, schedule.block_n, query.shape[-1], PLANE)
        options.update(PLANE=PLANE, ADDRESS_BITS=ADDRESS_BITS)
        hopper_kernel()[(schedule.programs,)](*tensors, memory, *numbers, *strides, **options, num_warps=4, **launch)

    copy_context().run(launch_hopper)  # elsewhere Triton's allocator stays what it is
