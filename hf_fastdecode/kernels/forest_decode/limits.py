"""What the decode kernels support, and the device properties they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from ..failures import Kernel, failure
from ..installed import interpreted, triton_is_installed

MAX_QUERIES = 16
MAX_HEAD_DIM = 256
MAX_LATENT = 512


def refusal(
    query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[Tensor], sinks: Tensor | None = None
) -> str | None:
    """Why `forest_decode` does not support these tensors; None when it does.

    Args:
        query: ``[rows, heads, queries, head_dim]``, and behind these the numbers that meet those of keys of all heads.
        keys: New keys ``[rows, kv_heads, queries, head_dim]``, or latents.
        values: New values, or of latents the keys' other numbers.
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


@lru_cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels that may start while the previous one ends (programmatic dependent launch, PDL)."""
    overlaps = device.type == "cuda" and not interpreted() and compute_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per program on a CUDA device; an H200's where Triton interprets."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def most_packed_of_latents(device: torch.device) -> int:
    """Most packed queries of a group of heads over latents that fit a program's shared memory, found by compiling."""
    return 64 if shared_memory(device) >= 160 * 1024 else 16


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 4 where Triton interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
