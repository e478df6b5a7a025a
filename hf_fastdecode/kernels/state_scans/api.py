"""`convolve`, `delta_rule` and `scan`: many tokens through a layer's states, in segments of one packed row.

A segment begins with a state of its own, or with zeros, and ends with one. Segments of all lengths are computed at
once, and a length is never a compile-time argument. There is no backward pass.
"""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from ..ahead import launch_named
from ..device import overlap_options, power_of_two, shared_memory
from ..failures import Kernel
from ..limits import are_contiguous, refused
from ..state_steps.api import L2_EPS, Gates

MOST_WIDTH = 128
"""Elements of a key of `delta_rule`, which a program holds whole."""

MOST_SIZE = 256
"""Elements of an input of `scan`, likewise."""

CHUNK = 64
"""Tokens of which products are computed at once."""

FACTORS = 5
"""Numbers of a chunk's token and a head that kernels hand on, see ``delta.py`` and ``mamba.py``."""

_CHANNELS = 64  # of a program of `convolve`
_VALUES = 32  # elements of a value, of a program that carries states
_WIDTH, _ELEMENTS = 32, 4096  # elements of a head, and of a state, of a program of `scan`
_SHORTEST = 16  # elements of a tile's edge
_TWO_STAGES = 160 << 10  # bytes of shared memory, as of GPUs for servers, in which two chunks in flight fit

_OUT_PARTS = {torch.float32: 3, torch.float16: 3, torch.bfloat16: 2}
"""Parts of factors of `delta_rule`, see `chunks.product`, by the dtype to which outputs are rounded."""

_SCAN_PARTS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}
"""Those of `scan`, by the dtype of inputs. One is not enough in bf16: that errs as much as the rounding of steps in
transformers' code."""


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
    systems, factors = fp32(slots, heads, 2, CHUNK, CHUNK), fp32(slots, heads, FACTORS, CHUNK)
    out, final = torch.empty(value.shape, dtype=value.dtype, device=value.device), fp32(of_states)
    strides: tuple[int, ...] = (*query.stride()[:2], *key.stride()[:2])
    sizes = {
        "HEADS": heads,
        "GROUP": heads // key_heads,
        "K": key_dim,
        "BLOCK_K": max(_SHORTEST, power_of_two(key_dim)),
    }
    of_chunks = query, key, decay, beta, rates, biases, starts, systems, factors
    scalars = *strides, decay.stride(0), beta.stride(0), key_dim**-0.5, L2_EPS
    _launch("delta.relate", (slots * heads,), *of_chunks, segments, *scalars, **sizes, PROJECTED=gates is not None)
    _launch("delta.invert", (slots * heads,), systems, factors, starts, segments, HEADS=heads)
    block = min(_VALUES, max(_SHORTEST, power_of_two(value_dim)))
    sizes |= {"V": value_dim, "BLOCK_V": block, "OUT_PARTS": _OUT_PARTS[query.dtype]}
    stages = 2 if shared_memory(value.device) >= _TWO_STAGES else 1
    carried = query, key, value, systems, factors, starts, final if states is None else states, out, final
    strides = *strides, *value.stride()[:2]
    grid = (segments * heads * -(-value_dim // block),)
    _launch("delta.scan", grid, *carried, *strides, int(states is not None), **sizes, STAGES=stages)
    return out, final


def scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    skips: Tensor,
    biases: Tensor,
    starts: Tensor,
    states: Tensor | None = None,
    limits: tuple[float, float] = (0.0, inf),
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan (sections 6 and 7 of its paper) over segments of tokens.

    Args:
        x: ``[tokens, heads, width]``, contiguous along width.
        steps: ``[tokens, heads]``, before a bias is added and softplus taken.
        rates: ``[heads]``, contiguous, negative (A).
        inputs: ``[tokens, groups, size]``, contiguous along size, at most `MOST_SIZE` of it, in the dtype of `x` (B).
        outputs: Likewise (C).
        skips: ``[heads]``, contiguous (D).
        biases: ``[heads]``, contiguous.
        starts: ``[segments + 1]`` int32: the first token of each segment, then the count of tokens.
        states: ``[segments, heads, width, size]``, contiguous: the states before each segment, if not zeros.
        limits: The least and the most that a step may be.

    Returns:
        ``states @ output + skip * x`` of every token, ``[tokens, heads, width]`` fp32 as transformers' functions give
        it to a norm, and the states after each segment, ``[segments, heads, width, size]`` fp32.
    """
    (tokens, heads, width), (groups, size), segments = x.shape, inputs.shape[1:], len(starts) - 1
    shapes = inputs.shape == outputs.shape and len(inputs) == tokens and heads % groups == 0 and size <= MOST_SIZE
    shapes = shapes and steps.shape == (tokens, heads) and rates.shape == skips.shape == biases.shape == (heads,)
    shapes = shapes and segments > 0 and (states is None or states.shape == (segments, heads, width, size))
    dtypes = x.dtype == inputs.dtype == outputs.dtype and x.dtype in _SCAN_PARTS and starts.dtype == torch.int32
    dense = all(one.stride(-1) == 1 for one in (x, inputs, outputs))
    if not (shapes and dtypes and dense and are_contiguous(rates, skips, biases, starts, states)):
        takes = "x [tokens, heads, width], steps [tokens, heads], inputs and outputs [tokens, groups, size] of up to "
        takes += f"{MOST_SIZE} elements of an input, rates, skips and biases [heads], int32 starts [segments + 1] and "
        takes += "contiguous states [segments, heads, width, size]"
        raise refused(f"scan takes {takes}", x, steps, inputs, outputs, rates, starts)
    # By `empty_like`, which is seen where the memory of a pass is counted.
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    slots, fp32 = tokens // CHUNK + segments, partial(torch.empty, dtype=torch.float32, device=x.device)
    related, factors = fp32(slots, groups, CHUNK, CHUNK), fp32(slots, heads, FACTORS, CHUNK)
    final = fp32(segments, heads, width, size)
    block_s = max(_SHORTEST, power_of_two(size))
    block_w = max(_SHORTEST, min(power_of_two(width), _WIDTH, _ELEMENTS // block_s))
    sizes = {"HEADS": heads, "GROUP": heads // groups, "SIZE": size, "BLOCK_S": block_s, "PARTS": _SCAN_PARTS[x.dtype]}
    strides = *inputs.stride()[:2], *outputs.stride()[:2]
    tensors = steps, rates, inputs, outputs, biases, starts, related, factors
    scalars = segments, *steps.stride(), *strides, *map(float, limits)
    _launch("mamba.relate", (slots * heads,), *tensors, *scalars, **sizes)
    carried = x, inputs, outputs, skips, starts, related, factors, final if states is None else states, out, final
    scalars, grid = (*x.stride()[:2], *strides, int(states is not None)), (segments * heads * -(-width // block_w),)
    _launch("mamba.scan", grid, *carried, *scalars, **sizes, WIDTH=width, BLOCK_W=block_w, STAGES=2)
    return out, final


def _launch(name: str, grid: tuple[int, ...], *arguments: Tensor | float | None, **constants: int) -> None:
    device = next(one.device for one in arguments if isinstance(one, Tensor))
    launch_named(Kernel.SCANS, f"state_scans.{name}", device, grid, *arguments, **constants, **overlap_options(device))
