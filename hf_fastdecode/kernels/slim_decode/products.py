# mypy: ignore-errors
"""Products of weights and a tile of cached numbers, added to averages in fp32."""

import triton
import triton.language as tl


@triton.jit
def add_tile(
    acc, rescale, weights, tile, PARTS: tl.constexpr, APART: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr
):
    """``acc * rescale + weights @ tile``; weights ``[H, T]`` fp32 are multiplied in PARTS parts of the tile's dtype.

    APART adds the product of a tile outside the matrix unit, whose accumulators truncate: errors of a column are
    magnified by the matrix from keys to values, unlike errors of a weight, which all columns share.
    """
    element = tile.dtype
    wide: tl.constexpr = tl.float32 if WIDE else element
    coarse = weights.to(element)
    operand = tl.trans(tile) if TRANSPOSED else tile
    factor = rescale[None, :] if TRANSPOSED else rescale[:, None]
    if APART:
        part = tl.zeros(acc.shape, tl.float32)
    else:
        part = acc * factor
    if PARTS == 2:
        fine = (weights - coarse.to(tl.float32)).to(element)
        part = multiply(fine.to(wide), operand.to(wide), part, TRANSPOSED)
    part = multiply(coarse.to(wide), operand.to(wide), part, TRANSPOSED)
    if APART:
        part = tl.fma(acc, tl.broadcast_to(factor, acc.shape), part)
    return part


@triton.jit
def multiply(weights, operand, acc, TRANSPOSED: tl.constexpr):
    """``acc + weights @ tile``, or its transpose."""
    if TRANSPOSED:
        acc = tl.dot(operand, tl.trans(weights), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights, operand, acc, input_precision="ieee")
    return acc


@triton.jit
def add_scaled_tile(acc, rescale, weights, tile, unit, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """``acc * rescale + weights @ tile * unit`` for a tile in fp32 that was dequantised, over its unit.

    A number of 8 bits times its scale has up to 15 bits, and fp16 has 11. Two PARTS of fp16 hold both operands; the
    product of the fine parts is below the precision of fp32. One part rounds both to fp16.
    """
    coarse = tile.to(tl.float16)
    coarse_weights = weights.to(tl.float16)
    operand = tl.trans(coarse) if TRANSPOSED else coarse
    part = tl.zeros(acc.shape, tl.float32)
    if PARTS == 2:
        fine = (tile - coarse.to(tl.float32)).to(tl.float16)
        fine_weights = (weights - coarse_weights.to(tl.float32)).to(tl.float16)
        part = multiply(fine_weights, operand, part, TRANSPOSED)
        part = multiply(coarse_weights, tl.trans(fine) if TRANSPOSED else fine, part, TRANSPOSED)
    part = multiply(coarse_weights, operand, part, TRANSPOSED)
    factor = rescale[None, :] if TRANSPOSED else rescale[:, None]
    return tl.fma(acc, tl.broadcast_to(factor, acc.shape), part * unit)
