"""One tensor descriptor for all of a device's memory.

The bulk tensor copy engine of Hopper GPUs reads through descriptors. A kernel that makes one for every node it reads
spends some three microseconds on each before the first byte is asked for. Rows of one length can be found anywhere by
one descriptor instead, whose tensor begins near address zero and covers the whole address space: nothing is read but
the tiles that a kernel asks for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

PLANE = 1 << 30
"""Rows of a plane: a row's index in it must fit 32 bits, like the number of the plane."""

_ADDRESS_BITS = 49  # of CUDA's unified addresses


class _Address(NamedTuple):
    """What Triton asks of a descriptor's tensor; there is none."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@lru_cache
def all_memory(dtype: torch.dtype, block_n: int, head_dim: int) -> Any:
    """A descriptor of all memory as ``[planes, PLANE, head_dim]``, in boxes of ``[1, block_n, head_dim]``.

    The rows at addresses ``b, 2 b, 3 b, ...``, for rows of ``b`` bytes, are rows 0, 1, 2, ... through all
    planes: no tensor may begin at address zero.

    Args:
        dtype: fp16 or bf16.
        block_n: Rows of a box.
        head_dim: Numbers of a row.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.float16: float16, torch.bfloat16: bfloat16}[dtype]
    tile = NVMMASharedLayout.get_default_for([block_n, head_dim], element)
    box = NVMMASharedLayout(tile.swizzle_byte_width, 16, rank=3)
    row = head_dim * dtype.itemsize
    shape = [(1 << _ADDRESS_BITS) // (PLANE * row), PLANE, head_dim]
    strides = [PLANE * head_dim, head_dim, 1]
    return TensorDescriptor(_Address(dtype, row), shape, strides, [1, block_n, head_dim], box)
