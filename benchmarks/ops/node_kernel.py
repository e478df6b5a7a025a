"""The kernel of nodes on its own: timed without the launch that merges, and merged in PyTorch to be checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_fastdecode.attention.kv import Scoring
from hf_fastdecode.attention.launch.kernel_call import node_addresses
from hf_fastdecode.attention.launch.plan import HeadShape, LaunchPlan
from hf_fastdecode.attention.partial import Partial, empty_partial, merge
from hf_fastdecode.kernels.forest_decode.api import NodeWorkspace, attend_nodes
from hf_fastdecode.kernels.forest_decode.schedule import Schedule

from .inputs import OpInputs


def plan_of(inputs: OpInputs) -> LaunchPlan:
    """How the kernels go over a case's forest."""
    shape = HeadShape.of(inputs.query, inputs.new.keys, Scoring(inputs.scale))
    return LaunchPlan(inputs.forest, shape, inputs.query.device)


class NodeKernel:
    """The kernel over the nodes of one set of inputs, whose suffixes are the new token alone."""

    def __init__(self, inputs: OpInputs):
        self.inputs = inputs
        query, device = inputs.query, inputs.query.device
        plan = plan_of(inputs)
        # Launches that overlap would hide a part of each in the one before.
        self.config, self.kv_heads = replace(plan.config, overlap=False), plan.shape.kv_heads
        self.schedule = plan.schedule(plan.programs(0))
        self.addresses = node_addresses(inputs.forest, [inputs.segment]).to(device)
        self.lengths = torch.zeros(len(query), dtype=torch.int32, device=device)

    def attend(self) -> Pieces:
        """Launch it."""
        tables = (self.addresses, self.lengths, self.schedule, self.config, self.kv_heads)
        return Pieces(self.inputs, self.schedule, attend_nodes(self.inputs.query, *tables, scale=self.inputs.scale))


@dataclass(frozen=True)
class Pieces:
    """What the kernel left."""

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


def new_token(inputs: OpInputs) -> Partial:
    """Each row's attention to its new token alone: ``[rows, heads, 1, head_dim]`` and ``[rows, heads, 1]``."""
    keys, values = (part.float().repeat_interleave(inputs.query.shape[1] // part.shape[1], 1) for part in inputs.new)
    return Partial(values, (inputs.query.float() * keys).sum(-1) * inputs.scale)
