# mypy: ignore-errors
"""Numbers in 8 bits, dequantised in registers: device memory holds no other form of them."""

import triton
import triton.language as tl


@triton.jit
def load_scale_bytes(scales, token, limit, stride, group, valid):
    """Load scales ``[T, groups]`` of tokens below a limit in two bytes, since they may begin at odd addresses.

    Triton prefetches no loads this small, so kernels load them a tile ahead.
    """
    at = scales + token.to(tl.int64)[:, None] * stride + 2 * group[None, :]
    mask = (token < limit)[:, None] & valid[None, :]
    return tl.load(at, mask=mask, other=0), tl.load(at + 1, mask=mask, other=0)


@triton.jit
def joined_bytes(low, high):
    """Scales in fp32 from the bytes of bf16."""
    return ((low.to(tl.int32) << 16) | (high.to(tl.int32) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def plain_numbers(numbers, FP8: tl.constexpr):
    """Convert loaded int8, or bytes of float8_e4m3fn, to fp32 before their scales."""
    if FP8:
        numbers = numbers.to(tl.float8e4nv, bitcast=True)
    return numbers.to(tl.float32)


@triton.jit
def tile_unit(scales):
    """Power of 2 near the largest scale ``[T, groups]`` of a tile, and its inverse.

    Numbers over the unit are below 1,024 and fit in fp16, which has less range than the scales.
    """
    exponent = tl.max(tl.max(scales, 1), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)  # whose inverse is a normal number too
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_blocks(numbers, scales, T: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply numbers ``[T, BLOCKS * COLUMNS]`` by the scales ``[T, BLOCKS]`` of each block of columns."""
    numbers = tl.reshape(numbers, [T, BLOCKS, COLUMNS]) * scales[:, :, None]
    return tl.reshape(numbers, [T, BLOCKS * COLUMNS])
