"""Whether passes of a model gather its parameters from several processes: ZeRO-3, and both versions of FSDP.

Each process may then have prompts of its own, and all must run the same passes. Parameters that were gathered before a
call, and stay so until it ends, are as those of one process: gathering is a collective, so that all processes find the
same answer.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import nn

from .._compat import fsdp2_stays_gathered
from ..parallel.groups import in_several_processes
from .known_hooks import Role, role_of
from .model_walk import ModelWalk


class Gathering(NamedTuple):
    """What gathers parameters in each pass, and how to gather them before a call instead."""

    what: str
    remedy: str


_ZERO_3 = Gathering(
    "ZeRO-3 divides its parameters between processes, and each pass gathers them",
    "gather them for the call with deepspeed.zero.GatheredParameters and without ZeRO-3's hooks, as TRL does by "
    "default (ds3_gather_for_generation=True)",
)
_FSDP_1 = Gathering(
    "FSDP 1 divides its parameters between processes, and each pass gathers them",
    "use FSDP 2 (torch.distributed.fsdp.fully_shard) and gather them for the call, or ZeRO-3",
)
_FSDP_2 = Gathering(
    "FSDP 2 divides its parameters between processes, and each pass gathers them",
    "gather them for the call: set_reshard_after_forward(False) and unshard() of every FSDPModule, reshard() after it",
)


def find_gathering(walk: ModelWalk) -> Gathering | None:
    """What gathers parameters of these modules in each pass; None where nothing does, or all are gathered now."""
    if "deepspeed" in sys.modules and _divided_by_zero_3(walk):
        return _ZERO_3
    if "torch.distributed.fsdp" not in sys.modules or not in_several_processes():
        return None
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

    for kind in walk.classes:
        if issubclass(kind, FullyShardedDataParallel):
            strategies = {module.sharding_strategy for module in _of(walk, kind)}
            return None if strategies == {ShardingStrategy.NO_SHARD} else _FSDP_1
        if issubclass(kind, FSDPModule) and not all(map(fsdp2_stays_gathered, _of(walk, kind))):
            return _FSDP_2
    return None


def _of(walk: ModelWalk, kind: type[nn.Module]) -> list[Any]:
    return [module for module in walk.modules if type(module) is kind]


def _divided_by_zero_3(walk: ModelWalk) -> bool:
    """Whether parameters are divided now, or hooks divide them again after each module."""
    found = (getattr(parameter, "ds_status", None) for parameter in walk.parameters)
    if any(status is not None and status.name != "AVAILABLE" for status in found):
        return True
    hooks = (
        hook
        for module in walk.with_code
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )
    return any(role_of(hook) is Role.GATHERS for hook in hooks)
