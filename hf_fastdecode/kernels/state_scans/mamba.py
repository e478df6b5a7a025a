# mypy: ignore-errors
"""The kernels of Mamba-2's scan over many tokens. Sums, decays and states are in fp32.

`relate` makes what tokens of a chunk have in common, for all chunks at once: products of what they read with what
they are given, and decays. In `scan` a program has some of a head's width, and goes through a segment by chunks: it
adds what a chunk's tokens and the state before give to each token, then moves the state on, which stays in registers.
Programs are independent: a prompt of Nemotron-H-8B has 256 of them, which run at once on an H200. If these chunks ran
in parallel too, as in section 6 of the paper, their states in fp32 would be written and read twice: a gigabyte per
layer for 4,096 tokens, which takes longer.
"""

import triton
import triton.language as tl

from ..pointwise.kernel import follow_previous
from ..state_steps.kernel import softplus
from .chunks import CHUNK, FACTORS, chunk_of, product

# Factors of a chunk's tokens. Sums of decays have two parts: their differences are as exact as sums of those between.
HIGH = tl.constexpr(0)  # of the logarithms of decays up to a token
LOW = tl.constexpr(1)
STEP = tl.constexpr(2)
WRITE = tl.constexpr(3)  # of what a token adds to the state after the chunk
DECAY = tl.constexpr(4)  # of the state before the chunk, up to a token


