"""ZeRO-3, whose parameters DeepSpeed divides."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import zero_init_of
from ...errors import Unsupported
from ...hook_roles import Role, role_of
from ...kernels.device import free_memory
from .parameters import MOST_OF_FREE, Gathering, Part, Place


class Zero3(Gathering):
    """ZeRO-3, whose processes have equal parts of each flat parameter, the last of them padded.

    Small parameters stay gathered between passes (`ds_persist`), in other memory after each update; they are copied.
    So are all of them where a user has gathered them, as TRL does for each rollout, on a GPU with room for both:
    captured steps need them where they were, and take longer than a copy to make. The hook that TRL leaves then is
    taken off too: it communicates in passes, of which each process has its own number.
    """

    what = "ZeRO-3 divides its parameters between processes, and each pass gathers them"
    remedy = (
        "gather them for the call with deepspeed.zero.GatheredParameters, as TRL does by default "
        "(ds3_gather_for_generation=True)"
    )

    @classmethod
    def find(cls, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
        """All modules, where parameters of one are divided now, or one has hooks of ZeRO-3."""
        return tuple(modules) if "deepspeed" in sys.modules and any(map(_is_divided, modules)) else ()

    def __init__(self, units: tuple[Any, ...]):
        super().__init__(units)
        parameters = (one for module in units for one in module._parameters.values())
        self._first = next(filter(_status, parameters), None)
        if (group := getattr(self._first, "ds_process_group", None)) is not None:
            self.group, self.device = group, zero_init_of(self._first).local_device

    def parts(self) -> list[Part]:
        found: dict[int, tuple[Any, list[tuple[nn.Module, str]]]] = {}
        for module in self.units:
            if getattr(module._parameters, "_in_forward", False):
                raise Unsupported("it is called within a forward pass of DeepSpeed's engine")
            for name, parameter in module._parameters.items():
                if _status(parameter):
                    found.setdefault(id(parameter), (parameter, []))[1].append((module, name))
        if all(_status(parameter) == "AVAILABLE" for parameter, _ in found.values()):
            copied = _copies(sum(parameter.nbytes for parameter, _ in found.values()), self.device)
            return [Part.of_whole(*one, one[0], one[0].dtype) for one in found.values()] if copied else []
        if zero_init_of(self._first).quantized_weights:
            raise Unsupported(_QUANTIZED)
        return [self._part(*one) for one in found.values() if one[0].ds_persist or _status(one[0]) != "AVAILABLE"]

    def _part(self, parameter: Any, names: list[tuple[nn.Module, str]]) -> Part:
        stored, group = parameter.ds_tensor, self.group
        if parameter.ds_process_group is not group or hasattr(parameter, "comm"):
            raise Unsupported("ZeRO-3 divides its parameters between several groups of processes")
        if hasattr(stored, "ds_quant_scale"):
            raise Unsupported(_QUANTIZED)
        if stored.status.name != "AVAILABLE":
            raise Unsupported("ZeRO-3 stores some of its parameters on disks")

        if _status(parameter) == "AVAILABLE":
            return Part.of_whole(parameter, names, stored, parameter.dtype)

        def place(whole: Tensor) -> list[Place]:
            return [Place(names, whole[: parameter.ds_numel].view(parameter.ds_shape), stored)]

        numel = stored.ds_numel * parameter.ds_zero_partition_world_size
        return Part(partial(_send, parameter, self.device), numel, stored.dtype, place)

    @staticmethod
    def is_hook(hook: Any) -> bool:
        return role_of(hook) is Role.GATHERS


_QUANTIZED = "ZeRO-3 quantizes its parameters to gather them"


def _copies(nbytes: int, device: torch.device) -> bool:
    """Whether parameters that a user has gathered are copied, to half of the memory that others may take at most."""
    return device.type == "cuda" and 2 * nbytes <= MOST_OF_FREE * free_memory(device)


_WHOLE = frozenset({None, "AVAILABLE"})


def _is_divided(module: nn.Module) -> bool:
    own = module.__dict__  # of attributes, this takes three times as long
    if (own["_forward_hooks"] or own["_forward_pre_hooks"]) and Zero3.hooks(module):
        return True
    return not _WHOLE.issuperset(map(_status, own["_parameters"].values()))


def _status(parameter: Any) -> str | None:
    """``AVAILABLE``, ``NOT_AVAILABLE`` or ``INFLIGHT``; None of a parameter that ZeRO-3 does not divide."""
    status = getattr(parameter, "ds_status", None)
    return None if status is None else status.name


def _send(parameter: Any, device: torch.device) -> Tensor:
    """This process's part, in the values that ZeRO-3 would send, which autocast may round."""
    sent: Tensor = parameter.ds_tensor.to(device, non_blocking=True)
    return sent.to(getattr(parameter, "comm_dtype", sent.dtype)).to(sent.dtype)
