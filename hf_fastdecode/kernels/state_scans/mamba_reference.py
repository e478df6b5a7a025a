"""Mamba-2's scan token by token in PyTorch; exact in fp64."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import torch.nn.functional as F
from torch import Tensor

from ..pointwise.reference import wide


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
    """See `mamba.scan_segments`. Mamba-2, eq. 1 with section 5's discretization."""
    group = x.shape[1] // inputs.shape[1]
    x, steps, rates, inputs, outputs, skips, biases = map(wide, (x, steps, rates, inputs, outputs, skips, biases))
    inputs, outputs = (one.repeat_interleave(group, 1) for one in (inputs, outputs))
    steps = F.softplus(steps + biases).clamp(*limits)[..., None, None]
    decays, added = (steps * rates[:, None, None]).exp(), steps * x[..., None] * inputs[:, :, None]
    out = skips[:, None] * x
    states = x.new_zeros(len(starts) - 1, *added.shape[1:]) if before is None else wide(before).clone()
    for state, (first, end) in zip(states, pairwise(starts.tolist()), strict=True):
        for token in range(first, end):
            state.mul_(decays[token]).add_(added[token])
            out[token] += (state * outputs[token, :, None]).sum(-1)
    return out, states
