"""Argument checks of `forest_decode` and `forest_partial`.

They raise ValueError against out-of-bounds accesses and division by zero. Addresses and the contents of device tensors
are not checked.
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


def check_step_tables(rows: int, nodes: Tensor, suffix: Tensor, slots: Tensor, lengths: Tensor) -> None:
    """Check the tables of nodes and suffixes, which every step has."""
    check_table("nodes", nodes, (3, *nodes.shape[1:2]), torch.int64)
    check_table("suffix", suffix, (4,), torch.int64)
    check_table("slots", slots, (rows,), torch.int32)
    check_table("lengths", lengths, (3, rows) if lengths.dim() > 1 else (rows,), torch.int32)


def check_optional_tables(
    shape: tuple[int, ...],
    sinks: Tensor | None,
    biases: Tensor | None,
    origins: Tensor | None,
    other: tuple[Tensor, Tensor] | None,
) -> None:
    """Check the tables that a step may have, whose result is of this shape, and a partial of further keys."""
    rows, heads, _, _ = shape
    if sinks is not None:
        check_table("sinks", sinks, (heads,), torch.float32)
    if origins is not None:
        check_table("origins", origins, (rows, *origins.shape[1:2]), torch.int32)
    if biases is not None:
        check_table("biases", biases, (heads, *biases.shape[1:2]), torch.float32)
    if other is not None:
        check_table("other[0]", other[0], shape, torch.float32)
        check_table("other[1]", other[1], shape[:-1], torch.float32)


def check_combination(
    *,
    divided: bool,
    soft_cap: float | None,
    window: int | None,
    biases: Tensor | None,
    other: tuple[Tensor, Tensor] | None,
) -> None:
    """Check that a step has nothing that counts distances where keys are elsewhere, or biases beside a soft cap."""
    if biases is not None and (divided or other is not None or soft_cap is not None or not biases.shape[1]):
        raise ValueError("biases by distance need whole suffixes, all keys here, no soft cap and at least one bias")
    if window is not None and divided:
        raise ValueError(f"a window of {window} tokens cannot count keys on other devices; give it whole suffixes")
    if window is not None and other is not None:
        raise ValueError(f"a window of {window} tokens cannot count the keys behind `other`; give it no window")


def other_dtype(other: tuple[Tensor, Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.dtype:
    """The dtype of a partial of further keys, fp32 or that of the query, whose shapes are checked."""
    out, lse = other
    found = dtype if out.dtype == dtype else torch.float32
    check_table("other[0]", out, shape, found)
    check_table("other[1]", lse, shape[:-1], torch.float32)
    return found


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
