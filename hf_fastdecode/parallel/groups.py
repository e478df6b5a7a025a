"""Which processes compute a model together: those between which its parameters are split."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._compat import local_tensor
from ..errors import Unsupported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def splitting_groups(parameters: Iterable[Tensor]) -> list[ProcessGroup]:
    """The process groups over which parameters are split, as by tensor or expert parallelism; empty without one.

    The first is one of most processes, which must include those of the others. All of its processes run the same
    passes, in each of which they communicate. The groups of a model whose parameters are gathered before use are found
    too, see `gathers_parameters`.

    Raises:
        Unsupported: No group has all processes, as with two dimensions of a mesh.
    """
    if not in_several_processes() or "torch.distributed.tensor" not in sys.modules:
        return []
    from torch.distributed.tensor import DTensor

    found: dict[tuple[object, int], ProcessGroup] = {}
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard() and mesh.size(dimension) > 1 and (mesh, dimension) not in found:
                found[mesh, dimension] = mesh.get_group(dimension)
    groups = sorted(found.values(), key=lambda group: -group.size())
    if len(groups) > 1:
        members = set(torch.distributed.get_process_group_ranks(groups[0]))
        if not all(members.issuperset(torch.distributed.get_process_group_ranks(group)) for group in groups):
            sizes = " and ".join(str(group.size()) for group in found.values())
            raise Unsupported(f"its parameters are split over several groups of processes, of {sizes}")
    return groups


def gathers_parameters(classes: Iterable[type[nn.Module]]) -> bool:
    """Whether passes gather parameters of these modules (FSDP 2): then processes may have prompts of their own."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(issubclass(kind, FSDPModule) for kind in classes)


def in_several_processes() -> bool:
    """Whether this process belongs to a default group of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def local_part(tensor: Tensor) -> Tensor:
    """What this process stores of a tensor that may be split between processes."""
    local = local_tensor(tensor)
    return tensor if local is None else local
