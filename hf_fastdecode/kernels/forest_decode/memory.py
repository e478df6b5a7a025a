"""One TMA descriptor for the whole address space.

TMA, the bulk tensor copy engine of Hopper GPUs, reads through descriptors. Making one per node costs a kernel some
microseconds before its first load. One descriptor whose tensor begins near address zero and covers all memory finds
rows of one length anywhere; only the tiles that a kernel loads are read.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:  # only some versions of Triton have it
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PLANE = 1 << 30
"""Rows per plane: indices of rows and planes must fit 32 bits."""

ADDRESS_BITS = 49
"""Bits of an address on a GPU."""


class _Address(NamedTuple):
    """Stands for a descriptor's tensor: has what Triton reads of one."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@lru_cache
def all_memory(dtype: torch.dtype, block_n: int, head_dim: int, plane: int) -> TensorDescriptor:
    """A descriptor of all memory as ``[planes, plane, head_dim]``, in boxes of ``[1, block_n, head_dim]``.

    For rows of ``b`` bytes, address ``(i + 1) b`` is row ``i`` counted through all planes, because no tensor may begin
    at address zero.

    Args:
        dtype: fp16 or bf16.
        block_n: Rows per box.
        head_dim: Numbers per row.
        plane: Rows per plane.
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
