# mypy: ignore-errors
"""Kernels of one step of short convolutions, the gated delta rule and Mamba-2. Sums are in fp32.

With PDL (programmatic dependent launch) they start while the previous kernel ends. States are read before it has: what
has written them ended before the previous kernel told this one to start.
"""

import triton
import triton.language as tl

from ..pointwise.kernel import follow_previous


@triton.jit
def convolve(
    x,  # [rows, CHANNELS]
    states,  # [rows, CHANNELS, LENGTH], contiguous: the latest inputs, which move by one position
    weight,  # [CHANNELS, TAPS], contiguous
    bias,  # [CHANNELS]; not read unless BIASED
    out,  # [rows, CHANNELS], contiguous
    row_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,  # at most LENGTH + 1
    BIASED: tl.constexpr,
    SILU: tl.constexpr,  # whether it follows
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    kept = channel < CHANNELS
    dtype: tl.constexpr = out.dtype.element_ty
    follow_previous(PDL)
    new = tl.load(x + row * row_stride + channel * channel_stride, mask=kept, other=0.0)
    state = states + (row * CHANNELS + channel) * LENGTH
    total = tl.zeros([BLOCK], tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=kept, other=0.0).to(tl.float32)
    FIRST: tl.constexpr = LENGTH + 1 - TAPS
    for index in tl.static_range(LENGTH + 1):
        number = new
        if index < LENGTH:
            number = tl.load(state + index, mask=kept, other=0.0)
        if index > 0:
            tl.store(state + index - 1, number, mask=kept)
        if index >= FIRST:
            factor = tl.load(weight + channel * TAPS + index - FIRST, mask=kept, other=0.0).to(tl.float32)
            total += factor * number.to(tl.float32)
    total = total.to(dtype)
    if SILU:
        wide = total.to(tl.float32)
        total = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    tl.store(out + row * CHANNELS + channel, total, mask=kept)


@triton.jit
def delta_rule(
    queries,  # [rows, heads, K], contiguous along K
    keys,  # likewise
    values,  # [rows, HEADS, V], contiguous along V
    decays,  # [rows, HEADS], logarithms
    betas,  # [rows, HEADS]
    rates,  # [HEADS]; not read unless PROJECTED
    biases,  # [HEADS], likewise
    states,  # [rows, HEADS, K, V], contiguous
    out,  # [rows, HEADS, V], contiguous
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    decay_row_stride,
    beta_row_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of values that share a query and a key
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K
    PROJECTED: tl.constexpr,  # decays and betas are projections, of which these are made here
    BLOCK_V: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % HEADS
    row = (tl.program_id(0) // (BLOCKS * HEADS)).to(tl.int64)
    along_k, along_v = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = along_k < K, along_v < V
    kept = in_k[:, None] & in_v[None, :]
    pointers = states + ((row * HEADS + head) * K + along_k)[:, None] * V + along_v[None, :]
    state = tl.load(pointers, mask=kept, other=0.0).to(tl.float32)
    follow_previous(PDL)
    shared = head // GROUP
    query = tl.load(queries + row * query_row_stride + shared * query_head_stride + along_k, mask=in_k, other=0.0)
    key = tl.load(keys + row * key_row_stride + shared * key_head_stride + along_k, mask=in_k, other=0.0)
    value = tl.load(values + row * value_row_stride + head * value_head_stride + along_v, mask=in_v, other=0.0)
    query, key, value = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    query = query * (tl.rsqrt(tl.sum(query * query, 0) + eps) * scale)
    key = key * tl.rsqrt(tl.sum(key * key, 0) + eps)
    decay = tl.load(decays + row * decay_row_stride + head).to(tl.float32)
    beta = tl.load(betas + row * beta_row_stride + head).to(tl.float32)
    if PROJECTED:
        step = softplus(decay + tl.load(biases + head).to(tl.float32))
        decay = -tl.exp(tl.load(rates + head).to(tl.float32)) * step
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(betas.dtype.element_ty).to(tl.float32)
    state = state * tl.exp(decay)
    remembered = tl.sum(state * key[:, None], 0)
    state += key[:, None] * ((value - remembered) * beta)[None, :]
    tl.store(pointers, state.to(states.dtype.element_ty), mask=kept)
    found = tl.sum(state * query[:, None], 0)
    tl.store(out + (row * HEADS + head) * V + along_v, found.to(out.dtype.element_ty), mask=in_v)


@triton.jit
def scan(
    x,  # [rows, HEADS, WIDTH], contiguous along WIDTH
    steps,  # [rows, HEADS]
    rates,  # [HEADS]: those of the decay, negative
    inputs,  # [rows, GROUPS, SIZE], contiguous along SIZE (B)
    outputs,  # likewise (C)
    skips,  # [HEADS] (D)
    biases,  # [HEADS], of the steps
    states,  # [rows, HEADS, WIDTH, SIZE], contiguous
    out,  # [rows, HEADS, WIDTH], contiguous
    x_row_stride,
    x_head_stride,
    step_row_stride,
    step_head_stride,
    input_row_stride,
    input_group_stride,
    output_row_stride,
    output_group_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share inputs and outputs
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,  # of a program
    BLOCK_S: tl.constexpr,  # at least SIZE
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % HEADS
    row = (tl.program_id(0) // (BLOCKS * HEADS)).to(tl.int64)
    along_w, along_s = block * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_S)
    in_w, in_s = along_w < WIDTH, along_s < SIZE
    kept = in_w[:, None] & in_s[None, :]
    pointers = states + ((row * HEADS + head) * WIDTH + along_w)[:, None] * SIZE + along_s[None, :]
    state = tl.load(pointers, mask=kept, other=0.0).to(tl.float32)
    follow_previous(PDL)
    number = tl.load(x + row * x_row_stride + head * x_head_stride + along_w, mask=in_w, other=0.0).to(tl.float32)
    shared = head // GROUP
    given = tl.load(inputs + row * input_row_stride + shared * input_group_stride + along_s, mask=in_s, other=0.0)
    read = tl.load(outputs + row * output_row_stride + shared * output_group_stride + along_s, mask=in_s, other=0.0)
    step = tl.load(steps + row * step_row_stride + head * step_head_stride).to(tl.float32)
    step += tl.load(biases + head).to(tl.float32)
    step = softplus(step)
    rate, skip = tl.load(rates + head).to(tl.float32), tl.load(skips + head).to(tl.float32)
    state = state * tl.exp(step * rate) + (step * number)[:, None] * given.to(tl.float32)[None, :]
    tl.store(pointers, state.to(states.dtype.element_ty), mask=kept)
    found = tl.sum(state * read.to(tl.float32)[None, :], 1) + skip * number
    tl.store(out + (row * HEADS + head) * WIDTH + along_w, found.to(out.dtype.element_ty), mask=in_w)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, exact for small ones too: the quotient makes up for the rounding of the sum."""
    power = tl.exp(tl.minimum(x, 20.0))
    near = 1.0 + power
    small = tl.where(near == 1.0, power, tl.log(near) * (power / tl.where(near == 1.0, 1.0, near - 1.0)))
    return tl.where(x <= 20.0, small, x)  # NaN too
