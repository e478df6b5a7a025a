"""The experts of a layer in PyTorch, in the dtype of its arguments."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ..pointwise.api import Activation
from ..pointwise.reference import gelu, wide
from .config import Gate, Routing, Shared, Weights


def experts(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    """See `api.experts`."""
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        row, slot = torch.where(chosen == expert)
        hidden = opened(_product(x[row], weights.gate_up, weights.gate_up_bias, expert, weights), weights, gate)
        result = _product(hidden, weights.down, weights.down_bias, expert, weights)
        out.index_add_(0, row, (result * shares[row, slot, None]).to(x.dtype))
    return out


def added_up(products: Tensor, chosen: Tensor, shares: Tensor, experts: int) -> Tensor:
    """See `api.ExpertSums`; in fp32."""
    rows, per_row = chosen.shape
    own, of_all = products.split([rows * per_row, len(products) - rows * per_row])
    there = (chosen >= 0) & (chosen < experts)
    weighted = torch.where(there[..., None], own.view(rows, per_row, -1) * shares[..., None], 0)
    return weighted.sum(1) + of_all.view(-1, *weighted[:, 0].shape).sum(0)


def shared_experts(x: Tensor, shared: Shared, gate: Gate) -> Tensor:
    """What `api.experts` adds for experts of all rows."""
    weights = Weights(torch.cat(shared[:2])[None], shared.down[None])
    return F.linear(opened(F.linear(x, weights.gate_up[0]), weights, gate), shared.down)


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
    operands = (x, weight) if bias is None or routing.corrected else (x, weight, bias)
    scores = F.linear(*map(wide, operands)) if routing.wide else F.linear(*operands)
    values = F.softmax(wide(scores), dim=-1) if routing.first else scores
    if routing.corrected:
        values = scores.sigmoid()
    chooses = values if bias is None or not routing.corrected else values + bias
    if routing.groups > 1:
        groups = chooses.unflatten(-1, (routing.groups, -1))
        of_groups = groups.topk(2, dim=-1)[0].sum(-1) if routing.corrected else groups.amax(-1)
        left = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, of_groups.topk(routing.kept)[1], False)
        chooses = groups.masked_fill(left[..., None], -inf if routing.corrected else 0.0).flatten(-2)
    chosen = chooses.topk(routing.experts, dim=-1)[1]
    values = values.gather(-1, chosen)
    if not routing.first:
        values = F.softmax(wide(values), dim=-1)
    if routing.normed:
        values = values / (values.sum(-1, keepdim=True) + 1e-20)
    values = values * routing.scale
    return scores, values if routing.whole else values.to(x.dtype), chosen
