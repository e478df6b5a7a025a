"""What the kernels can compute, asked before they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..installed import interpreted, triton_is_installed

if TYPE_CHECKING:  # which import this file
    from .config import Config
    from .schedule import Schedule

MAX_QUERIES = 16
MAX_HEAD_DIM = 256


def refusal(
    query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[Tensor], sinks: Tensor | None = None
) -> str | None:
    """Why `forest_decode` cannot take these, or None when it can.

    Args:
        query: ``[rows, heads, queries, head_dim]``.
        keys: New keys ``[rows, kv_heads, queries, head_dim]``.
        values: New values.
        stored: Keys and values of the suffixes and of the segments that nodes lie in.
        sinks: Where the layer has them.
    """
    given = [query, keys, values, *stored, *([sinks] if sinks is not None else [])]
    if torch.is_grad_enabled() and any(part.requires_grad for part in given):
        return "it computes no gradients; call it under torch.no_grad()"
    others = {(part.dtype, part.device) for part in (query, keys, values, *stored)}
    if len(others) > 1:  # it reads raw memory, which it would take for the query's dtype
        return f"query, keys and values need one dtype and device, got {', '.join(sorted(map(str, others)))}"
    if not triton_is_installed():
        return "triton is not installed"
    if keys.device.type != "cuda" and not interpreted():
        return f"it runs on CUDA devices, got {keys.device.type!r}"
    if keys.dtype not in (torch.float16, torch.bfloat16) and not interpreted():
        return f"it takes float16 and bfloat16, got {keys.dtype}"  # Triton multiplies float32 in tf32
    if keys.device.type == "cuda" and compute_capability(keys.device) < (8, 0):
        return f"it needs compute capability 8.0, got {'.'.join(map(str, compute_capability(keys.device)))}"
    head_dim, queries = keys.shape[-1], keys.shape[-2]
    if values.shape[-1] != head_dim:
        return f"it needs one head_dim for keys and values, got {head_dim} and {values.shape[-1]}"
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"it takes head_dim up to {MAX_HEAD_DIM} in multiples of 16, got {head_dim}"
    if queries > MAX_QUERIES:
        return f"it takes up to {MAX_QUERIES} queries at once, got {queries}"
    return None


def check_arguments(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    nodes: Tensor,
    suffix: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: Schedule,
    config: Config,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> None:
    """Refuse tensors of other shapes, strides or types than `forest_decode` documents, and numbers out of bounds.

    What addresses point at cannot be looked at, nor the numbers in tensors, which lie on the device. Of the schedule
    it is asked whether it is for so many rows, and cut into the configuration's blocks.

    Raises:
        ValueError: One of them is not as documented.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = new_keys.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"heads must be a multiple of the KV heads, got {heads} and {kv_heads}")
    for name, part in (("query", query), ("new_keys", new_keys), ("new_values", new_values)):
        shape = (rows, heads if part is query else kv_heads, queries, head_dim)
        if part.shape != shape or part.dtype != query.dtype or part.stride(3) != 1:
            raise ValueError(f"{name} must be {_in_words(shape, query.dtype)}, got {_found(part)}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query must be fp16, bf16 or fp32, got {query.dtype}")
    tables: tuple[tuple[str, Tensor | None, tuple[int, ...], torch.dtype], ...] = (
        ("nodes", nodes, (3, *nodes.shape[1:2]), torch.int64),  # of any capacity
        ("suffix", suffix, (4,), torch.int64),
        ("slots", slots, (rows,), torch.int32),
        ("lengths", lengths, (rows,), torch.int32),
        ("sinks", sinks, (heads,), torch.float32),
    )
    for name, table, wanted, dtype in tables:
        if table is None:
            continue
        if table.shape != wanted or table.dtype != dtype or not table.is_contiguous():
            raise ValueError(f"{name} must be {_in_words(wanted, dtype)}, got {_found(table)}")
    if len(schedule.contexts) != rows:
        raise ValueError(f"the schedule must be for the query's {rows} rows, got one for {len(schedule.contexts)}")
    blocks, cut = (config.block_m, config.block_n), (schedule.block_m, schedule.block_n)
    if blocks != cut:
        raise ValueError(f"the schedule must be cut into the configuration's blocks of {blocks}, got {cut}")
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


@lru_cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can take on a CUDA device; what an H200 has where Triton interprets."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a few where Triton interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
