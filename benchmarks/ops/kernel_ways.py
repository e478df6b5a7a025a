# mypy: ignore-errors
"""Ways that import Triton: this package's kernel of nodes on its own, and a first kernel for a shared context.

`NodeKernel` is timed without the launch that merges, and merged in PyTorch to be checked. `Sketch` is a baseline:
packed queries of all rows attend to equal shares of the one context, and leave fp32 partials; the kernel of suffixes
merges them with its own. No schedule, no overlap of launches, no warp specialisation.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_fastdecode.attention.kv import Partial, Scoring, empty_partial, merge
from hf_fastdecode.attention.launch.kernel_call import AddressesOfLayers
from hf_fastdecode.attention.launch.plan import HeadShape, LaunchPlan
from hf_fastdecode.kernels.device import shared_memory
from hf_fastdecode.kernels.forest_decode.api import NodeWorkspace, attend_nodes
from hf_fastdecode.kernels.forest_decode.merge import merge_partial
from hf_fastdecode.kernels.forest_decode.node_kernel import LOG2E, LOWEST, online_softmax_step, qk_scores
from hf_fastdecode.kernels.forest_decode.schedule import Schedule

from .inputs import OpInputs


def plan_of(inputs: OpInputs) -> LaunchPlan:
    """The launch plan for a case's forest."""
    shape = HeadShape.of(inputs.query, inputs.new.keys, Scoring(inputs.scale))
    return LaunchPlan(inputs.forest, shape, inputs.query.device)


