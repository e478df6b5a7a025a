# mypy: ignore-errors
"""The kernel of short causal convolutions over many tokens. Sums are in fp32."""

import triton
import triton.language as tl

from ..pointwise.kernel import follow_previous
from .chunks import CHUNK, chunk_of


@triton.jit(do_not_specialize=["segments", "channel_stride", "resumed"])
def convolve(
    x,  # [tokens, CHANNELS]
    states,  # [segments, CHANNELS, LENGTH], contiguous: the inputs before; not read unless resumed
    weight,  # [CHANNELS, TAPS], contiguous
    bias,  # [CHANNELS]; not read unless BIASED
    starts,  # [segments + 1]
    out,  # [tokens, CHANNELS], contiguous
    final,  # as states
    segments,
    token_stride,
    channel_stride,
    resumed,  # whether segments begin with states; zeros if not
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    TAPS: tl.constexpr,  # at most LENGTH + 1
    DENSE: tl.constexpr,  # the channel stride is 1
    BIASED: tl.constexpr,
    SILU: tl.constexpr,  # whether it follows
    BLOCK: tl.constexpr,  # channels of a program
    ROWS: tl.constexpr,  # at least LENGTH
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    follow_previous(PDL)
    segment, start, end, first = chunk_of(tl.program_id(0) // BLOCKS, starts, segments)
    # A segment without tokens has one slot at least, in which its states are kept.
    if (first >= end) & (first > start):
        return
    kept = channel < CHANNELS
    dtype: tl.constexpr = out.dtype.element_ty
    x += first.to(tl.int64) * token_stride
    if DENSE:
        along = channel
    else:
        along = channel * channel_stride.to(tl.int64)
    at = tl.arange(0, CHUNK)
    state = states + segment.to(tl.int64) * (CHANNELS * LENGTH) + channel * LENGTH
    begun, left = start - first, end - first
    least = begun - tl.where(resumed != 0, LENGTH, 0)  # the first input that there is
    total = tl.zeros([CHUNK, BLOCK], tl.float32)
    if BIASED:
        total += tl.load(bias + channel, mask=kept, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        number = _inputs(x, state, at - (TAPS - 1 - tap), least, begun, left, along, kept, token_stride, LENGTH)
        factor = tl.load(weight + channel * TAPS + tap, mask=kept, other=0.0).to(tl.float32)
        total += factor[None, :] * number.to(tl.float32)
    total = total.to(dtype)
    if SILU:
        wide = total.to(tl.float32)
        total = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    out += first.to(tl.int64) * CHANNELS
    tl.store(out + at[:, None] * CHANNELS + channel[None, :], total, mask=(at < left)[:, None] & kept[None, :])
    if left <= CHUNK:
        index = tl.arange(0, ROWS)
        latest = _inputs(x, state, left - LENGTH + index, least, begun, left, along, kept, token_stride, LENGTH)
        final += segment.to(tl.int64) * (CHANNELS * LENGTH)
        mask = (index < LENGTH)[:, None] & kept[None, :]
        tl.store(final + channel[None, :] * LENGTH + index[:, None], latest, mask=mask)


@triton.jit
def _inputs(x, state, at, least, begun, left, along, kept, token_stride, LENGTH: tl.constexpr):
    """Inputs at tokens of a chunk, whose segment begins and ends at these; those before it are of its states."""
    inside = ((at >= begun) & (at < left))[:, None] & kept[None, :]
    earlier = ((at >= least) & (at < begun))[:, None] & kept[None, :]
    number = tl.load(x + at[:, None] * token_stride + along[None, :], mask=inside, other=0.0)
    return number + tl.load(state[None, :] + (at - begun + LENGTH)[:, None], mask=earlier, other=0.0)
