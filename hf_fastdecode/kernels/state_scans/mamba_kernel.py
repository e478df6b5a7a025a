# mypy: ignore-errors
"""The kernel of Mamba-2's scan over many tokens, see `mamba`. Sums, decays and states are in fp32."""

import triton
import triton.language as tl

from ..state_steps.kernel import softplus
from .chunks import CHUNK, product


@triton.jit(do_not_specialize=["resumed"])
def scan_segments(
    x,  # [tokens, HEADS, WIDTH], contiguous along WIDTH
    steps,  # [tokens, HEADS]
    rates,  # [HEADS]: those of the decay, negative
    inputs,  # [tokens, groups, SIZE], contiguous along SIZE (B)
    outputs,  # likewise (C)
    skips,  # [HEADS] (D)
    biases,  # [HEADS], of the steps
    starts,  # [segments + 1], int32: the first token of each segment, and the count of tokens
    before,  # [segments, HEADS, WIDTH, SIZE], contiguous; not read unless resumed
    out,  # [tokens, HEADS, WIDTH], contiguous, fp32
    after,  # [segments, HEADS, WIDTH, SIZE], likewise
    x_token_stride,
    x_head_stride,
    step_token_stride,
    step_head_stride,
    input_token_stride,
    input_group_stride,
    output_token_stride,
    output_group_stride,
    least,  # of a step
    most,  # likewise
    resumed,  # whether segments begin with states; zeros if not
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share inputs and outputs
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,  # of a program
    BLOCK_S: tl.constexpr,  # at least SIZE
    PARTS: tl.constexpr,  # of factors in fp32, see `product`
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_W - 1) // BLOCK_W
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % HEADS
    segment = (tl.program_id(0) // (BLOCKS * HEADS)).to(tl.int64)
    along_w, along_s, along_t = block * BLOCK_W + tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_S), tl.arange(0, CHUNK)
    in_w, in_s = along_w < WIDTH, along_s < SIZE
    kept = in_s[:, None] & in_w[None, :]
    places = ((segment * HEADS + head) * WIDTH + along_w)[None, :] * SIZE + along_s[:, None]
    state = tl.load(before + places, mask=kept & (resumed != 0), other=0.0).to(tl.float32)
    rate, skip = tl.load(rates + head).to(tl.float32), tl.load(skips + head).to(tl.float32)
    bias = tl.load(biases + head).to(tl.float32)
    earlier = along_t[:, None] >= along_t[None, :]
    x += head * x_head_stride
    steps += head * step_head_stride
    inputs += head // GROUP * input_group_stride
    outputs += head // GROUP * output_group_stride
    end = tl.load(starts + segment + 1)
    x_places = along_t[:, None] * x_token_stride + along_w[None, :]
    input_places = along_t[:, None] * input_token_stride + along_s[None, :]
    output_places = along_t[:, None] * output_token_stride + along_s[None, :]
    out_places = along_t[:, None] * (HEADS * WIDTH) + along_w[None, :]
    for begin in tl.range(tl.load(starts + segment), end, CHUNK, num_stages=STAGES):
        at = tl.cast(begin, tl.int64)
        here = begin + along_t < end
        step = tl.load(steps + at * step_token_stride + along_t * step_token_stride, mask=here, other=0.0)
        step = tl.maximum(softplus(step.to(tl.float32) + bias), least, propagate_nan=tl.PropagateNan.ALL)
        step = tl.minimum(step, most, propagate_nan=tl.PropagateNan.ALL)
        step = tl.where(here, step, 0.0)
        # Sums of decays in two parts: their differences are as exact as sums of the decays between.
        decay = (step * rate).to(tl.float64)
        whole, decay = tl.sum(decay, 0), tl.cumsum(decay, 0)
        high = decay.to(tl.float32)
        low = (decay - high.to(tl.float64)).to(tl.float32)
        of_input, of_x = here[:, None] & in_s[None, :], here[:, None] & in_w[None, :]
        given = tl.load(inputs + at * input_token_stride + input_places, mask=of_input, other=0.0)
        read = tl.load(outputs + at * output_token_stride + output_places, mask=of_input, other=0.0)
        number = tl.load(x + at * x_token_stride + x_places, mask=of_x, other=0.0)

        # What tokens of the chunk give to later ones.
        weight = product(read, tl.trans(given), PARTS)
        between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
        weight = tl.where(earlier, weight * tl.exp(tl.minimum(between, 0.0)) * step[None, :], 0.0)
        found = product(weight, number, PARTS)
        # What the state before the chunk gives.
        found += product(read, state, PARTS) * tl.exp(high)[:, None] + skip * number.to(tl.float32)
        tl.store(out + (at * HEADS + head) * WIDTH + out_places, found, mask=of_x)
        added = number.to(tl.float32) * (step * tl.exp((whole - decay).to(tl.float32)))[:, None]
        state = state * tl.exp(whole.to(tl.float32)) + product(tl.trans(given), added, PARTS)
    tl.store(after + places, state, mask=kept)
