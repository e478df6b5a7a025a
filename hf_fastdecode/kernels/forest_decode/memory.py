"""One tensor descriptor for the whole address space.

The bulk tensor copy engine of Hopper GPUs reads through descriptors. A kernel that makes one for every node it reads
spends some microseconds on each before the first byte is asked for. Rows of one length can be found anywhere by one
descriptor instead, whose tensor begins near address zero and covers everything: nothing is read but the tiles that a
kernel asks for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:  # only some versions of Triton have it
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PLANE = 1 << 30
"""Rows of a plane: a row's index in it must fit 32 bits, like the number of the plane."""

ADDRESS_BITS = 49
"""Of addresses on a GPU."""


class _Address(NamedTuple):
    """What Triton asks of a descriptor's tensor; there is none."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@lru_cache
def all_memory(dtype: torch.dtype, block_n: int, head_dim: int, plane: int) -> TensorDescriptor:
    """A descriptor of all memory as ``[planes, plane, head_dim]``, in boxes of ``[1, block_n, head_dim]``.

    The rows at addresses ``b, 2 b, 3 b, ...``, for rows of ``b`` bytes, are rows 0, 1, 2, ... through all planes: no
    tensor may begin at address zero.

    Args:
        dtype: fp16 or bf16.
        block_n: Rows of a box.
        head_dim: Numbers of a row.
        plane: Rows of a plane.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.float16: float16, torch.bfloat16: bfloat16}[dtype]
    tile = NVMMASharedLayout.get_default_for([block_n, head_dim], element)
    box = NVMMASharedLayout(tile.swizzle_byte_width, 16, rank=3)
    row = head_dim * dtype.itemsize
    shape = [(1 << ADDRESS_BITS) // (plane * row), plane, head_dim]
    strides = [plane * head_dim, head_dim, 1]
    return TensorDescriptor(_Address(dtype, row), shape, strides, [1, block_n, head_dim], box)
