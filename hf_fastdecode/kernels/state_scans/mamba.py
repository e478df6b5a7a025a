"""`scan_segments`: Mamba-2's scan of many tokens, of segments that are packed end to end, in two launches.

The first one makes what tokens of a chunk have in common, for all chunks at once. In the second one a program has some
of a head's width, and goes through a segment by chunks: it adds what a chunk's tokens and the state before give to
each token, then moves the state on, which stays in registers. Programs are independent: a prompt of Nemotron-H-8B has
256 of them, which run at once on an H200. If these chunks ran in parallel too, as in section 6 of the paper, their
states in fp32 would be written and read twice: a gigabyte per layer for 4,096 tokens, which takes longer.

Nothing is compiled or tuned by length. There is no backward pass.
"""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from ..ahead import launch_named
from ..device import overlap_options, power_of_two
from ..failures import Kernel
from ..limits import are_contiguous, refused
from .api import CHUNK

MOST_SIZE = 256
"""Elements of an input, which a program holds whole."""

_PARTS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}
"""Parts of factors, see `chunks.product`, by the dtype of inputs. One is not enough in bf16: that errs as much as the
rounding of steps in transformers' code."""

_FACTORS = 5  # per token of a chunk, see `mamba_kernel`
_WIDTH, _ELEMENTS, _SHORTEST = 32, 4096, 16
"""The most of a head's width and of a state that a program has, and the least elements of a tile's edge."""


def scan_segments(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    skips: Tensor,
    biases: Tensor,
    starts: Tensor,
    before: Tensor | None = None,
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
        before: ``[segments, heads, width, size]``, contiguous: the states before each segment, if not zeros.
        limits: The least and the most that a step may be.

    Returns:
        ``states @ output + skip * x`` of every token, ``[tokens, heads, width]`` fp32 as transformers' functions give
        it to a norm, and the states after each segment, ``[segments, heads, width, size]`` fp32.
    """
    (tokens, heads, width), (groups, size), segments = x.shape, inputs.shape[1:], len(starts) - 1
    shapes = inputs.shape == outputs.shape and len(inputs) == tokens and heads % groups == 0 and size <= MOST_SIZE
    shapes = shapes and steps.shape == (tokens, heads) and rates.shape == skips.shape == biases.shape == (heads,)
    shapes = shapes and segments > 0 and (before is None or before.shape == (segments, heads, width, size))
    dtypes = x.dtype == inputs.dtype == outputs.dtype and x.dtype in _PARTS and starts.dtype == torch.int32
    dense = all(one.stride(-1) == 1 for one in (x, inputs, outputs))
    if not (shapes and dtypes and dense and are_contiguous(rates, skips, biases, starts, before)):
        takes = "x [tokens, heads, width], steps [tokens, heads], inputs and outputs [tokens, groups, size] of up to "
        takes += f"{MOST_SIZE} elements of an input, rates, skips and biases [heads], int32 starts [segments + 1] and "
        takes += "contiguous states [segments, heads, width, size]"
        raise refused(f"scan_segments takes {takes}", x, steps, inputs, outputs, rates, starts)
    # By `empty_like`, which is seen where the memory of a pass is counted.
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    slots, fp32 = tokens // CHUNK + segments, partial(torch.empty, dtype=torch.float32, device=x.device)
    related, factors = fp32(slots, groups, CHUNK, CHUNK), fp32(slots, heads, _FACTORS, CHUNK)
    after = fp32(segments, heads, width, size)
    block_s = max(_SHORTEST, power_of_two(size))
    block_w = max(_SHORTEST, min(power_of_two(width), _WIDTH, _ELEMENTS // block_s))
    sizes = {"HEADS": heads, "GROUP": heads // groups, "SIZE": size, "BLOCK_S": block_s, "PARTS": _PARTS[x.dtype]}
    strides = *inputs.stride()[:2], *outputs.stride()[:2]
    sizes |= overlap_options(x.device)
    tensors = steps, rates, inputs, outputs, biases, starts, related, factors
    scalars = segments, *steps.stride(), *strides, *map(float, limits)
    launch = partial(launch_named, Kernel.SCANS)
    launch("state_scans.mamba_kernel.relate", x.device, (slots * heads,), *tensors, *scalars, **sizes)
    carried = x, inputs, outputs, skips, starts, related, factors, after if before is None else before, out, after
    sizes |= {"WIDTH": width, "BLOCK_W": block_w, "STAGES": 2}
    scalars, grid = (*x.stride()[:2], *strides, int(before is not None)), (segments * heads * -(-width // block_w),)
    launch("state_scans.mamba_kernel.scan", x.device, grid, *carried, *scalars, **sizes)
    return out, after
