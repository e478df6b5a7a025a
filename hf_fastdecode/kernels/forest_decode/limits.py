"""What the decode kernels support, and the checks of their arguments.

Checks raise ValueError against out-of-bounds accesses and division by zero. Addresses and the contents of device
tensors are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ..device import compute_capability, interpreted, shared_memory, triton_is_installed
from ..failures import Kernel, failure

if TYPE_CHECKING:
    from .config import Config  # it imports triton, which may be missing
    from .schedule import Schedule


MAX_QUERIES = 16
MAX_HEAD_DIM = 256
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
    others = {(part.dtype, part.device) for part in (query, keys, values, *stored)}
    if len(others) > 1:  # keys are read through raw addresses, as the query's dtype
        return f"query, keys and values need one dtype and device, got {', '.join(sorted(map(str, others)))}"
    if reason := refusal_of_any_shape(keys, query, values, *stored, *([sinks] if sinks is not None else [])):
        return reason
    head_dim, queries = keys.shape[-1], keys.shape[-2]
    if queries > MAX_QUERIES:
        return f"it takes up to {MAX_QUERIES} queries at once, got {queries}"
    if (rest := query.shape[-1] - head_dim) > 0 and values.shape[-1] == rest:  # latents
        if head_dim % 16 or rest % 8 or head_dim > MAX_LATENT:
            return f"it takes latents up to {MAX_LATENT} in multiples of 16 and 8, got {head_dim} and {rest}"
        packed, most = query.shape[1] // keys.shape[1] * queries, most_packed_of_latents(keys.device)
        if packed > most:
            return f"it takes up to {most} queries of a group of heads over latents at once here, got {packed}"
        return failure(Kernel.FOREST, keys.device)
    if values.shape[-1] != head_dim:
        return f"it needs one head_dim for keys and values, got {head_dim} and {values.shape[-1]}"
    if rest > 0 and rest % 8:
        return f"it takes numbers of keys that all heads share in multiples of 8, got {rest}"
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"it takes head_dim up to {MAX_HEAD_DIM} in multiples of 16, got {head_dim}"
    return failure(Kernel.FOREST, keys.device)


HALF_PRECISION: Final = (torch.float16, torch.bfloat16)


def refusal_of_any_shape(keys: Tensor, *others: Tensor, dtypes: Sequence[torch.dtype] = HALF_PRECISION) -> str | None:
    """Why attention kernels do not support cached keys of this dtype and device, or gradients; None when they do.

    Args:
        keys: Cached keys.
        others: Other tensors of the call.
        dtypes: Dtypes that the keys may have; any where Triton interprets.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in (keys, *others)):
        return "it computes no gradients; call it under torch.no_grad()"
    if not triton_is_installed():
        return "triton is not installed"
    if keys.device.type != "cuda" and not interpreted():
        return f"it runs on CUDA devices, got {keys.device.type!r}"
    if keys.dtype not in dtypes and not interpreted():  # Triton's dot computes float32 in tf32
        *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"it takes {', '.join(names)} and {last}, got {keys.dtype}"
    if keys.device.type == "cuda" and compute_capability(keys.device) < (8, 0):
        return f"it needs compute capability 8.0, got {'.'.join(map(str, compute_capability(keys.device)))}"
    return None


def most_packed_of_latents(device: torch.device) -> int:
    """Most packed queries of a group of heads over latents that fit a program's shared memory, found by compiling."""
    return 64 if shared_memory(device) >= 160 * 1024 else 16


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
