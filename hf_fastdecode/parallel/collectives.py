"""The collective of sequence parallelism: what every process of a group has, on all of them."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ..attention.kv import Segment

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_gather(found: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Gather the numbers of each process, one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(found, own, group=group)


def gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """``[ranks, numbers]``: the numbers of each process in order of ranks, of as many on all; `own` is contiguous."""
    found = own.new_empty(group.size() * own.numel())
    all_gather(found, own.view(-1), group=group)
    return found.view(group.size(), -1)


def gathered_tokens(own: Segment, longest: int, order: Tensor, group: ProcessGroup) -> Segment:
    """Keys and values ``[kv_heads, tokens, head_dim]`` that all processes have; one collective.

    Args:
        own: Those of this process, ``[kv_heads, own, head_dim]`` each.
        longest: Most tokens of a process.
        order: ``[tokens]`` int64, on the CPU: for each token, rank and place there, as rank * `longest` + place.
    """
    shapes = [(longest, part.shape[0], part.shape[2]) for part in own]
    sizes = list(map(prod, shapes))
    sent = own.keys.new_zeros(sum(sizes))
    for room, shape, part in zip(sent.split(sizes), shapes, own, strict=True):
        room.view(shape)[: part.shape[1]] = part.transpose(0, 1)
    by_rank = gathered(sent, group)
    order = order.to(by_rank.device)
    return Segment._make(
        part.reshape(-1, *shape[1:]).index_select(0, order).transpose(0, 1)
        for part, shape in zip(by_rank.split(sizes, dim=1), shapes, strict=True)
    )
