"""ZeRO-3, whose parameters DeepSpeed divides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ...errors import Unsupported
from ...hook_roles import Role, role_of
from .parameters import Gathering


class Zero3(Gathering):
    what = "ZeRO-3 divides its parameters between processes, and each pass gathers them"
    remedy = (
        "gather them for the call with deepspeed.zero.GatheredParameters and without ZeRO-3's hooks, as TRL does by "
        "default (ds3_gather_for_generation=True)"
    )
    group = None
    device = torch.device("cpu")
    nbytes = 0

    @classmethod
    def find(cls, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
        """Modules whose parameters are divided now, or that have hooks which divide them again after each pass."""
        if "deepspeed" not in sys.modules:
            return ()
        return tuple(module for module in modules if _is_divided(module) or _gathers(module))

    def reserve(self) -> None:
        raise Unsupported(self.what, self.remedy)

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def release(self) -> None: ...


def _is_divided(module: nn.Module) -> bool:
    found = (getattr(parameter, "ds_status", None) for parameter in module._parameters.values())
    return any(status is not None and status.name != "AVAILABLE" for status in found)


def _gathers(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(role_of(hook) is Role.GATHERS for hook in hooks)
