"""Random inputs of operator cases, in as many sets as the L2 cache cannot hold, and the oracle that checks outputs.

The rule is the one of the tests: at most twice the error of PyTorch's own attention in the same dtype, in the largest
and in the mean error, on some rows and KV heads, which the fp64 oracle can afford.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Segment

from .cases import NodeSpec, OpCase


@dataclass(frozen=True)
class NodeBatch:
    """Neighbouring alike nodes of one depth as a batch: keys and values ``[nodes, kv_heads, length, head_dim]``."""

    row_start: int
    row_stop: int
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class OpInputs:
    """One set of inputs of a case."""

    case: OpCase
    forest: Forest  # the nodes, end to end in one segment
    segment: Segment  # keys and values of all nodes, [kv_heads, tokens, head_dim] each
    suffix: Segment  # [rows, kv_heads, suffix, head_dim] each; the last token is the new one
    query: Tensor  # [rows, heads, 1, head_dim]
    new: Segment  # keys and values of the new token, [rows, kv_heads, 1, head_dim] each

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1]) ** -0.5

    @property
    def segments(self) -> dict[int, Segment]:
        return {0: self.segment}

    @property
    def version(self) -> object:
        return self.case

    @property
    def kv(self) -> ForestKV:
        return ForestKV(self.forest, [self.segment], self.suffix, self.case.suffix)

    def levels(self) -> list[list[NodeBatch]]:
        """The nodes by depth, in batches of alike ones, without a copy."""
        levels, start = [], 0
        for _, level in groupby(self.case.nodes, lambda node: node.depth):
            batches = []
            for (length, row_count), run in groupby(level, lambda node: (node.length, node.row_count)):
                nodes = list(run)
                span, shape = slice(start, start + length * len(nodes)), (len(nodes), length)
                keys, values = (part[:, span].unflatten(1, shape).transpose(0, 1) for part in self.segment)
                batches.append(NodeBatch(nodes[0].row_start, nodes[-1].row_start + row_count, keys, values))
                start = span.stop
            levels.append(batches)
        return levels


def sets_needed(bytes_of_one: int, device: torch.device, *, most: int = 256) -> int:
    """Sets of so many bytes that are twice the L2 cache: 1 on a CPU, else at least 2 unless one is far larger."""
    if device.type != "cuda":
        return 1
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 if bytes_of_one > 8 * cache else min(most, max(2, math.ceil(2 * cache / bytes_of_one)))


def make_inputs(case: OpCase, device: torch.device, *, sets: int | None = None, seed: int = 0) -> list[OpInputs]:
    """Sets of inputs of a case, drawn from a normal distribution; torch.OutOfMemoryError where they do not fit."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    sets = sets or sets_needed(case.bytes(dtype.itemsize), device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(sets, *shape, generator=generator, device=device, dtype=dtype)

    rows, kv_heads, head_dim = case.rows, case.kv_heads, case.head_dim
    nodes = [normal(kv_heads, case.stored_tokens, head_dim) for _ in range(2)]
    suffixes = [normal(rows, kv_heads, case.suffix, head_dim) for _ in range(2)]
    queries = normal(rows, case.heads, 1, head_dim)
    forest = make_forest(case.rows, case.nodes)
    return [
        OpInputs(
            case,
            forest,
            Segment(nodes[0][index], nodes[1][index]),
            Segment(suffixes[0][index], suffixes[1][index]),
            queries[index],
            Segment(suffixes[0][index, :, :, -1:].clone(), suffixes[1][index, :, :, -1:].clone()),
        )
        for index in range(sets)
    ]


def make_forest(rows: int, nodes: tuple[NodeSpec, ...]) -> Forest:
    """The forest of a case, its nodes end to end in segment 0."""
    start, placed = 0, []
    for node in nodes:
        placed.append(Node(Span(0, start, node.length), node.row_start, node.row_count, node.depth))
        start += node.length
    return Forest(rows, placed)


