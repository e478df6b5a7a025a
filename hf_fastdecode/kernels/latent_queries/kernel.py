# mypy: ignore-errors
"""The kernel of `api.absorb`: a program multiplies some rows of one head by a block of its weights.

It also rotates the head's queries of a few of these rows, and other blocks those of the others: a program that rotated
all would end last. Programs of one more head normalize a few rows' latents and rotate their keys.
"""

import triton
import triton.language as tl

from ..pointwise.kernel import ROUNDED, follow_previous


@triton.jit
def rotated(
    x,  # where the elements of each row begin: [rows, 1]
    row,  # [rows, 1]
    angles,  # cosines, sines, and their strides
    there,  # [rows, 1]
    pair,  # [1, BLOCK_D]
    ROTARY: tl.constexpr,
    SECOND: tl.constexpr,
    PAIRS: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    """The first and the second element of each pair, rotated."""
    HALF: tl.constexpr = ROTARY // 2
    dtype: tl.constexpr = x.dtype.element_ty
    cos, sin, angle_stride, angle_step = angles
    cos, sin = cos + row * angle_stride, sin + row * angle_stride
    kept = there & (pair < HALF)
    first = tl.load(x + (2 * pair if PAIRS else pair), mask=kept, other=0.0).to(tl.float32)
    second = tl.load(x + (2 * pair + 1 if PAIRS else pair + HALF), mask=kept, other=0.0).to(tl.float32)
    at, later = pair * angle_step, (pair + SECOND) * angle_step
    one = first * tl.load(cos + at, mask=kept, other=0.0).to(tl.float32)
    two = second * tl.load(sin + at, mask=kept, other=0.0).to(tl.float32)
    three = second * tl.load(cos + later, mask=kept, other=0.0).to(tl.float32)
    four = first * tl.load(sin + later, mask=kept, other=0.0).to(tl.float32)
    if ROUNDING == ROUNDED:
        one, two = one.to(dtype).to(tl.float32), two.to(dtype).to(tl.float32)
        three, four = three.to(dtype).to(tl.float32), four.to(dtype).to(tl.float32)
    return (one - two).to(dtype), (three + four).to(dtype)


@triton.jit
def store_pairs(out, pairs, pair, there, ROTARY: tl.constexpr, STAYS: tl.constexpr):
    HALF: tl.constexpr = ROTARY // 2
    kept = there & (pair < HALF)
    tl.store(out + (2 * pair if STAYS else pair), pairs[0], mask=kept)
    tl.store(out + (2 * pair + 1 if STAYS else pair + HALF), pairs[1], mask=kept)


@triton.jit(do_not_specialize=["rows"])
def absorb(
    query,  # [rows, HEADS, KEY + ROTARY], contiguous
    compressed,  # [rows, LATENT + ROTARY], contiguous
    factor,  # [LATENT]
    weight,  # [HEADS, KEY + VALUE, LATENT], contiguous
    cos,  # [rows or 1, ROTARY or ROTARY / 2]
    sin,  # likewise, with the same strides
    absorbed,  # [rows, HEADS, LATENT + ROTARY]
    plain,  # as query
    latents,  # [rows, LATENT]
    keys,  # [rows, ROTARY]
    rows,
    eps,
    angle_stride,
    angle_step,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    ROTARY: tl.constexpr,
    VALUE: tl.constexpr,
    LATENT: tl.constexpr,
    SECOND: tl.constexpr,  # what a pair's second angle is after its first
    PAIRS: tl.constexpr,  # as in `api.Rotation`
    STAYS: tl.constexpr,
    ROUNDING: tl.constexpr,  # of RotaryForm
    BLOCK_M: tl.constexpr,  # rows of a program
    BLOCK_N: tl.constexpr,  # elements of a latent, of a program
    BLOCK_K: tl.constexpr,  # at least KEY
    BLOCK_R: tl.constexpr,  # rows that a block rotates or normalizes: blocks take as many as BLOCK_M, or more
    BLOCK_L: tl.constexpr,  # at least LATENT
    BLOCK_D: tl.constexpr,  # at least ROTARY / 2
    PDL: tl.constexpr,  # it starts while the previous kernel ends (programmatic dependent launch)
):
    head, block = tl.program_id(0), tl.program_id(1)
    first_row = tl.program_id(2) * BLOCK_M
    of_block = first_row + block * BLOCK_R + tl.arange(0, BLOCK_R)
    angles, pair = (cos, sin, angle_stride, angle_step), tl.arange(0, BLOCK_D)[None, :]
    if head < HEADS:
        weight += head.to(tl.int64) * (KEY + VALUE) * LATENT
        multiply_head(
            (query, weight, absorbed, plain),
            first_row + tl.arange(0, BLOCK_M),
            of_block,
            (rows, head, block),
            angles,
            pair,
            HEADS,
            KEY,
            ROTARY,
            LATENT,
            SECOND,
            PAIRS,
            STAYS,
            ROUNDING,
            BLOCK_N,
            BLOCK_K,
            PDL,
        )
    else:
        make_stored(
            (compressed, factor, latents, keys),
            of_block,
            (rows, eps),
            angles,
            pair,
            ROTARY,
            LATENT,
            SECOND,
            PAIRS,
            STAYS,
            ROUNDING,
            BLOCK_L,
            PDL,
        )


@triton.jit
def multiply_head(
    tensors,  # query, the head's weights, absorbed, plain
    row,
    of_block,  # rows whose queries this block rotates
    numbers,  # rows, the head, and the block of a latent
    angles,
    pair,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    ROTARY: tl.constexpr,
    LATENT: tl.constexpr,
    SECOND: tl.constexpr,
    PAIRS: tl.constexpr,
    STAYS: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    query, weight, absorbed, plain = tensors
    rows, head, block = numbers
    row, of_block = row[:, None].to(tl.int64), of_block[:, None].to(tl.int64)
    within, column = tl.arange(0, BLOCK_K), block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    at, kept = within[:, None] * LATENT + column, (within < KEY)[:, None] & (column < LATENT)
    weights = tl.load(weight + at, mask=kept, other=0.0)
    follow_previous(PDL)
    there, number = row < rows, row * HEADS + head
    at, kept = number * (KEY + ROTARY) + within[None, :], there & (within < KEY)[None, :]
    plain_part = tl.load(query + at, mask=kept, other=0.0)
    # Read before the product, so that both wait for memory together.
    rotates, of_head = of_block < rows, of_block * HEADS + head
    rest = of_head * (KEY + ROTARY) + KEY
    pairs = rotated(query + rest, of_block, angles, rotates, pair, ROTARY, SECOND, PAIRS, ROUNDING)
    result = tl.dot(plain_part, weights).to(absorbed.dtype.element_ty)
    tl.store(absorbed + number * (LATENT + ROTARY) + column, result, mask=there & (column < LATENT))
    store_pairs(absorbed + of_head * (LATENT + ROTARY) + LATENT, pairs, pair, rotates, ROTARY, STAYS)
    store_pairs(plain + rest, pairs, pair, rotates, ROTARY, STAYS)
    tl.store(plain + at, plain_part, mask=kept & (block == 0))


@triton.jit
def make_stored(
    tensors,  # compressed, factor, latents, keys
    row,
    numbers,  # rows, and what is added to a mean of squares
    angles,
    pair,
    ROTARY: tl.constexpr,
    LATENT: tl.constexpr,
    SECOND: tl.constexpr,
    PAIRS: tl.constexpr,
    STAYS: tl.constexpr,
    ROUNDING: tl.constexpr,
    BLOCK_L: tl.constexpr,
    PDL: tl.constexpr,
):
    compressed, factor, latents, keys = tensors
    rows, eps = numbers
    row = row[:, None].to(tl.int64)
    dtype: tl.constexpr = latents.dtype.element_ty
    there, element = row < rows, tl.arange(0, BLOCK_L)[None, :]
    factors = tl.load(factor + element, mask=element < LATENT, other=0.0).to(tl.float32)
    follow_previous(PDL)
    given, kept = row * (LATENT + ROTARY), there & (element < LATENT)
    values = tl.load(compressed + given + element, mask=kept, other=0.0).to(tl.float32)
    pairs = rotated(compressed + given + LATENT, row, angles, there, pair, ROTARY, SECOND, PAIRS, ROUNDING)
    store_pairs(keys + row * ROTARY, pairs, pair, there, ROTARY, STAYS)
    mean = tl.sum(values * values, 1)[:, None] / LATENT
    values = (values * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32) * factors
    tl.store(latents + row * LATENT + element, values.to(dtype), mask=kept)
