"""`experts` and `grouped_experts`: the output of a layer's experts, for a few rows and for many.

Decode steps have few pairs of a row and one of its experts: their products take as long as reading the weights of the
chosen experts, each of which is read once. Nothing is copied or sorted by operators, and shapes do not depend on
which experts are chosen, so that a step can be captured.

For many rows, PyTorch's grouped products multiply pairs of a row and an expert, sorted by expert. Biases and gate
between them are one pass over memory, and biases, shares and the sum of a row another: as an operator for each step
they would take about as long as the products. Sums are in fp32, and results bitwise reproducible. There is no backward
pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ahead import launch
from ..device import compute_capability, counters, interpreted, overlap_options, shared_memory
from ..failures import Kernel, failure, launching
from ..pointwise.api import Activation
from .config import Config, Configs, Gate, Routing, Weights, choose_configs, most_items, refusal_of_any_shape

_PLACES = 16  # that a program of `list_pairs` finds
_COLUMNS = 256  # of a program that adds up
_PART = 256  # elements of a row for a program of `route`


def experts(
    x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate, configs: Configs | None = None
) -> Tensor:
    """The sum over a row's experts of ``share * down(gate(gate_up(x)))``.

    Args:
        x: ``[rows, hidden]``; see `config.refusal` for what is served.
        chosen: ``[rows, experts_per_row]`` int32 or int64, the experts of each row; those that the layer does not have
            add nothing.
        shares: ``[rows, experts_per_row]``, of any floating-point dtype.
        gate: What stands between both products.
        configs: Launch parameters; those of `choose_configs` when None.

    Returns:
        ``[rows, hidden]`` in the dtype of `x`.

    Raises:
        KernelFailedError: A kernel cannot be compiled or launched here.
    """
    device, pairs, per_row = x.device, chosen.numel(), chosen.shape[1]
    if configs is None:
        configs = choose_configs(pairs, weights, shared_memory(device))
    x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
    count = most_items(pairs, weights.experts, configs.block_pairs)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    items = torch.empty(count, 3, dtype=torch.int32, device=device)
    hidden = torch.empty(pairs, weights.inner, dtype=x.dtype, device=device)
    results = torch.empty(pairs, weights.hidden, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    overlap = overlap_options(device)
    with launching(Kernel.EXPERTS, device):
        from . import kernel  # it imports triton, which may be missing

        launch(
            kernel.list_pairs,
            (-(-pairs // _PLACES),),
            chosen,
            order,
            items,
            pairs,
            count,
            EXPERTS=weights.experts,
            BLOCK_P=max(_PLACES, _power_of_two(pairs)),
            BLOCK_Q=_PLACES,
            BLOCK_E=_power_of_two(weights.experts),
            BLOCK_I=_power_of_two(count),
            BLOCK_M=configs.block_pairs,
            **overlap,
        )
        lists = (order, items)
        _multiply(x, weights.gate_up, weights.gate_up_bias, hidden, lists, per_row, weights, configs, gate)
        _multiply(hidden, weights.down, weights.down_bias, results, lists, 1, weights, configs, None)
        launch(
            kernel.add_up,
            (len(x), -(-weights.hidden // _COLUMNS)),
            results,
            chosen,
            shares,
            out,
            EXPERTS=weights.experts,
            COLUMNS=weights.hidden,
            PAIRS_PER_ROW=per_row,
            BLOCK_P=_power_of_two(per_row),
            BLOCK_C=_COLUMNS,
            **overlap,
        )
    return out


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lists: tuple[Tensor, Tensor],
    per_row: int,
    weights: Weights,
    configs: Configs,
    gate: Gate | None,
) -> None:
    config: Config = configs.down if gate is None else configs.gate_up
    width, columns = (weights.inner, weights.hidden) if gate is None else (weights.hidden, 2 * weights.inner)
    order, items = lists
    form = gate or Gate(next(iter(Activation)))
    from . import kernel

    launch(
        kernel.products,
        (-(-columns // config.columns), len(items)),
        x,
        weight,
        out if bias is None else bias,
        out,
        order,
        items,
        float(form.alpha),
        float(form.limit),
        float(form.offset),
        WIDTH=width,
        COLUMNS=columns,
        PAIRS_PER_ROW=per_row,
        TRANSPOSED=weights.transposed,
        GATED=gate is not None,
        INTERLEAVED=weights.interleaved and gate is not None,
        ACTIVATION=form.activation.value,
        BIAS=bias is not None,
        BLOCK_M=configs.block_pairs,
        BLOCK_N=config.columns,
        BLOCK_K=config.at_once,
        STAGES=config.stages if not interpreted() else 1,
        **overlap_options(x.device),
    )


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, arrived: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of experts, the shares of those that are chosen, and which these are; of equal scores the first.

    Args:
        x: ``[rows, hidden]``; see `config.routing_refusal` for what is served.
        weight: ``[experts, hidden]``.
        bias: ``[experts]``, or None.
        routing: How experts are chosen.
        arrived: `counters`, which no launch uses at the same time; new ones when None.

    Returns:
        Scores ``[rows, experts]`` in the dtype of `x`, shares ``[rows, count]`` in this or fp32, experts
        ``[rows, count]`` int64.

    Raises:
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    (rows, width), count, device = x.shape, len(weight), x.device
    parts, block_rows, block_experts = -(-width // _PART), max(16, _power_of_two(rows)), max(16, _power_of_two(count))
    scores = torch.empty(rows, count, dtype=x.dtype, device=device)
    shares = torch.empty(rows, routing.experts, dtype=torch.float32 if routing.whole else x.dtype, device=device)
    chosen = torch.empty(rows, routing.experts, dtype=torch.int64, device=device)
    with launching(Kernel.EXPERTS, device):
        from . import kernel as router  # it imports triton, which may be missing

        launched = launch(
            router.route,
            (parts,),
            x.contiguous(),
            weight,
            weight if bias is None else bias,
            scores,
            shares,
            chosen,
            torch.empty(parts, block_rows, block_experts, dtype=torch.float32, device=device),
            counters(device) if arrived is None else arrived,
            rows,
            WIDTH=width,
            EXPERTS=count,
            COUNT=routing.experts,
            BIAS=bias is not None,
            FIRST=routing.first,
            BLOCK_M=block_rows,
            BLOCK_E=block_experts,
            BLOCK_K=_PART,
            BLOCK_T=_power_of_two(routing.experts),
            PARTS=parts,
            **overlap_options(device),
        )
    if not launched:
        chosen.zero_()  # a model's own code may gather by them
    return scores, shares, chosen


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` along the last axis, which of equal elements takes the first.

    Args:
        scores: ``[rows, columns]``, contiguous, fp32, fp16 or bf16, of at most `MOST_EXPERTS` columns.
        count: At most `MOST_LARGEST`.

    Returns:
        The largest elements ``[rows, count]`` in falling order, and their columns, int64.

    Raises:
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    (rows, columns), device = scores.shape, scores.device
    values = torch.empty(rows, count, dtype=scores.dtype, device=device)
    places = torch.empty(rows, count, dtype=torch.int64, device=device)
    with launching(Kernel.EXPERTS, device):
        from . import kernel  # it imports triton, which may be missing

        launched = launch(
            kernel.largest,
            (rows,),
            scores,
            values,
            places,
            COLUMNS=columns,
            COUNT=count,
            BLOCK=_power_of_two(columns),
            num_warps=1,
            **overlap_options(device),
        )
    if not launched:
        places.zero_()  # a model's own code may gather by them
    return values, places


_GROUPED_COLUMNS = 1024  # of a program, at most
_ALIGNED = 8  # elements that the strides of grouped products are multiples of


def grouped_experts(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    """The sum over a row's experts of ``share * down(gate(gate_up(x)))``.

    Args:
        x: ``[rows, hidden]``; see `grouped_refusal` for what is served.
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
    gate_up = _grouped_products(x[order // per_row], weights.gate_up, ends, weights)
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
    products = _grouped_products(opened, weights.down, ends, weights)
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


def _grouped_products(x: Tensor, weight: Tensor, ends: Tensor, weights: Weights) -> Tensor:
    return F.grouped_mm(x, weight if weights.transposed else weight.mT, offs=ends)


def _block(columns: int) -> int:
    return min(_GROUPED_COLUMNS, 1 << (columns - 1).bit_length())