BOUND = 2.0
"""Times PyTorch's own error that a way may err."""

_ROWS = 32  # of 1,024 with four query heads to a KV head, one of each tile of 128 packed queries


@dataclass(frozen=True)
class Oracle:
    """Reference outputs for a few rows and query heads of a case, and PyTorch's own outputs.

    `unit` is the relative error that no way can avoid: one unit in the last place, and what a log-sum-exp of this size
    loses as an exponent in fp32, twice.
    """

    rows: Tensor  # indices of those checked
    heads: Tensor
    out: Tensor  # [rows, heads, 1, head_dim] fp64: the reference
    unit: float
    fused: Tensor  # the same in the case's dtype by `scaled_dot_product_attention`: the yardstick
    eager: Tensor  # with scores stored in that dtype, as eager attention does: the yardstick of ways that do so too

    def error(self, actual: Tensor, yardstick: str = "fused") -> float:
        """Error of `actual` ``[all rows, all heads, 1, head_dim]`` in multiples of PyTorch's; inf when not finite.

        The errors are the largest one and the Frobenius norm. PyTorch's count at least as half of `unit`, and a
        quarter, so that a case in which it is right to the last bit does not forbid rounding.
        """
        if not bool(torch.isfinite(actual).all()):
            return torch.inf
        theirs = (self.fused if yardstick == "fused" else self.eager).double() - self.out
        ours = actual[self.rows][:, self.heads].to(self.fused.dtype).double() - self.out
        largest = ours.abs().max() / torch.maximum(theirs.abs().max(), self.unit / 2 * self.out.abs().max())
        norm = ours.norm() / torch.maximum(theirs.norm(), self.unit / 4 * self.out.norm())
        return float(torch.maximum(largest, norm))


def make_oracle(inputs: OpInputs) -> Oracle:
    """The oracle on up to 32 rows, evenly spread, and two KV heads."""
    case, device = inputs.case, inputs.query.device
    rows = sorted({index * (case.rows - 1) // (_ROWS - 1) for index in range(_ROWS)})
    kv_heads = sorted({0, case.kv_heads - 1})
    group = case.heads // case.kv_heads
    heads = [head * group + each for head in kv_heads for each in range(group)]
    row_index, head_index = torch.tensor(rows, device=device), torch.tensor(heads, device=device)
    kv_index = torch.tensor(kv_heads, device=device)
    own = [part[row_index][:, kv_index] for part in inputs.suffix]
    nodes = [part[kv_index] for part in inputs.segment]
    kv = ForestKV(inputs.forest.select_rows(rows), [Segment(*nodes)], Segment(*own), case.suffix)
    query = inputs.query[row_index][:, head_index]
    out, lse = reference.forest_attention(query, kv, inputs.scale)
    unit = torch.finfo(query.dtype).eps + 2 * torch.finfo(torch.float32).eps * float(lse.abs().max())
    yardsticks = [_by_pytorch(query, kv, row, inputs.scale) for row in range(len(rows))]
    return Oracle(
        row_index,
        head_index,
        out,
        unit,
        torch.stack([fused for fused, _ in yardsticks]),
        torch.stack([eager for _, eager in yardsticks]),
    )


def _by_pytorch(query: Tensor, kv: ForestKV, row: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one row over a copy of all its keys, by the fused operator and by two products."""
    group = query.shape[1] // kv.suffix.keys.shape[1]
    parts = [kv.node(span) for span in kv.forest.paths[row]] + [Segment(kv.suffix.keys[row], kv.suffix.values[row])]
    keys = torch.cat([part.keys for part in parts], 1).repeat_interleave(group, 0)
    values = torch.cat([part.values for part in parts], 1).repeat_interleave(group, 0)
    fused = F.scaled_dot_product_attention(query[row][None], keys[None], values[None], scale=scale)[0]
    scores = query[row] @ keys.mT * scale  # [heads, 1, tokens]
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return fused, weights @ values