def new_token(inputs: OpInputs) -> Partial:
    """Each row's attention to its new token alone: ``[rows, heads, 1, head_dim]`` and ``[rows, heads, 1]``."""
    keys, values = (part.float().repeat_interleave(inputs.query.shape[1] // part.shape[1], 1) for part in inputs.new)
    return Partial(values, (inputs.query.float() * keys).sum(-1) * inputs.scale)


@dataclass(frozen=True)
class Pieces:
    """Partials that the kernel of nodes leaves to be merged."""

    inputs: OpInputs
    schedule: Schedule
    workspace: NodeWorkspace

    def result(self) -> Tensor:
        """The pieces and the new token's own partial, merged: ``[rows, heads, 1, head_dim]``."""
        rows, heads, _, head_dim = self.inputs.query.shape
        kv_heads = self.inputs.new.keys.shape[1]
        merged = empty_partial((rows, kv_heads, heads // kv_heads, head_dim), self.inputs.query.device)
        for depth in range(len(self.schedule.row_units)):
            merged = merge(merged, *self._at(depth, kv_heads, heads // kv_heads))
        shared = Partial(merged.out.reshape(rows, heads, 1, head_dim), merged.lse.reshape(rows, heads, 1))
        return merge(shared, new_token(self.inputs)).out

    def _at(self, depth: int, kv_heads: int, group: int) -> list[Partial]:
        """Partials of one depth's nodes, ``[rows, kv_heads, group, head_dim]``, in the order of their keys."""
        schedule = self.schedule
        unit, offset, tiles = (
            table[depth][:, None, None].long()
            for table in (schedule.row_units, schedule.row_offsets, schedule.row_tiles)
        )
        head = torch.arange(kv_heads, device=unit.device)[:, None]
        query = offset + torch.arange(group, device=unit.device)
        own = (unit + head * tiles + query // schedule.block_m - offset // schedule.block_m).clamp_min(0)
        first = schedule.unit_slots[own].long()
        count = torch.where(unit >= 0, schedule.unit_slots[own + 1] - first, 0)
        found = []
        for index in range(int(count.max())):
            here = index < count
            at = torch.where(here, first + index, 0), query % schedule.block_m
            lse = self.workspace.lse[at] * math.log(2)
            out = self.workspace.out[at]
            found.append(Partial(torch.where(here[..., None], out, 0.0), torch.where(here, lse, -torch.inf)))
        return found


class NodeKernel:
    """The kernel over the nodes of one set of inputs, whose suffixes are the new token alone."""

    def __init__(self, inputs: OpInputs):
        self.inputs = inputs
        query, device = inputs.query, inputs.query.device
        plan = plan_of(inputs)
        # Launches that overlap would hide a part of each in the one before.
        self.config, self.kv_heads = replace(plan.config, overlap=False), plan.shape.kv_heads
        self.schedule = plan.schedule(plan.programs(0))
        self.addresses = AddressesOfLayers(inputs.forest).of([inputs.segment]).to(device)
        self.lengths = torch.zeros(len(query), dtype=torch.int32, device=device)

    def attend(self) -> Pieces:
        """Launch it."""
        tables = (self.addresses, self.lengths, self.schedule, self.config, self.kv_heads)
        return Pieces(self.inputs, self.schedule, attend_nodes(self.inputs.query, *tables, scale=self.inputs.scale))


_BLOCK_N = 64


@triton.jit
def _context_partials(
    query,  # [rows, heads, 1, HEAD_DIM], contiguous
    keys,  # [kv_heads, length, HEAD_DIM], contiguous
    values,
    partial_out,  # [splits, rows, heads, HEAD_DIM] fp32
    partial_lse,  # [splits, rows, heads] fp32, base 2
    rows,
    kv_heads,
    length,
    tiles_of_split,
    head_stride,  # of keys and values
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(1) % kv_heads
    split = tl.program_id(1) // kv_heads
    packed = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_query = packed < rows * GROUP
    at = (packed // GROUP * kv_heads + head) * GROUP + packed % GROUP
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(query + at[:, None] * HEAD_DIM + dims[None, :], mask=valid_query[:, None], other=0.0)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    first = split * tiles_of_split * BLOCK_N
    last = tl.minimum(length, first + tiles_of_split * BLOCK_N)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        place = head.to(tl.int64) * head_stride + token[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(keys + place, mask=(token < length)[:, None], other=0.0)
        v = tl.load(values + place, mask=(token < length)[:, None], other=0.0)
        scores = tl.where((token < length)[None, :], qk_scores(q, k, scale, 0.0, False), -float("inf"))
        row_max, row_sum, acc = online_softmax_step(
            scores, scale * LOG2E, v, row_max, row_sum, acc, query.dtype.element_ty
        )
    at = split * rows * kv_heads * GROUP + at
    tl.store(partial_lse + at, row_max + tl.log2(row_sum), mask=valid_query)
    tl.store(
        partial_out + at.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :],
        acc / row_sum[:, None],
        mask=valid_query[:, None],
    )


@triton.jit
def _suffixes_and_merge(
    query,
    keys,  # [rows, kv_heads, length, HEAD_DIM], contiguous
    values,
    partial_out,
    partial_lse,
    out,  # [rows, heads, 1, HEAD_DIM]
    rows,
    kv_heads,
    length,
    splits,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row_and_head = tl.program_id(0).to(tl.int64)  # row * kv_heads + head
    within = tl.arange(0, BLOCK_P)
    valid_query = within < GROUP
    dims = tl.arange(0, HEAD_DIM)
    at = row_and_head * GROUP + within
    q = tl.load(query + at[:, None] * HEAD_DIM + dims[None, :], mask=valid_query[:, None], other=0.0)
    row_max = tl.full([BLOCK_P], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_P], tl.float32)
    acc = tl.zeros([BLOCK_P, HEAD_DIM], tl.float32)
    for start in tl.range(0, length, BLOCK_N, num_stages=2):
        token = start + tl.arange(0, BLOCK_N)
        place = (row_and_head * length + token)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(keys + place, mask=(token < length)[:, None], other=0.0)
        v = tl.load(values + place, mask=(token < length)[:, None], other=0.0)
        scores = tl.where((token < length)[None, :], qk_scores(q, k, scale, 0.0, False), -float("inf"))
        row_max, row_sum, acc = online_softmax_step(
            scores, scale * LOG2E, v, row_max, row_sum, acc, query.dtype.element_ty
        )
    for split in range(splits):
        part_at = split * (rows * kv_heads * GROUP) + at
        lse = tl.load(partial_lse + part_at, mask=valid_query, other=-float("inf"))
        part = tl.load(partial_out + part_at[:, None] * HEAD_DIM + dims[None, :], mask=valid_query[:, None], other=0.0)
        row_max, row_sum, acc = merge_partial(lse, part, row_max, row_sum, acc)
    result = acc / row_sum[:, None]
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=valid_query[:, None])


class Splits(NamedTuple):
    """Partials of the context: ``[splits, rows, heads, head_dim]``, and ``[splits, rows, heads]`` in base 2."""

    inputs: OpInputs
    out: torch.Tensor
    lse: torch.Tensor

    def result(self) -> torch.Tensor:
        """They and the new token's own partial, merged: ``[rows, heads, 1, head_dim]``."""
        parts = (
            Partial(out[:, :, None], lse[:, :, None] * math.log(2))
            for out, lse in zip(self.out, self.lse, strict=True)
        )
        return merge(new_token(self.inputs), *parts).out


class Sketch:
    """The sketch over one node, or none, split for about so many programs."""

    def __init__(self, inputs: OpInputs, programs: int):
        self.inputs = inputs
        rows, heads, _, head_dim = inputs.query.shape
        kv_heads, length = inputs.segment.keys.shape[:2]
        self.group = heads // kv_heads
        self.constants = {"GROUP": self.group, "HEAD_DIM": head_dim, "BLOCK_N": _BLOCK_N}
        packed = rows * self.group
        self.block_m = min(128, max(16, triton.next_power_of_2(packed)))
        self.query_tiles = triton.cdiv(packed, self.block_m)
        tiles = triton.cdiv(length, _BLOCK_N)
        splits = max(1, min(tiles, programs // (self.query_tiles * kv_heads)))
        self.tiles_of_split = triton.cdiv(tiles, splits)
        self.splits = triton.cdiv(tiles, max(1, self.tiles_of_split))
        held = 2 * head_dim * (self.block_m + 6 * _BLOCK_N)  # queries, and keys and values of three tiles
        self.stages = 3 if held <= shared_memory(inputs.query.device) else 2

    def attend_context(self) -> Splits:
        """The first launch."""
        query, (keys, values) = self.inputs.query, self.inputs.segment
        rows, heads, _, head_dim = query.shape
        kv_heads, length = keys.shape[:2]
        fp32 = {"dtype": torch.float32, "device": query.device}
        out = torch.empty(self.splits, rows, heads, head_dim, **fp32)
        lse = torch.empty(self.splits, rows, heads, **fp32)
        if self.splits:
            given = (query, keys, values, out, lse, rows, kv_heads, length, self.tiles_of_split, keys.stride(0))
            shape = {"BLOCK_M": self.block_m, "STAGES": self.stages, "num_warps": 8 if self.block_m == 128 else 4}
            grid = (self.query_tiles, kv_heads * self.splits)
            _context_partials[grid](*given, self.inputs.scale, **self.constants, **shape)
        return Splits(self.inputs, out, lse)

    def attend(self) -> torch.Tensor:
        """Both launches: ``[rows, heads, 1, head_dim]``."""
        query, (keys, values) = self.inputs.query, self.inputs.suffix
        rows, kv_heads, length, _ = keys.shape
        splits, out = self.attend_context(), torch.empty_like(query)
        given = (query, keys, values, splits.out, splits.lse, out, rows, kv_heads, length, self.splits)
        shape = {"BLOCK_P": max(16, triton.next_power_of_2(self.group)), "num_warps": 4}
        _suffixes_and_merge[(rows * kv_heads,)](*given, self.inputs.scale, **self.constants, **shape)
        return out
