"""Argument checks of `forest_decode`, which raise ValueError against out-of-bounds accesses and division by zero.

Addresses and the contents of device tensors are not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import Config
from .schedule import Schedule


def check_tokens(query: Tensor, keys: Tensor, values: Tensor) -> None:
    """Check shapes, strides and dtypes of queries, new keys and new values."""
    rows, _, queries, head_dim = query.shape
    kv_heads, rest = keys.shape[1], head_dim - keys.shape[3]
    check_query(query, kv_heads)
    if rest > 0:  # latents
        widths = (head_dim - rest, rest)
    else:
        widths = (head_dim, head_dim)
    for name, part, width in zip(("new_keys", "new_values"), (keys, values), widths, strict=True):
        shape = (rows, kv_heads, queries, width)
        if part.shape != shape or part.dtype != query.dtype or part.stride(3) != 1:
            raise ValueError(f"{name} must be {_in_words(shape, query.dtype)}, got {_found(part)}")


def check_query(query: Tensor, kv_heads: int) -> None:
    """Check strides, dtype and heads of queries."""
    heads = query.shape[1]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of the KV heads, got {heads} and {kv_heads}")
    if query.stride(3) != 1:
        raise ValueError(f"query must be {_in_words(tuple(query.shape), query.dtype)}, got {_found(query)}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query must be fp16, bf16 or fp32, got {query.dtype}")


def check_table(name: str, table: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check shape, dtype and contiguity of a table."""
    if table.shape != shape or table.dtype != dtype or not table.is_contiguous():
        raise ValueError(f"{name} must be {_in_words(shape, dtype)}, got {_found(table)}")


def check_schedule(schedule: Schedule, config: Config, rows: int) -> None:
    """Check that a schedule has the query's rows and the configuration's block sizes."""
    if len(schedule.contexts) != rows:
        raise ValueError(f"the schedule must be for the query's {rows} rows, got one for {len(schedule.contexts)}")
    if schedule.chains.shape[1] != config.chain:
        links = schedule.chains.shape[1]
        raise ValueError(f"the schedule must be for chains of {config.chain} nodes, got one for {links}")
    blocks, cut = (config.block_m, config.block_n), (schedule.block_m, schedule.block_n)
    if blocks != cut:
        raise ValueError(f"the schedule must be cut into the configuration's blocks of {blocks}, got {cut}")


def check_numbers(scale: float, soft_cap: float | None, window: int | None) -> None:
    """Check the bounds of scale, soft cap and window."""
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be above 0, or None for none, got {soft_cap}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for none, got {window}")


def _in_words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}, contiguous in the last dimension"


def _found(part: Tensor) -> str:
    return f"{list(part.shape)} {str(part.dtype).removeprefix('torch.')} with strides {part.stride()}"
