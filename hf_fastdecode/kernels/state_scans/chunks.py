# mypy: ignore-errors
"""Chunks of the segments of a packed row, and products with the error of fp32.

Chunks have slots: segment ``s`` has those from ``starts[s] // CHUNK + s`` on, of which the last may be of no chunk. So
a kernel finds its tokens in `starts` alone, and no length is a compile-time argument.
"""

import triton
import triton.language as tl

from ..device import interpreted
from . import api

CHUNK = tl.constexpr(api.CHUNK)
FACTORS = tl.constexpr(api.FACTORS)
SUMMED = tl.constexpr(64)  # products that tensor cores add up, of factors in fp32

# Triton's interpreter takes the bits of bf16 operands of a dot for integers.
_HELD_IN = tl.constexpr(tl.float32 if interpreted() else tl.bfloat16)


@triton.jit
def chunk_of(slot, starts, segments):
    """The segment of a slot, its start and end, and the first token of its chunk, past the end if it has none."""
    low, high = slot * 0, segments + slot * 0
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) // CHUNK + middle <= slot
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    start, end = tl.load(starts + low), tl.load(starts + low + 1)
    return low, start, end, start + (slot - start // CHUNK - low) * CHUNK


@triton.jit
def product(a, b, PARTS: tl.constexpr):
    """``a @ b`` in fp32, by tensor cores: factors are sums of parts in bf16, each of what earlier ones leave.

    A factor in bf16 is one part, one in fp16 two and one in fp32 three. Products of parts that are smaller than the
    first one of part ``PARTS`` are left out: three make the error that of fp32, two that of 16 bits.

    Tensor cores cut off what sums have beyond fp32 (Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA
    tensor cores, 2021), so that long ones come out too small; those of two factors in fp32 are made of short ones.
    """
    if a.dtype == tl.float32 and b.dtype == tl.float32 and a.shape[1] > SUMMED:
        a_low, a_high = tl.split(tl.permute(tl.reshape(a, [a.shape[0], 2, a.shape[1] // 2]), [0, 2, 1]))
        b_low, b_high = tl.split(tl.permute(tl.reshape(b, [2, b.shape[0] // 2, b.shape[1]]), [1, 2, 0]))
        return product(a_low, b_low, PARTS) + product(a_high, b_high, PARTS)
    A_PARTS: tl.constexpr = 1 if a.dtype == tl.bfloat16 else (2 if a.dtype == tl.float16 else PARTS)
    B_PARTS: tl.constexpr = 1 if b.dtype == tl.bfloat16 else (2 if b.dtype == tl.float16 else PARTS)
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    for first in tl.static_range(A_PARTS - 1, -1, -1):  # the smallest products first
        left = a if A_PARTS == 1 else a.to(tl.float32)
        for _ in tl.static_range(first):
            left -= left.to(tl.bfloat16).to(tl.float32)
        for second in tl.static_range(B_PARTS - 1, -1, -1):
            right = b if B_PARTS == 1 else b.to(tl.float32)
            for _ in tl.static_range(second):
                right -= right.to(tl.bfloat16).to(tl.float32)
            if first + second < PARTS:
                total = tl.dot(left.to(tl.bfloat16).to(_HELD_IN), right.to(tl.bfloat16).to(_HELD_IN), total)
    return total
