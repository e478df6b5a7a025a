"""`convolve` and `delta_rule`: many tokens through a layer's states, in segments of one packed row.

A segment begins with a state of its own, or with zeros, and ends with one. Segments of all lengths are computed at
once, and a length is never a compile-time argument. There is no backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..ahead import launch_named
from ..device import overlap_options, power_of_two, shared_memory
from ..failures import Kernel
from ..limits import are_contiguous, refused
from ..state_steps.api import L2_EPS, Gates

MOST_WIDTH = 128
"""Elements of a key, which a program holds whole."""

CHUNK = 64
"""Tokens of which products are computed at once."""

_CHANNELS = 64  # of a program of `convolve`
_VALUES = 32  # elements of a value, of a program that carries states
_TWO_STAGES = 160 << 10  # bytes of shared memory, as of GPUs for servers, in which two chunks in flight fit
_FACTORS = 5  # per token of a chunk, see `delta.py`


_OUT_PARTS = {torch.float32: 3, torch.float16: 3, torch.bfloat16: 2}
"""Parts of factors, see `chunks.product`, by the dtype to which outputs are rounded."""


def convolve(
    x: Tensor, starts: Tensor, states: Tensor | None, weight: Tensor, bias: Tensor | None, *, silu: bool, length: int
) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel over the tokens of segments.

    Args:
        x: ``[tokens, channels]``: the inputs.
        starts: ``[segments + 1]`` int32: where segments begin, and the number of tokens.
        states: ``[segments, channels, length]``, contiguous, in the dtype of `x`: the inputs before; zeros if None.
        weight: ``[channels, taps]``, contiguous, at most length + 1 taps.
        bias: ``[channels]``, if any.
        length: Latest inputs that states keep.

    Returns:
        ``[tokens, channels]``, and the states at the segments' ends.
    """
    (tokens, channels), (segments, taps) = x.shape, (len(starts) - 1, weight.shape[-1])
    shapes = weight.shape == (channels, taps) and taps <= length + 1 and (bias is None or bias.shape == (channels,))
    shapes = shapes and (states is None or states.shape == (segments, channels, length)) and segments > 0
    if not shapes or not are_contiguous(starts, states, weight, bias):
        takes = "x [tokens, channels], contiguous states [segments, channels, length] and weight [channels, taps]"
        raise refused(f"convolve takes {takes}", x, starts, weight)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    final = torch.empty(segments, channels, length, dtype=x.dtype, device=x.device)
    constants = {"CHANNELS": channels, "LENGTH": length, "TAPS": taps, "DENSE": x.stride(1) == 1, "SILU": silu}
    constants |= {"BIASED": bias is not None, "BLOCK": _CHANNELS, "ROWS": power_of_two(length)}
    grid = ((tokens // CHUNK + segments) * -(-channels // _CHANNELS),)
    tensors = x, final if states is None else states, weight, bias, starts, out, final
    scalars = segments, *x.stride(), int(states is not None)
    _launch("convolution.convolve", grid, *tensors, *scalars, **constants, num_warps=8)
    return out, final


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    starts: Tensor,
    states: Tensor | None,
    gates: Gates | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over the tokens of segments, with L2-normalized queries and keys.

    Its error is that of fp32, and of the result's rounding. Memory: 33 KiB for each 64 tokens and head.

    Args:
        query: ``[tokens, key_heads, key_dim]``, contiguous along key_dim, at most `MOST_WIDTH` of it.
        key: Likewise.
        value: ``[tokens, heads, value_dim]``, contiguous along value_dim; heads are a multiple of key_heads.
        decay: ``[tokens, heads]``, contiguous along heads: logarithms of what states are multiplied by.
        beta: Likewise: how much of a value is written.
        starts: ``[segments + 1]`` int32: where segments begin, and the number of tokens.
        states: ``[segments, heads, key_dim, value_dim]``, contiguous, before the first tokens; zeros if None.
        gates: When given, `decay` and `beta` are projections of which kernels make them.

    Returns:
        ``[tokens, heads, value_dim]`` in the dtype of `query`, and the states at the segments' ends in fp32.
    """
    (tokens, key_heads, key_dim), (heads, value_dim), segments = key.shape, value.shape[1:], len(starts) - 1
    of_states = segments, heads, key_dim, value_dim
    shapes = query.shape == key.shape and len(value) == tokens and heads % key_heads == 0 and key_dim <= MOST_WIDTH
    shapes = shapes and decay.shape == beta.shape == (tokens, heads) and (states is None or states.shape == of_states)
    rates, biases = gates or (None, None)
    shapes = shapes and (gates is None or gates.rates.shape == gates.biases.shape == (heads,)) and segments > 0
    dense = all(one.stride(-1) == 1 for one in (query, key, value, decay, beta))
    dense = dense and query.dtype == key.dtype == value.dtype and query.dtype in _OUT_PARTS
    if not shapes or not dense or not are_contiguous(starts, states, rates, biases):
        takes = "query and key [tokens, key_heads, key_dim], value [tokens, heads, value_dim] of one dtype, decay and "
        takes += "beta [tokens, heads] and contiguous states [segments, heads, key_dim, value_dim] of up to "
        raise refused(f"delta_rule takes {takes}{MOST_WIDTH} elements of a key", query, key, value, decay, beta)
    slots = tokens // CHUNK + segments
    fp32 = partial(torch.empty, dtype=torch.float32, device=value.device)
    systems, factors = fp32(slots, heads, 2, CHUNK, CHUNK), fp32(slots, heads, _FACTORS, CHUNK)
    out, final = torch.empty(value.shape, dtype=value.dtype, device=value.device), fp32(of_states)
    strides: tuple[int, ...] = (*query.stride()[:2], *key.stride()[:2])
    sizes = {"HEADS": heads, "GROUP": heads // key_heads, "K": key_dim, "BLOCK_K": max(16, power_of_two(key_dim))}
    of_chunks = query, key, decay, beta, rates, biases, starts, systems, factors
    scalars = *strides, decay.stride(0), beta.stride(0), key_dim**-0.5, L2_EPS
    _launch("delta.relate", (slots * heads,), *of_chunks, segments, *scalars, **sizes, PROJECTED=gates is not None)
    _launch("delta.invert", (slots * heads,), systems, factors, starts, segments, HEADS=heads)
    block = min(_VALUES, max(16, power_of_two(value_dim)))
    sizes |= {"V": value_dim, "BLOCK_V": block, "OUT_PARTS": _OUT_PARTS[query.dtype]}
    stages = 2 if shared_memory(value.device) >= _TWO_STAGES else 1
    carried = query, key, value, systems, factors, starts, final if states is None else states, out, final
    strides = *strides, *value.stride()[:2]
    grid = (segments * heads * -(-value_dim // block),)
    _launch("delta.scan", grid, *carried, *strides, int(states is not None), **sizes, STAGES=stages)
    return out, final


def _launch(name: str, grid: tuple[int, ...], *arguments: Tensor | float | None, **constants: int) -> None:
    device = next(one.device for one in arguments if isinstance(one, Tensor))
    constants = constants | overlap_options(device)
    launch_named(Kernel.SCANS, f"state_scans.{name}", device, grid, *arguments, **constants)
