"""`convolve`, `delta_rule` and `scan`: one token of each row through a layer's states, in one launch each.

States are read and written once, in place. There is no backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..ahead import launch_named
from ..device import overlap_options, power_of_two
from ..failures import Kernel
from ..limits import are_contiguous, refused


class Gates(NamedTuple):
    """Decays and betas of a layer's projections: ``-exp(rate) * softplus(x + bias)`` and ``sigmoid(x)``."""

    rates: Tensor  # ``[heads]``, contiguous: logarithms
    biases: Tensor  # likewise


L2_EPS = 1e-6
"""Added to sums of squares of queries and keys."""


MOST_WIDTH = 256
"""Elements of a key of `delta_rule`, or of an input of `scan`, which a program holds whole."""

_CHANNELS = 256  # of a program of `convolve`
_ELEMENTS = 4096  # of a state, of a program


def convolve(x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """A causal convolution of each channel, over its latest inputs and a new one, which joins these.

    Args:
        x: ``[rows, channels]``: the new inputs.
        states: ``[rows, channels, length]``, contiguous, in the dtype of `x`: the latest ones, overwritten.
        weight: ``[channels, taps]``, contiguous, at most length + 1 taps.
        bias: ``[channels]``, if any.

    Returns:
        ``[rows, channels]`` in the dtype of `x`.
    """
    (rows, channels), (length, taps) = x.shape, (states.shape[-1], weight.shape[-1])
    shapes = states.shape == (rows, channels, length) and weight.shape == (channels, taps) and taps <= length + 1
    shapes = shapes and (bias is None or bias.shape == (channels,))
    if not shapes or not are_contiguous(states, weight, bias):
        takes = "x [rows, channels], contiguous states [rows, channels, length] and weight [channels, taps]"
        raise refused(f"convolve takes {takes}", x, states, weight)
    tensors = x, states, weight, bias
    constants = {"LENGTH": length, "TAPS": taps, "BIASED": bias is not None, "SILU": silu, "BLOCK": _CHANNELS}
    return _launched("convolve", x.shape, _CHANNELS, tensors, x.stride(), CHANNELS=channels, **constants)


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor, gates: Gates | None = None
) -> Tensor:
    """A step of the gated delta rule, with L2-normalized queries and keys.

    Args:
        query: ``[rows, key_heads, key_dim]``, contiguous along key_dim, at most `MOST_WIDTH` of it.
        key: Likewise.
        value: ``[rows, heads, value_dim]``, contiguous along value_dim; a multiple of key_heads.
        decay: ``[rows, heads]``: logarithms of what states are multiplied by.
        beta: ``[rows, heads]``: how much of a value is written.
        states: ``[rows, heads, key_dim, value_dim]``, contiguous, overwritten.
        gates: When given, `decay` and `beta` are projections of which the kernel makes them.

    Returns:
        ``[rows, heads, value_dim]`` in the dtype of `query`.
    """
    (rows, key_heads, key_dim), (heads, value_dim) = key.shape, value.shape[1:]
    shapes = query.shape == key.shape and value.shape[0] == rows and heads % key_heads == 0 and key_dim <= MOST_WIDTH
    shapes = (
        shapes and decay.shape == beta.shape == (rows, heads) and states.shape == (rows, heads, key_dim, value_dim)
    )
    dense = all(one.stride(-1) == 1 for one in (query, key, value, decay, beta))
    rates, biases = gates or (None, None)
    shapes = shapes and (gates is None or gates.rates.shape == gates.biases.shape == (heads,))
    if not shapes or not dense or not are_contiguous(states, rates, biases):
        takes = "query and key [rows, key_heads, key_dim], value [rows, heads, value_dim], decay and beta [rows, "
        takes += "heads] and contiguous states [rows, heads, key_dim, value_dim]"
        takes += f" of up to {MOST_WIDTH} elements of a key"
        raise refused(f"delta_rule takes {takes}", query, key, value, decay, beta, states)
    block_k, block_v = _blocks(key_dim, value_dim)
    tensors = query, key, value, decay, beta, rates, biases, states
    strides = *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], decay.stride(0), beta.stride(0)
    sizes = {"HEADS": heads, "GROUP": heads // key_heads, "K": key_dim, "V": value_dim}
    constants = sizes | {"BLOCK_K": block_k, "BLOCK_V": block_v, "PROJECTED": gates is not None}
    scalars = *strides, key_dim**-0.5, L2_EPS
    return _launched("delta_rule", value.shape, block_v, tensors, scalars, **constants)


def scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    skips: Tensor,
    biases: Tensor,
    states: Tensor,
) -> Tensor:
    """A step of Mamba-2: states become ``states * exp(step * rate) + step * x * input``.

    Args:
        x: ``[rows, heads, width]``, contiguous along width.
        steps: ``[rows, heads]``, before a bias is added and softplus taken.
        rates: ``[heads]``, contiguous (A).
        inputs: ``[rows, groups, size]``, contiguous along size, at most `MOST_WIDTH` of it (B).
        outputs: Likewise (C).
        skips: ``[heads]``, contiguous (D).
        biases: ``[heads]``, contiguous.
        states: ``[rows, heads, width, size]``, contiguous, overwritten.

    Returns:
        ``states @ output + skip * x``, ``[rows, heads, width]`` in the dtype of `x`.
    """
    (rows, heads, width), (groups, size) = x.shape, inputs.shape[1:]
    shapes = inputs.shape == outputs.shape and inputs.shape[0] == rows and heads % groups == 0 and size <= MOST_WIDTH
    shapes = shapes and steps.shape == (rows, heads) and states.shape == (rows, heads, width, size)
    shapes = shapes and rates.shape == skips.shape == biases.shape == (heads,)
    dense = all(one.stride(-1) == 1 for one in (x, inputs, outputs))
    if not shapes or not dense or not are_contiguous(states, rates, skips, biases):
        takes = "x [rows, heads, width], steps [rows, heads], inputs and outputs [rows, groups, size], contiguous "
        takes += f"states [rows, heads, width, size] of up to {MOST_WIDTH} elements of an input, and rates, skips and "
        takes += "biases [heads]"
        raise refused(f"scan takes {takes}", x, steps, inputs, outputs, states, rates)
    block_s, block_w = _blocks(size, width)
    tensors = x, steps, rates, inputs, outputs, skips, biases, states
    strides = *x.stride()[:2], *steps.stride(), *inputs.stride()[:2], *outputs.stride()[:2]
    sizes = {"HEADS": heads, "GROUP": heads // groups, "WIDTH": width, "SIZE": size}
    constants = sizes | {"BLOCK_S": block_s, "BLOCK_W": block_w}
    return _launched("scan", x.shape, block_w, tensors, strides, **constants)


def _launched(
    name: str,
    shape: Sequence[int],
    block: int,
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[float, ...],
    **constants: int,
) -> Tensor:
    """The output of a kernel: ``shape``, in the dtype of the first tensor; a program writes `block` elements of a row.

    Args:
        name: The kernel's name in ``kernel.py``.
        tensors: Arguments before the output.
        scalars: Arguments after it.
    """
    first = tensors[0]
    assert first is not None
    out = torch.empty(shape, dtype=first.dtype, device=first.device)
    *outer, width = shape
    grid, constants = (prod(outer) * -(-width // block),), constants | overlap_options(out.device)
    launch_named(Kernel.STATES, f"state_steps.kernel.{name}", out.device, grid, *tensors, out, *scalars, **constants)
    return out


def _blocks(held: int, cut: int) -> tuple[int, int]:
    """Sizes of a program's block of a state ``[held, cut]``, or of its transpose: all of `held`, some of `cut`."""
    block = power_of_two(held)
    return block, min(power_of_two(cut), _ELEMENTS // block)
