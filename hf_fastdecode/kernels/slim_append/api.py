"""`append_token`: what a captured step does between a slim layer's projections and `slim_decode`, in one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..ahead import launch
from ..failures import Kernel, launching
from .kernel import append_token as kernel

_HEADS = 8  # of a program that rotates
_NUMBERS = 1024  # of a program that stores


def append_token(
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    key_offset: Tensor,
    tables: tuple[Tensor, Tensor],
    slots: Tensor,
    stored: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotate the query of each row, and store its key and V-coordinates.

    Args:
        query: ``[rows, heads, head_dim]``, contiguous, in any floating dtype.
        keys: ``[rows, heads * head_dim]`` fp32, contiguous, before RoPE.
        coordinates: ``[rows, r]`` fp32, contiguous; r may be 0.
        key_offset: ``[heads * head_dim]`` fp32, which cached keys leave out.
        tables: cos and sin of the rows' positions, ``[rows or 1, rotary]`` fp32, contiguous: RoPE by halves of a
            head's first elements ("rotate half").
        slots: ``[rows]`` int64: where each row's token is stored.
        stored: Cached keys ``[rows, slots, heads * head_dim]`` and V-coordinates ``[rows, slots, r]``, fp32, fp16 or
            bf16, the last dimension contiguous.

    Returns:
        Rotated queries ``[rows, heads, head_dim]`` in fp32.

    Raises:
        ValueError: Shapes or strides are others.
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    rows, heads, head_dim = query.shape
    rank, rotary = coordinates.shape[-1], tables[0].shape[-1]
    contiguous = (query, keys, coordinates, key_offset, *tables, slots)
    shapes = keys.shape == (rows, heads * head_dim) and coordinates.shape == (rows, rank) and slots.shape == (rows,)
    shapes = shapes and tables[0].shape == tables[1].shape and len(tables[0]) in (1, rows) and 0 < rotary <= head_dim
    shapes = shapes and rotary % 2 == 0 and key_offset.shape == (heads * head_dim,)
    caches = all(
        part.shape == (rows, stored[0].shape[1], width) and part.stride(-1) == 1
        for part, width in zip(stored, (heads * head_dim, rank), strict=True)
        if width
    )
    if not (shapes and caches and all(part.is_contiguous() for part in contiguous)):
        given = [tuple(part.shape) for part in (query, keys, coordinates, key_offset, *tables, slots, *stored)]
        raise ValueError(f"append_token takes contiguous tensors of one token per row, as documented, got {given}")
    rotated = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    with launching(Kernel.APPEND, query.device):
        launch(
            kernel,
            (rows, triton.cdiv(heads, _HEADS) + triton.cdiv(heads * head_dim, _NUMBERS) + triton.cdiv(rank, _NUMBERS)),
            query,
            keys,
            coordinates if rank else keys,
            key_offset,
            *tables,
            slots,
            rotated,
            stored[0],
            stored[1] if rank else stored[0],
            rotary if len(tables[0]) > 1 else 0,
            *stored[0].stride()[:2],
            *stored[1].stride()[:2],
            HEADS=heads,
            HEAD_DIM=head_dim,
            ROTARY=rotary,
            RANK=rank,
            BLOCK_H=_HEADS,
            BLOCK_D=triton.next_power_of_2(rotary // 2),
            BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotary)),
            BLOCK=_NUMBERS,
        )
    return rotated
