"""FSDP 2 (`torch.distributed.fsdp.fully_shard`) and FSDP 1 (`FullyShardedDataParallel`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..._compat import fsdp2_groups, fsdp2_state, fsdp2_states_of_root, fsdp2_stays_gathered, is_fsdp2
from ...errors import Unsupported
from ...hook_roles import defining_module
from .parameters import Gathering, Part, Place, Swaps

_FSDP = "torch.distributed.fsdp"
_IN_PASS = "it is called within a forward or backward pass of FSDP"
_SEVERAL_DTYPES = "modules have mixed precision of several dtypes, to which FSDP casts their inputs in passes"


class Fsdp2(Gathering):
    """FSDP 2, whose groups of parameters are shards along the first dimension, padded to equal sizes.

    The processes' shards in order are the whole parameter, so that one collective writes each to its place. Groups
    stay as they are; those that a pass without a backward pass has left gathered, as it does the root's, are divided
    again first. Mixed precision gathers what FSDP would.
    """

    what = "FSDP 2 divides its parameters between processes, and each pass gathers them"
    remedy = (
        "gather them for the call: set_reshard_after_forward(False) and unshard() of every FSDPModule, reshard() "
        "after it"
    )

    @classmethod
    def find(cls, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
        if not is_fsdp2(modules):
            return ()
        from torch.distributed.fsdp import FSDPModule

        found = {id(module): module for module in modules if isinstance(module, FSDPModule) and cls.hooks(module)}
        states = [state for module in found.values() for state in fsdp2_states_of_root(fsdp2_state(module))]
        groups = [group for state in {id(one): one for one in states}.values() for group in fsdp2_groups(state)]
        return () if all(map(fsdp2_stays_gathered, groups)) else (*found.values(), *groups)

    def __init__(self, units: tuple[Any, ...]):
        super().__init__(units)
        self._groups = [unit for unit in units if not isinstance(unit, nn.Module)]
        mesh, self.device = self._groups[0].mesh_info, self._groups[0].device
        self.group = getattr(mesh, "shard_process_group", None)
        self.replicas = getattr(mesh, "replicate_process_group", None)

    def parts(self) -> list[Part]:
        found = []
        for group in self._groups:
            if getattr(group.mesh_info, "shard_process_group", None) is not self.group:
                raise Unsupported("FSDP 2 divides its parameters between several groups of processes")
            group.lazy_init()
            if group._training_state.name != "IDLE":
                if fsdp2_stays_gathered(group):  # by `generate` itself, see `register_fsdp_forward_method`
                    continue
                raise Unsupported(_IN_PASS)
            found += [self._part(group, parameter) for parameter in group.fsdp_params]
        dtypes = {part.dtype for part in found if part.dtype.is_floating_point}
        if len(dtypes) > 1 and any(group.mp_policy.param_dtype for group in self._groups):
            raise Unsupported(_SEVERAL_DTYPES)
        return found

    def _part(self, group: Any, parameter: Any) -> Part:
        if parameter.is_dtensor:
            raise Unsupported("its parameters are split by tensor parallelism too, beside FSDP 2")
        if parameter.fsdp_placement.dim or hasattr(parameter.sharded_param._local_tensor, "fsdp_pre_all_gather"):
            raise Unsupported("FSDP 2 divides some parameter in a way of its own (shard_placement_fn, or a subclass)")
        info = parameter._module_info
        names = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]

        def place(whole: Tensor) -> list[Place]:
            view = whole.as_strided(parameter._orig_size, parameter._contiguous_orig_stride)
            return [Place(names, view, parameter.sharded_param)]

        def send() -> Tensor:
            group.reshard()
            sent: Tensor = parameter.all_gather_inputs[0]
            return sent

        numel = parameter.padded_sharded_param_size.numel() * parameter.mesh_info.shard_mesh_size
        return Part(send, numel, parameter.param_dtype or parameter.orig_dtype, place)

    @staticmethod
    def is_hook(hook: Any) -> bool:
        return defining_module(hook).startswith(_FSDP)


class Fsdp1(Gathering):
    """FSDP 1, whose wrappers around modules each have one flat parameter.

    In the call, the modules are in the places of their wrappers. What a user has gathered by `summon_full_params` is
    not gathered again. That has full precision; with mixed precision, where each wrapper casts what its module is
    given, parameters outside of them are cast instead, as those of the model around them in TRL.
    """

    what = "FSDP 1 divides its parameters between processes, and each pass gathers them"
    remedy = "use FSDP 2 (torch.distributed.fsdp.fully_shard), or ZeRO-3"

    @classmethod
    def find(cls, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
        if _FSDP not in sys.modules:
            return ()
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        if not any(issubclass(kind, FullyShardedDataParallel) for kind in set(map(type, modules))):
            return ()
        wrappers = [module for module in modules if isinstance(module, FullyShardedDataParallel)]
        if all(wrapper.sharding_strategy is ShardingStrategy.NO_SHARD for wrapper in wrappers):
            return ()
        within = {module for wrapper in wrappers for module in wrapper.modules()}
        places = [
            (parent, name, child)
            for parent in modules
            for name, child in parent._modules.items()
            if isinstance(child, FullyShardedDataParallel)
        ]
        return (*places, *((one, "", None) for one in modules if one._parameters and one not in within))

    def __init__(self, units: tuple[Any, ...]):
        super().__init__(units)
        wrappers = [one for _, _, one in units if one is not None]
        self._handles = [one._handle for one in wrappers if one._handle is not None]
        if self._handles:
            self.group, self.device = self._handles[0].process_group, self._handles[0].device
            self.replicas = getattr(wrappers[0], "_inter_node_pg", None)

    def parts(self) -> list[Part]:
        found = []
        for handle in self._handles:
            state = handle._training_state.name
            if not handle.uses_sharded_strategy or state == "SUMMON_FULL_PARAMS":
                continue
            if handle.process_group is not self.group:
                raise Unsupported("FSDP 1 divides its parameters between several groups of processes")
            if state != "IDLE":
                raise Unsupported(_IN_PASS)
            flat = handle.flat_param
            shard = getattr(flat, "_local_shard", flat.data)  # the latter before the first pass
            dtype = handle._fwd_bwd_param_dtype
            send = partial(shard.to, handle.device, dtype, non_blocking=True)
            found.append(Part(send, shard.numel() * handle.world_size, dtype, partial(_flat_places, handle)))
        return found + self._casts()

    def _casts(self) -> list[Part]:
        """Parts of the parameters outside of wrappers that have another dtype than those within, tied ones once."""
        dtypes = {one._fwd_bwd_param_dtype for one in self._handles if one._uses_param_mixed_precision}
        if len(dtypes) > 1:
            raise Unsupported(_SEVERAL_DTYPES)
        if not dtypes:
            return []
        dtype, names = dtypes.pop(), dict[Tensor, list[tuple[nn.Module, str]]]()
        for module, _, wrapper in self.units:
            for name, parameter in module._parameters.items() if wrapper is None else ():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
                    names.setdefault(parameter, []).append((module, name))
        return [Part.of_whole(parameter, where, parameter, dtype) for parameter, where in names.items()]

    def put(self, swaps: Swaps) -> None:
        for parent, name, wrapper in self.units:
            if wrapper is not None:
                inner = wrapper._fsdp_wrapped_module
                swaps.put(parent._modules, name, inner)
                if "_flat_param" in inner._parameters:
                    swaps.take(inner._parameters, "_flat_param")


def _flat_places(handle: Any, whole: Tensor) -> list[Place]:
    flat = handle.flat_param
    views = handle._get_unflat_views(whole[: flat._unpadded_unsharded_size.numel()])
    names: dict[tuple[int, str], list[tuple[nn.Module, str]]] = {}
    for name, module, _ in flat._param_infos:
        names[id(module), name] = [(module, name)]
    for name, module, _, first_name, first, _ in flat._shared_param_infos:
        names[id(first), first_name].append((module, name))
    stored = flat._params or [flat] * len(names)
    return [Place(*one) for one in zip(names.values(), views, stored, strict=True)]