@triton.jit(do_not_specialize=["segments"])
def relate(
    steps,  # [tokens, HEADS]
    rates,  # [HEADS]: those of the decay, negative
    inputs,  # [tokens, groups, SIZE], contiguous along SIZE (B)
    outputs,  # likewise (C)
    biases,  # [HEADS], of the steps
    starts,  # [segments + 1], int32: the first token of each segment, and the count of tokens
    related,  # [slots, groups, CHUNK, CHUNK] fp32
    factors,  # [slots, HEADS, FACTORS, CHUNK] fp32
    segments,
    step_stride,  # of tokens
    step_head_stride,
    input_stride,
    input_group_stride,
    output_stride,
    output_group_stride,
    least,  # of a step
    most,  # likewise
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share inputs and outputs
    SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr,  # at least SIZE
    PARTS: tl.constexpr,  # of factors in fp32, see `product`
    PDL: tl.constexpr,
):
    slot, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    follow_previous(PDL)
    _, _, end, first = chunk_of(slot, starts, segments)
    if first >= end:
        return
    at, along_s = tl.arange(0, CHUNK), tl.arange(0, BLOCK_S)
    token = first + at.to(tl.int64)
    here = token < end
    step = tl.load(steps + token * step_stride + head * step_head_stride, mask=here, other=0.0).to(tl.float32)
    step = softplus(step + tl.load(biases + head).to(tl.float32))
    step = tl.maximum(step, least, propagate_nan=tl.PropagateNan.ALL)
    step = tl.where(here, tl.minimum(step, most, propagate_nan=tl.PropagateNan.ALL), 0.0)
    decay = tl.cumsum((step * tl.load(rates + head).to(tl.float32)).to(tl.float64), 0)
    whole = tl.sum(tl.where(at == CHUNK - 1, decay, 0.0), 0)
    high = decay.to(tl.float32)
    factor = factors + (slot.to(tl.int64) * HEADS + head) * (FACTORS * CHUNK) + at
    tl.store(factor + HIGH * CHUNK, high)
    tl.store(factor + LOW * CHUNK, (decay - high.to(tl.float64)).to(tl.float32))
    tl.store(factor + STEP * CHUNK, step)
    # In fp64: errors of chunks' decays multiply up, and a GPU's exp in fp32 errs alike for decays that are alike.
    tl.store(factor + WRITE * CHUNK, step * tl.exp(whole - decay).to(tl.float32))
    tl.store(factor + DECAY * CHUNK, tl.exp(decay).to(tl.float32))
    if head % GROUP == 0:
        group = head // GROUP
        kept = here[:, None] & (along_s < SIZE)[None, :]
        given = inputs + group * input_group_stride + token[:, None] * input_stride + along_s[None, :]
        read = outputs + group * output_group_stride + token[:, None] * output_stride + along_s[None, :]
        given, read = tl.load(given, mask=kept, other=0.0), tl.load(read, mask=kept, other=0.0)
        tile = related + (slot.to(tl.int64) * (HEADS // GROUP) + group) * (CHUNK * CHUNK)
        tl.store(tile + at[:, None] * CHUNK + at[None, :], product(read, tl.trans(given), PARTS))


@triton.jit(do_not_specialize=["resumed"])
def scan(
    x,  # [tokens, HEADS, WIDTH], contiguous along WIDTH
    inputs,  # [tokens, groups, SIZE], contiguous along SIZE (B)
    outputs,  # likewise (C)
    skips,  # [HEADS] (D)
    starts,  # [segments + 1], int32
    related,  # see `relate`
    factors,  # likewise
    before,  # [segments, HEADS, WIDTH, SIZE], contiguous; not read unless resumed
    out,  # [tokens, HEADS, WIDTH], contiguous, fp32
    after,  # [segments, HEADS, WIDTH, SIZE], likewise
    x_stride,  # of tokens
    x_head_stride,
    input_stride,
    input_group_stride,
    output_stride,
    output_group_stride,
    resumed,  # whether segments begin with states; zeros if not
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,  # of a program
    BLOCK_S: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,  # chunks in flight
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % HEADS
    segment = tl.program_id(0) // (BLOCKS * HEADS)
    at, along_s, along_w = tl.arange(0, CHUNK), tl.arange(0, BLOCK_S), block * BLOCK_W + tl.arange(0, BLOCK_W)
    in_s, in_w = along_s < SIZE, along_w < WIDTH
    follow_previous(PDL)
    place = ((segment.to(tl.int64) * HEADS + head) * WIDTH + along_w)[None, :] * SIZE + along_s[:, None]
    kept = in_s[:, None] & in_w[None, :]
    state = tl.load(before + place, mask=kept & (resumed != 0), other=0.0).to(tl.float32)
    skip = tl.load(skips + head).to(tl.float32)
    start, end = tl.load(starts + segment), tl.load(starts + segment + 1)
    slot = (start // CHUNK + segment).to(tl.int64)
    x_tile = x + head * x_head_stride + along_w[None, :]
    input_tile = inputs + head // GROUP * input_group_stride + along_s[None, :]
    output_tile = outputs + head // GROUP * output_group_stride + along_s[None, :]
    tile = related + head // GROUP * (CHUNK * CHUNK) + at[:, None] * CHUNK + at[None, :]
    factors += head * (FACTORS * CHUNK)
    for first in tl.range(start, end, CHUNK, num_stages=STAGES):
        token = first + at.to(tl.int64)
        here = (token < end)[:, None]
        given = tl.load(input_tile + token[:, None] * input_stride, mask=here & in_s[None, :], other=0.0)
        read = tl.load(output_tile + token[:, None] * output_stride, mask=here & in_s[None, :], other=0.0)
        number = tl.load(x_tile + token[:, None] * x_stride, mask=here & in_w[None, :], other=0.0)
        weight = tl.load(tile + slot * (HEADS // GROUP * CHUNK * CHUNK))
        factor = factors + slot * (HEADS * FACTORS * CHUNK)
        high, low = tl.load(factor + HIGH * CHUNK + at), tl.load(factor + LOW * CHUNK + at)
        step, write = tl.load(factor + STEP * CHUNK + at), tl.load(factor + WRITE * CHUNK + at)
        decay, whole = tl.load(factor + DECAY * CHUNK + at), tl.load(factor + DECAY * CHUNK + CHUNK - 1)
        # What tokens of the chunk give to later ones, and the state before it to all.
        between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        weight = tl.where(at[:, None] >= at[None, :], weight * tl.exp(between) * step[None, :], 0.0)
        found = product(weight, number, PARTS)
        found += product(read, state, PARTS) * decay[:, None] + skip * number.to(tl.float32)
        state = state * whole + product(tl.trans(given), number.to(tl.float32) * write[:, None], PARTS)
        tl.store(out + (token[:, None] * HEADS + head) * WIDTH + along_w[None, :], found, mask=here & in_w[None, :])
        slot += 1
    tl.store(after + place, state, mask=kept)
