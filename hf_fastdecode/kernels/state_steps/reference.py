"""The operators of this folder in PyTorch, which return new states; exact in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pointwise.reference import wide
from .api import L2_EPS, Gates


def convolve(x: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> tuple[Tensor, Tensor]:
    """See `api.convolve`; the result and the states after the step."""
    inputs = torch.cat([states, x[:, :, None]], -1)
    out = F.conv1d(inputs[:, :, -weight.shape[1] :], weight[:, None], bias, groups=len(weight))[:, :, 0]
    return F.silu(out) if silu else out, inputs[:, :, 1:]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor, gates: Gates | None = None
) -> tuple[Tensor, Tensor]:
    """See `api.delta_rule`; the result and the states after the step. Gated DeltaNet, eq. 10."""
    dtype, group = query.dtype, value.shape[1] // query.shape[1]
    if gates is not None:
        decay = -wide(gates.rates).exp() * F.softplus(wide(decay) + wide(gates.biases))
        beta = beta.sigmoid()
    query, key, value, decay, beta = map(wide, (query, key, value, decay, beta))
    query, key = (one * torch.rsqrt(one.pow(2).sum(-1, keepdim=True) + L2_EPS) for one in (query, key))
    query, key = (one.repeat_interleave(group, 1) for one in (query * query.shape[-1] ** -0.5, key))
    states = wide(states) * decay.exp()[..., None, None]
    remembered = (states * key[..., None]).sum(-2)
    states = states + key[..., None] * ((value - remembered) * beta[..., None])[..., None, :]
    return (states * query[..., None]).sum(-2).to(dtype), states


def scan(
    x: Tensor,
    steps: Tensor,
    rates: Tensor,
    inputs: Tensor,
    outputs: Tensor,
    skips: Tensor,
    biases: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `api.scan`; the result and the states after the step. Mamba-2, eq. 1 with section 5's discretization."""
    dtype, group = x.dtype, x.shape[1] // inputs.shape[1]
    x, steps, rates, inputs, outputs, skips, biases = map(wide, (x, steps, rates, inputs, outputs, skips, biases))
    inputs, outputs = (one.repeat_interleave(group, 1) for one in (inputs, outputs))
    steps = F.softplus(steps + biases)
    states = wide(states) * (steps * rates).exp()[..., None, None]
    states = states + (steps[..., None] * x)[..., None] * inputs[:, :, None]
    return ((states * outputs[:, :, None]).sum(-1) + skips[:, None] * x).to(dtype), states
