"""The experts of a layer in PyTorch, in the dtype of its arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pointwise.api import Activation
from ..pointwise.reference import gelu
from .config import Gate, Routing, Weights


def experts(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    """See `api.experts`."""
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        row, slot = torch.where(chosen == expert)
        hidden = opened(_product(x[row], weights.gate_up, weights.gate_up_bias, expert, weights), weights, gate)
        result = _product(hidden, weights.down, weights.down_bias, expert, weights)
        out.index_add_(0, row, (result * shares[row, slot, None]).to(x.dtype))
    return out


def opened(gate_up: Tensor, weights: Weights, gate: Gate) -> Tensor:
    """The input of the second product, from the first's result ``[..., 2 * inner]``."""
    gates, ups = (gate_up[..., ::2], gate_up[..., 1::2]) if weights.interleaved else gate_up.chunk(2, dim=-1)
    gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit) + gate.offset
    if gate.activation is Activation.SILU:
        return gates * torch.sigmoid(gate.alpha * gates) * ups
    return gelu(gates, gate.activation) * ups


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, weights: Weights) -> Tensor:
    matrix = weight[expert]
    return F.linear(x, matrix.T if weights.transposed else matrix, None if bias is None else bias[expert])


def route(x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """See `api.route`."""
    scores = F.linear(x, weight, bias)
    values = F.softmax(scores, dim=-1, dtype=torch.float32) if routing.first else scores
    values, chosen = values.topk(routing.experts, dim=-1)
    if not routing.first:
        values = F.softmax(values.float(), dim=-1)
    return scores, values if routing.whole else values.to(x.dtype), chosen
