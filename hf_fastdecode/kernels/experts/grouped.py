"""`grouped_experts`: what a layer's experts add to many rows.

PyTorch's grouped products multiply pairs of a row and an expert, sorted by expert. Biases and gate between them are
one pass over memory, and biases, shares and the sum of a row another: as an operator for each step they would take
about as long as the products. Sums are in fp32, and results bitwise reproducible. There is no backward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ahead import launch
from ..device import compute_capability, interpreted
from ..failures import Kernel, failure, launching
from .config import refusal_of_any_shape
from .forms import Gate, Weights

_COLUMNS = 1024  # of a program, at most
_ALIGNED = 8  # numbers that the strides of grouped products are multiples of


def grouped_experts(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    """The sum over a row's experts of ``share * down(gate(gate_up(x)))``.

    Args:
        x: ``[rows, hidden]``; see `grouped_refusal` for what is served.
        weights: The layer's.
        chosen: ``[rows, experts_per_row]`` int32 or int64, experts of the layer.
        shares: ``[rows, experts_per_row]``, of any floating-point dtype.
        gate: What stands between both products.

    Returns:
        ``[rows, hidden]`` in the dtype of `x`.

    Raises:
        KernelFailedError: A kernel cannot be compiled or launched here.
    """
    per_row, inner, hidden, device = chosen.shape[1], weights.inner, weights.hidden, x.device
    chosen, shares = chosen.contiguous(), shares.contiguous()
    experts, order, ends = _sorted(chosen.view(-1), weights.experts)
    gate_up = _multiply(x[order // per_row], weights.gate_up, ends, weights)
    places = torch.empty(len(order), dtype=torch.int32, device=device)
    opened = torch.empty(len(order), inner, dtype=x.dtype, device=device)
    with launching(Kernel.EXPERTS, device):
        from . import kernel  # it imports triton, which may be missing

        launch(
            kernel.open_sorted,
            (len(order), -(-inner // _block(inner))),
            gate_up,
            gate_up if weights.gate_up_bias is None else weights.gate_up_bias,
            experts,
            order,
            places,
            opened,
            float(gate.alpha),
            float(gate.limit),
            float(gate.offset),
            INNER=inner,
            INTERLEAVED=weights.interleaved,
            ACTIVATION=gate.activation.value,
            BIAS=weights.gate_up_bias is not None,
            BLOCK_C=_block(inner),
        )
    del gate_up
    products = _multiply(opened, weights.down, ends, weights)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with launching(Kernel.EXPERTS, device):
        from . import kernel  # it imports triton, which may be missing

        launch(
            kernel.add_up_sorted,
            (len(x), -(-hidden // _block(hidden))),
            products,
            products if weights.down_bias is None else weights.down_bias,
            chosen,
            places,
            shares,
            out,
            COLUMNS=hidden,
            PAIRS_PER_ROW=per_row,
            BIAS=weights.down_bias is not None,
            BLOCK_C=_block(hidden),
        )
    return out


def grouped_refusal(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor) -> str | None:
    """Why `grouped_experts` does not serve these tensors; None when it does. Arguments as for `config.refusal`."""
    parts = [part for part in weights[:4] if isinstance(part, Tensor)]
    if reason := refusal_of_any_shape(x, *parts, of_other_dtypes=(chosen, shares)):
        return reason
    if x.dim() != 2 or chosen.dim() != 2 or chosen.shape != shares.shape or len(chosen) != len(x) or not len(x):
        return "it takes rows [rows, hidden], and experts and their shares [rows, experts_per_row]"
    if chosen.dtype not in (torch.int32, torch.int64):
        return "it takes whole numbers of experts"
    if weights.hidden % _ALIGNED or weights.inner % _ALIGNED or x.shape[1] != weights.hidden:
        return f"it takes widths in multiples of {_ALIGNED}, got {weights.hidden} and {weights.inner}"
    if any(not part.is_contiguous() or part.data_ptr() % 16 for part in parts):
        return "it takes contiguous weights that begin at multiples of 16 bytes"
    if interpreted():
        return failure(Kernel.EXPERTS, x.device)
    if x.device.type != "cuda" or compute_capability(x.device)[0] != 9 or x.dtype != torch.bfloat16:
        return "PyTorch's grouped products are fast in bf16 on Hopper GPUs"
    return failure(Kernel.EXPERTS, x.device)


def _sorted(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts of pairs in order, the pairs in this order, and where those of each expert end."""
    experts, order = torch.sort(chosen)
    numbers = torch.arange(count, dtype=experts.dtype, device=chosen.device)
    return experts, order, torch.searchsorted(experts, numbers, right=True, out_int32=True)


def _multiply(x: Tensor, weight: Tensor, ends: Tensor, weights: Weights) -> Tensor:
    return F.grouped_mm(x, weight if weights.transposed else weight.mT, offs=ends)


def _block(columns: int) -> int:
    return min(_COLUMNS, 1 << (columns - 1).bit_length())
