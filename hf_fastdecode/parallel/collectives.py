"""The collective of sequence parallelism: what every process of a group has, on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

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
