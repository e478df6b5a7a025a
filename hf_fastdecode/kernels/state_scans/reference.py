"""The operators of this folder in PyTorch, token by token; exact in fp64."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pointwise.reference import wide
from ..state_steps import reference
from ..state_steps.api import Gates


def convolve(
    x: Tensor, starts: Tensor, states: Tensor | None, weight: Tensor, bias: Tensor | None, *, silu: bool, length: int
) -> tuple[Tensor, Tensor]:
    """See `api.convolve`."""
    channels, taps = weight.shape
    outs, final = [x[:0]], []
    for segment, (start, end) in enumerate(_spans(starts)):
        before = x.new_zeros(channels, length) if states is None else states[segment]
        inputs = torch.cat([before, x[start:end].T], 1)
        if end > start:
            out = F.conv1d(inputs[:, length + 1 - taps :], weight[:, None], bias, groups=channels).T
            outs.append(F.silu(out) if silu else out)
        final.append(inputs[:, inputs.shape[1] - length :])
    return torch.cat(outs), torch.stack(final)


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
    """See `api.delta_rule`; states are in fp32 at least. Gated DeltaNet, eq. 10, by `state_steps.reference`."""
    outs, final = [value[:0].to(query.dtype)], []
    tokens = query, key, value, decay, beta
    for segment, (start, end) in enumerate(_spans(starts)):
        state = wide(value).new_zeros(1, *value.shape[1:2], key.shape[2], value.shape[2])
        state = state if states is None else wide(states[segment : segment + 1])
        for at in range(start, end):
            query, key, value, decay, beta = (one[at : at + 1] for one in tokens)
            out, state = reference.delta_rule(query, key, value, decay, beta, state, gates)
            outs.append(out)
        final.append(state)
    return torch.cat(outs), torch.cat(final)


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
    """See `api.scan`. Mamba-2, eq. 1 with section 5's discretization."""
    group = x.shape[1] // inputs.shape[1]
    x, steps, rates, inputs, outputs, skips, biases = map(wide, (x, steps, rates, inputs, outputs, skips, biases))
    inputs, outputs = (one.repeat_interleave(group, 1) for one in (inputs, outputs))
    steps = F.softplus(steps + biases).clamp(*limits)[..., None, None]
    decays, added = (steps * rates[:, None, None]).exp(), steps * x[..., None] * inputs[:, :, None]
    out = skips[:, None] * x
    states = x.new_zeros(len(starts) - 1, *added.shape[1:]) if states is None else wide(states).clone()
    for state, (start, end) in zip(states, _spans(starts), strict=True):
        for token in range(start, end):
            state.mul_(decays[token]).add_(added[token])
            out[token] += (state * outputs[token, :, None]).sum(-1)
    return out, states


def _spans(starts: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(starts.tolist()))
