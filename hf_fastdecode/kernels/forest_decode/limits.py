"""Limits of the decode kernels, and checks of their arguments.

Checks raise ValueError, see `kernels.limits`. Addresses are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..device import shared_memory
from ..failures import Kernel, failure
from ..limits import MAX_HEAD_DIM, check_query, check_rows, check_table, refusal_of_any_shape, refusal_of_mixture
from .config import Config
from .schedule import Schedule

MAX_QUERIES = 16
MAX_LATENT = 512


def refusal(
    query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[Tensor], sinks: Tensor | None = None
) -> str | None:
    """Why `forest_decode` does not support these tensors; None when it does.

    Args:
        query: ``[rows, heads, queries, head_dim]``, then the elements for the key part that all heads share.
        keys: New keys ``[rows, kv_heads, queries, head_dim]``, or latents.
        values: New values, or of latents the keys' other elements.
        stored: Keys and values of suffixes and node segments.
        sinks: The layer's attention sinks, if any.
    """
    if reason := refusal_of_mixture((query, keys, values, *stored)):
        return reason
    if reason := refusal_of_any_shape(keys, query, values, *stored, *([sinks] if sinks is not None else [])):
        return reason
    head_dim, queries = keys.shape[-1], keys.shape[-2]
    if queries > MAX_QUERIES:
        return f"it takes up to {MAX_QUERIES} queries at once, got {queries}"
    if (further := query.shape[-1] - head_dim) > 0 and values.shape[-1] == further:  # latents
        if head_dim % 16 or further % 8 or head_dim > MAX_LATENT:
            return f"it takes latents up to {MAX_LATENT} in multiples of 16 and 8, got {head_dim} and {further}"
        packed, most = query.shape[1] // keys.shape[1] * queries, most_packed_of_latents(keys.device)
        if packed > most:
            return f"it takes up to {most} queries of a group of heads over latents at once here, got {packed}"
        return failure(Kernel.FOREST, keys.device)
    if reason := refusal_of_heads(keys, values):
        return reason
    if further > 0 and further % 8:
        return f"it takes elements of keys that all heads share in multiples of 8, got {further}"
    return failure(Kernel.FOREST, keys.device)


def refusal_of_heads(keys: Tensor, values: Tensor) -> str | None:
    """Why attention kernels do not support heads of this size; None when they do."""
    head_dim = keys.shape[-1]
    if values.shape[-1] != head_dim:
        return f"it needs one head_dim for keys and values, got {head_dim} and {values.shape[-1]}"
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"it takes head_dim up to {MAX_HEAD_DIM} in multiples of 16, got {head_dim}"
    return None


def most_packed_of_latents(device: torch.device) -> int:
    """Most packed queries of a group of heads over latents that fit a program's shared memory, found by compiling."""
    return 64 if shared_memory(device) >= 160 * 1024 else 16


def check_tokens(query: Tensor, keys: Tensor, values: Tensor) -> None:
    """Check shapes, strides and dtypes of queries, new keys and new values."""
    rows, _, queries, width = query.shape
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    check_query(query, kv_heads)
    if head_dim >= width:
        head_dim = width
    check_rows("new_keys", keys, (rows, kv_heads, queries, head_dim), query.dtype)
    check_rows("new_values", values, (rows, kv_heads, queries, width - head_dim or head_dim), query.dtype)


def check_step(
    shape: tuple[int, ...],
    tables: tuple[Tensor, Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    biases: Tensor | None,
    origins: Tensor | None,
) -> None:
    """Check the tables of a step whose result is of this shape.

    Args:
        tables: Nodes, suffix, slots and lengths.
    """
    rows, heads, _, _ = shape
    nodes, suffix, slots, lengths = tables
    check_table("nodes", nodes, (3, *nodes.shape[1:2]), torch.int64)
    check_table("suffix", suffix, (4,), torch.int64)
    check_table("slots", slots, (rows,), torch.int32)
    check_table("lengths", lengths, (3, rows) if lengths.dim() > 1 else (rows,), torch.int32)
    check_table("sinks", sinks, (heads,), torch.float32)
    if origins is not None:
        check_table("origins", origins, (rows, *origins.shape[1:2]), torch.int32)
    if biases is not None:
        check_table("biases", biases, (heads, *biases.shape[1:2]), torch.float32)


def check_combination(*, divided: bool, soft_cap: float | None, window: int | None, biases: Tensor | None) -> None:
    """Check that a step has no window or biases where keys are elsewhere, and no biases with a soft cap."""
    if biases is not None and (divided or soft_cap is not None or not biases.shape[1]):
        raise ValueError("biases by distance need whole suffixes, no soft cap and at least one bias")
    if window is not None and divided:
        raise ValueError(f"a window of {window} tokens cannot count keys on other devices; give it whole suffixes")


def check_partial(name: str, partial: tuple[Tensor, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check a partial of this shape, whose ``out`` is in fp32 or `dtype`."""
    out, lse = partial
    check_table(f"{name}[0]", out, shape, out.dtype if out.dtype == dtype else torch.float32)
    check_table(f"{name}[1]", lse, shape[:-1], torch.float32)


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
