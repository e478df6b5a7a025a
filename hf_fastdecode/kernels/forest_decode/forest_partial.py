"""`forest_partial`: attention of one layer to the nodes of a forest alone, in two launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..failures import Kernel, launching
from .arguments import check_numbers, check_query, check_schedule, check_table
from .config import Config, choose_merge_config
from .merge import merge_rows
from .nodes import attend_nodes, overlaps
from .schedule import Schedule


def forest_partial(
    query: Tensor,
    nodes: Tensor,
    slots: Tensor,
    schedule: Schedule,
    config: Config,
    *,
    kv_heads: int,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to each row's nodes, without a causal rule.

    For cross-attention, and for nodes that are spread over devices: partials of each device's nodes merge to the
    partial of all (Tree Attention, section 5), which `forest_decode` accepts as ``other``.

    Args:
        query: ``[rows, heads, queries, head_dim]``, fp16, bf16 or fp32; the last dimension contiguous.
        nodes: As for `forest_decode`.
        slots: ``[rows]`` int32: -1 for an inactive row, whose result is that of no keys.
        schedule: For these nodes, rows, and ``heads / kv_heads * queries`` packed queries.
        config: Launch parameters, with the block sizes of the schedule.
        kv_heads: KV heads of the nodes.
        scale: Factor on the scores, positive.
        soft_cap: When given, scores become ``soft_cap * tanh(scores / soft_cap)``.

    Returns:
        ``out`` ``[rows, heads, queries, head_dim]`` and the natural-log log-sum-exp ``[rows, heads, queries]``, both
        fp32; 0 and ``-inf`` for rows without nodes.

    Raises:
        ValueError: A shape, stride, dtype or number is not as documented.
        KernelFailedError: A kernel cannot be compiled or launched here.
    """
    rows, heads, queries, head_dim = query.shape
    check_query(query, kv_heads)
    check_table("nodes", nodes, (3, *nodes.shape[1:2]), torch.int64)
    check_table("slots", slots, (rows,), torch.int32)
    check_schedule(schedule, config, rows)
    check_numbers(scale, soft_cap, None)
    out = torch.empty(rows, heads, queries, head_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=query.device)
    if not schedule.piece_count or not rows:
        return out.zero_(), lse.fill_(-torch.inf)
    workspace = attend_nodes(query, nodes, slots, schedule, config, kv_heads, scale=scale, soft_cap=soft_cap)
    queries_per_kv_head = heads // kv_heads * queries
    merging = choose_merge_config(queries_per_kv_head, head_dim)
    overlap = overlaps(query, schedule, config)
    with launching(Kernel.FOREST, query.device):
        merge_rows[(triton.cdiv(rows, merging.rows) * kv_heads,)](
            slots,
            schedule.row_units,
            schedule.row_offsets,
            schedule.row_tiles,
            schedule.unit_slots,
            *workspace,
            out,
            lse,
            out,
            lse,
            schedule.overlap_suffix,
            rows,
            kv_heads,
            GROUP=heads // kv_heads,
            QUERIES=queries,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            TILE=triton.next_power_of_2(queries_per_kv_head),
            BLOCK_M=schedule.block_m,
            MERGE=merging.merge,
            DEPTHS=schedule.row_units.shape[0],
            LSE=True,
            PDL=overlap,
            ROWS=merging.rows,
            OWN=False,
            num_warps=merging.warps,
            enable_fp_fusion=True,  # as in `attend_nodes`
            **({"launch_pdl": True} if overlap else {}),
        )
    return out, lse
