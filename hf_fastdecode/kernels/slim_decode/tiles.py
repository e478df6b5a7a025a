# mypy: ignore-errors
"""Tiles of cached numbers: dequantised from 8 bits in registers, and multiplied by weights into averages in fp32."""

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


@triton.jit
def add_tile(acc, rescale, weights, tile, PARTS: tl.constexpr, APART: tl.constexpr, WIDE: tl.constexpr):
    """``acc * rescale + weights @ tile``; weights ``[H, T]`` fp32 are multiplied in PARTS parts of the tile's dtype.

    APART adds the product of a tile outside the matrix unit, whose accumulators truncate: errors of a column are
    magnified by the matrix from keys to values, unlike errors of a weight, which all columns share.
    """
    element = tile.dtype
    wide: tl.constexpr = tl.float32 if WIDE else element
    coarse = weights.to(element)
    if APART:
        part = tl.zeros(acc.shape, tl.float32)
    else:
        part = acc * rescale[:, None]
    if PARTS == 2:
        fine = (weights - coarse.to(tl.float32)).to(element)
        part = tl.dot(fine.to(wide), tile.to(wide), part, input_precision="ieee")
    part = tl.dot(coarse.to(wide), tile.to(wide), part, input_precision="ieee")
    if APART:
        part = tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), part)
    return part


@triton.jit
def add_scaled_tile(acc, rescale, weights, tile, unit, PARTS: tl.constexpr):
    """``acc * rescale + weights @ tile * unit`` for a tile in fp32 that was dequantised, over its unit.

    A number of 8 bits times its scale has up to 15 bits, and fp16 has 11. Two PARTS of fp16 hold both operands; the
    product of the fine parts is below the precision of fp32. One part rounds both to fp16.
    """
    coarse = tile.to(tl.float16)
    coarse_weights = weights.to(tl.float16)
    part = tl.zeros(acc.shape, tl.float32)
    if PARTS == 2:
        fine = (tile - coarse.to(tl.float32)).to(tl.float16)
        fine_weights = (weights - coarse_weights.to(tl.float32)).to(tl.float16)
        part = tl.dot(fine_weights, coarse, part, input_precision="ieee")
        part = tl.dot(coarse_weights, fine, part, input_precision="ieee")
    part = tl.dot(coarse_weights, coarse, part, input_precision="ieee")
    return tl.fma(acc, tl.broadcast_to(rescale[:, None], acc.shape), part * unit)
