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

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ahead import launch_named
from ..device import counters, overlap_options, power_of_two, shared_memory
from ..failures import Kernel
from ..pointwise.api import Activation
from .config import Config, Configs, Gate, Routing, Shared, Weights, choose_configs, most_items

_POSITIONS = 16  # that a program of `list_pairs` finds
_COLUMNS = 256  # of a program that adds up
_PART, _WIDE_PART = 256, 128  # elements of a row for a program of `route`, with scores in half precision and in fp32
_ROUTED = 16  # rows of a program of `route`
_SLICE = 16  # elements whose products are one instruction of a matrix unit


def experts(
    x: Tensor,
    weights: Weights,
    chosen: Tensor,
    shares: Tensor,
    gate: Gate,
    configs: Configs | None = None,
    *,
    shared: Shared | None = None,
) -> Tensor:
    """The sum over a row's experts of ``share * down(gate(gate_up(x)))``.

    Args:
        x: ``[rows, hidden]``; see `config.refusal` for what is served.
        chosen: ``[rows, experts_per_row]`` int32 or int64, the experts of each row; those that the layer does not have
            add nothing.
        shares: ``[rows, experts_per_row]``, of any floating-point dtype.
        gate: The function between both products.
        configs: Launch parameters; those of `choose_configs` when None.
        shared: Experts of all rows, whose share is 1; see `config.shared_refusal`.

    Returns:
        ``[rows, hidden]`` in the dtype of `x`.
    """
    more = 0 if shared is None else shared.count(weights.inner)
    device, pairs, per_row = x.device, chosen.numel(), chosen.shape[1]
    if configs is None:
        configs = choose_configs(pairs, weights, shared_memory(device))
    x, chosen, shares = x.contiguous(), chosen.contiguous(), shares.contiguous()
    count = most_items(pairs, weights.experts, configs.block_pairs)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    items = torch.empty(count, 3, dtype=torch.int32, device=device)
    all_pairs = pairs + more * len(x)
    hidden = torch.empty(all_pairs, weights.inner, dtype=x.dtype, device=device)
    results = torch.empty(all_pairs, weights.hidden, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    _launch(
        "list_pairs",
        (-(-pairs // _POSITIONS),),
        *(chosen, order, items, pairs, count),
        EXPERTS=weights.experts,
        BLOCK_P=max(_POSITIONS, power_of_two(pairs)),
        BLOCK_Q=_POSITIONS,
        BLOCK_E=power_of_two(weights.experts),
        BLOCK_I=power_of_two(count),
        BLOCK_M=configs.block_pairs,
        **overlap_options(device),
    )
    lists = (order, items)
    _multiply(x, weights.gate_up, weights.gate_up_bias, hidden, lists, per_row, weights, configs, gate, shared)
    _multiply(hidden, weights.down, weights.down_bias, results, lists, 1, weights, configs, None, shared)
    _launch(
        "add_up",
        (len(x), -(-weights.hidden // _COLUMNS)),
        *(results, chosen, shares, out),
        EXPERTS=weights.experts,
        COLUMNS=weights.hidden,
        PAIRS_PER_ROW=per_row,
        SHARED=more,
        BLOCK_P=power_of_two(per_row),
        BLOCK_C=_COLUMNS,
        **overlap_options(device),
    )
    return out


def _launch(name: str, grid: tuple[int, ...], x: Tensor, /, *arguments: Any, **options: Any) -> bool:
    return launch_named(Kernel.EXPERTS, f"experts.kernel.{name}", x.device, grid, x, *arguments, **options)


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
    shared: Shared | None,
) -> None:
    config: Config = configs.down if gate is None else configs.gate_up
    width, columns = (weights.inner, weights.hidden) if gate is None else (weights.hidden, 2 * weights.inner)
    activation, *limits = gate or Gate(Activation.SILU)
    pairs, listed = (len(one) for one in lists)
    count = 0 if shared is None else shared.count(weights.inner)
    rows = (len(out) - pairs) // max(1, count)
    distance = shared.distance if shared is not None and gate is not None else 0
    _launch(
        "products",
        (-(-columns // config.columns), listed + count * -(-rows // configs.block_pairs)),
        *(x, weight, bias, out),
        *lists,
        *(weight if shared is None else shared.down if gate is None else shared.gate, distance, rows, pairs, listed),
        *map(float, limits),
        WIDTH=width,
        COLUMNS=columns,
        PAIRS_PER_ROW=per_row,
        SHARED=count,
        TRANSPOSED=weights.transposed,
        GATED=gate is not None,
        INTERLEAVED=weights.interleaved and gate is not None,
        ACTIVATION=activation.value,
        BIAS=bias is not None,
        BLOCK_M=configs.block_pairs,
        BLOCK_N=config.columns,
        BLOCK_K=config.at_once,
        STAGES=config.stages,
        **overlap_options(x.device),
    )


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, routing: Routing, arrived: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of experts, and the shares and indices of the chosen ones; of equal scores the first counts.

    Args:
        x: ``[rows, hidden]``; see `config.routing_refusal` for what is served.
        weight: ``[experts, hidden]``.
        bias: ``[experts]``, or None.
        routing: How experts are chosen.
        arrived: `counters`, which no launch uses at the same time; new ones when None.

    Returns:
        Scores ``[rows, experts]`` in the dtype of `x` or fp32, shares ``[rows, count]`` likewise, experts
        ``[rows, count]`` int64.
    """
    (rows, width), count, device = x.shape, len(weight), x.device
    part = _WIDE_PART if routing.wide else _PART
    parts, block_experts = -(-width // part), max(16, power_of_two(count))
    block_rows = min(_ROUTED, max(16, power_of_two(rows)))
    blocks = -(-rows // block_rows)
    scores = torch.empty(rows, count, dtype=torch.float32 if routing.wide else x.dtype, device=device)
    shares = torch.empty(rows, routing.experts, dtype=torch.float32 if routing.whole else x.dtype, device=device)
    chosen = torch.empty(rows, routing.experts, dtype=torch.int64, device=device)
    partials = torch.empty(blocks, parts, block_rows, block_experts, dtype=torch.float32, device=device)
    launched = _launch(
        "route",
        (parts, blocks),
        *(x.contiguous(), weight, bias, scores, shares, chosen, partials),
        counters(device) if arrived is None else arrived,
        rows,
        float(routing.scale),
        WIDTH=width,
        EXPERTS=count,
        COUNT=routing.experts,
        BIAS=bias is not None,
        FIRST=routing.first,
        CORRECTED=routing.corrected,
        NORMED=routing.normed,
        GROUPS=routing.groups,
        KEPT=routing.kept,
        BLOCK_M=block_rows,
        BLOCK_E=block_experts,
        BLOCK_K=part,
        SLICE=_SLICE if routing.wide and weight.dtype != torch.float32 else part,
        BLOCK_T=power_of_two(routing.experts),
        PARTS=parts,
        num_warps=8 if part == _WIDE_PART else 4,  # four would spill registers
        **overlap_options(device),
    )
    if not launched:
        chosen.zero_()  # a model's code may gather by them
    return scores, shares, chosen


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` along the last axis, which of equal elements takes the first.

    Args:
        scores: ``[rows, columns]``, contiguous, fp32, fp16 or bf16, of at most `MOST_EXPERTS` columns.
        count: At most `MOST_LARGEST`.

    Returns:
        The largest elements ``[rows, count]`` in falling order, and their columns, int64.
    """
    (rows, columns), device = scores.shape, scores.device
    values = torch.empty(rows, count, dtype=scores.dtype, device=device)
    positions = torch.empty(rows, count, dtype=torch.int64, device=device)
    sizes = {"COLUMNS": columns, "COUNT": count, "BLOCK": power_of_two(columns), "num_warps": 1}
    if not _launch("largest", (rows,), scores, values, positions, **sizes, **overlap_options(device)):
        positions.zero_()  # a model's code may gather by them
    return values, positions


_GROUPED_COLUMNS = 1024  # of a program, at most


def grouped_experts(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    """`experts` for many rows, see `config.grouped_refusal`; chosen experts are those of the layer."""
    per_row, inner, hidden, device = chosen.shape[1], weights.inner, weights.hidden, x.device
    chosen, shares = chosen.contiguous(), shares.contiguous()
    experts, order, ends = _sorted(chosen.view(-1), weights.experts)
    gate_up = _grouped_products(x[order // per_row], weights.gate_up, ends, weights)
    positions = torch.empty(len(order), dtype=torch.int32, device=device)
    opened = torch.empty(len(order), inner, dtype=x.dtype, device=device)
    block = min(_GROUPED_COLUMNS, power_of_two(inner))
    _launch(
        "open_sorted",
        (len(order), -(-inner // block)),
        *(gate_up, weights.gate_up_bias, experts, order, positions, opened),
        *(float(gate.alpha), float(gate.limit), float(gate.offset)),
        INNER=inner,
        INTERLEAVED=weights.interleaved,
        ACTIVATION=gate.activation.value,
        BIAS=weights.gate_up_bias is not None,
        BLOCK_C=block,
    )
    del gate_up
    products = _grouped_products(opened, weights.down, ends, weights)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(_GROUPED_COLUMNS, power_of_two(hidden))
    _launch(
        "add_up_sorted",
        (len(x), -(-hidden // block)),
        *(products, weights.down_bias, chosen, positions, shares, out),
        COLUMNS=hidden,
        PAIRS_PER_ROW=per_row,
        BIAS=weights.down_bias is not None,
        BLOCK_C=block,
    )
    return out


def _sorted(chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs sorted by expert: experts, indices of pairs, and the end of each expert's pairs."""
    experts, order = torch.sort(chosen)
    indices = torch.arange(count, dtype=experts.dtype, device=chosen.device)
    return experts, order, torch.searchsorted(experts, indices, right=True, out_int32=True)


def _grouped_products(x: Tensor, weight: Tensor, ends: Tensor, weights: Weights) -> Tensor:
    return F.grouped_mm(x, weight if weights.transposed else weight.mT, offs=ends)
