"""`scan_segments`: Mamba-2's scan of many tokens, of segments that are packed end to end, in one launch.

A program has some of a head's width, and goes through a segment by chunks of tokens. To each chunk it adds what its
tokens give to later ones (products of all pairs, with the decays between them) and what the state before it gives;
then it moves the state on, which stays in registers. Programs are independent: a prompt of Nemotron-H-8B has 256 of
them, which run at once on an H200. For 4,096 tokens they compute 60 Gflop in bf16, some 0.2 ms per layer where tensor
cores reach a third of their rate. If chunks ran in parallel, as in section 6 of the paper, their states in fp32 would
be written and read twice: a gigabyte per layer, which takes longer than that.

Nothing is compiled or tuned by length, and there are no tables beside the segments' starts. There is no backward pass.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from ..ahead import launch_named
from ..device import power_of_two
from ..failures import Kernel
from ..limits import are_contiguous, refused

MOST_SIZE = 256
"""Elements of an input, which a program holds whole."""

_PARTS = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 2}
"""Parts of factors, see `chunks.product`, by the dtype of inputs. One is not enough in bf16: that errs as much as the
rounding of steps in transformers' code."""

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
    after = torch.empty(segments, heads, width, size, dtype=torch.float32, device=x.device)
    block_s = max(_SHORTEST, power_of_two(size))
    block_w = max(_SHORTEST, min(power_of_two(width), _WIDTH, _ELEMENTS // block_s))
    tensors = x, steps, rates, inputs, outputs, skips, biases, starts, after if before is None else before, out, after
    strides = *x.stride()[:2], *steps.stride(), *inputs.stride()[:2], *outputs.stride()[:2]
    sizes = {"HEADS": heads, "GROUP": heads // groups, "WIDTH": width, "SIZE": size}
    constants = sizes | {"BLOCK_W": block_w, "BLOCK_S": block_s, "PARTS": _PARTS[x.dtype], "STAGES": 2}
    name, grid = "state_scans.mamba_kernel.scan_segments", (segments * heads * -(-width // block_w),)
    arguments = *tensors, *strides, *map(float, limits), int(before is not None)
    launch_named(Kernel.SCANS, name, x.device, grid, *arguments, **constants)
    return out, after
