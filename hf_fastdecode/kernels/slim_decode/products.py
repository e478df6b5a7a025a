# mypy: ignore-errors
"""Products of weights and a tile of cached numbers, added to averages in fp32."""

import triton
import triton.language as tl


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
