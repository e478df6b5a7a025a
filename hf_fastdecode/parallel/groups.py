"""Which processes compute a model together: those between which its parameters are split, or contexts divided.

Both at once is Helix parallelism. Tensor parallelism stores a part of the KV heads in each process, at least one; with
fewer KV heads than processes, it stores some of them several times. By `sequence_parallel_plan` each process computes
the queries, keys and values of all heads instead, and stores its part of the context's tokens; the other layers, which
are most of the weights, are split as ever.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .._compat import local_tensor
from ..errors import Unsupported

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def splitting_groups(parameters: Iterable[Tensor]) -> list[ProcessGroup]:
    """The process groups over which parameters are split, as by tensor or expert parallelism; empty without one.

    The first is one of most processes, which must include those of the others. All of its processes run the same
    passes, in each of which they communicate. The groups of a model whose passes gather parameters (FSDP 2) are found
    too.

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


def splits_between(parameters: Iterable[Tensor], group: ProcessGroup) -> bool:
    """Whether the processes of this group split parameters, so that each of their passes has the same tokens."""
    splitting, ranks_of = splitting_groups(parameters), torch.distributed.get_process_group_ranks
    return bool(splitting) and ranks_of(splitting[0]) == ranks_of(group)


_REMEDY = "give False, 'auto', a process group, or a device mesh of one dimension"


def require_sequence_group(option: object) -> None:
    """Raise ValueError unless it is a value of ``sequence_parallel=``."""
    if option is False or option == "auto":
        return
    if torch.distributed.is_available():
        from torch.distributed import ProcessGroup
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(option, ProcessGroup):
            return
        if isinstance(option, int) and option == torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"sequence_parallel was given what torch.distributed.new_group returns ({option}) to processes that "
                f"are not in the group, such as this one, rank {torch.distributed.get_rank()}; enable the model in "
                "the group's processes only, or give each process a group that it is in"
            )
        if isinstance(option, DeviceMesh):
            if option.ndim == 1:
                return
            raise ValueError(
                f"sequence_parallel takes a device mesh of one dimension, got one of {option.ndim}; give one of its "
                f"dimensions, such as mesh[{(option.mesh_dim_names or ('sp',))[0]!r}]"
            )
    raise ValueError(f"sequence_parallel must be a group of processes, got {option!r}; {_REMEDY}")


def sequence_group(option: object) -> ProcessGroup | None:
    """The processes that an option ``sequence_parallel=`` names; None where there is one alone.

    ``"auto"`` names those of the default group.

    Raises:
        ValueError: torchrun started several processes, and there is no default group yet: each would keep all of the
            context, unnoticed until memory runs out.
    """
    if option is False:
        return None
    if option == "auto":
        started = os.environ.get("WORLD_SIZE", "1")
        if started not in ("", "1") and torch.distributed.is_available() and not torch.distributed.is_initialized():
            raise ValueError(
                f"sequence_parallel='auto' divides contexts between the {started} processes that were started "
                "(WORLD_SIZE), which have no process group yet; call torch.distributed.init_process_group before "
                "this, or use sequence_parallel=False"
            )
        return torch.distributed.group.WORLD if in_several_processes() else None
    group: ProcessGroup = option.get_group() if hasattr(option, "get_group") else option  # type: ignore[assignment]
    return group if group.size() > 1 else None


def common_group(splitting: ProcessGroup | None, dividing: ProcessGroup) -> ProcessGroup:
    """The processes that run the same calls, where some split a model and some divide contexts.

    They are either the same ones, or those of a mesh of two dimensions, one for each, which has all processes.

    Raises:
        Unsupported: They are neither.
    """
    if splitting is None:
        return dividing
    distributed = torch.distributed
    split, divided = (distributed.get_process_group_ranks(group) for group in (splitting, dividing))
    if split == divided:
        return dividing
    crossing = set(split) & set(divided) == {distributed.get_rank()}
    world = distributed.group.WORLD
    if crossing and world is not None and len(split) * len(divided) == world.size():
        return world
    raise Unsupported(
        f"its parameters are split between the processes {split}, and contexts would be divided between {divided}",
        "take both from one device mesh of two dimensions, or use sequence_parallel=False",
    )


def in_several_processes() -> bool:
    """Whether this process belongs to a default group of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def local_part(tensor: Tensor) -> Tensor:
    """What this process stores of a tensor that may be split between processes."""
    local = local_tensor(tensor)
    return tensor if local is None else local


_WHOLE, _OF_WHOLE_INPUT = "replicate", "rowwise_split_input"


def sequence_parallel_plan(config: PreTrainedConfig) -> dict[str, str]:
    """A plan of transformers' tensor parallelism that leaves attention heads whole.

    ::

        plan = hf_fastdecode.sequence_parallel_plan(AutoConfig.from_pretrained(name))
        distributed = DistributedConfig(tp_size=2, tp_plan=plan)
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed)
        hf_fastdecode.enable(model, sequence_parallel="auto")

    Projections to queries, keys and values are computed by every process, and the projection of attention's output is
    split by its inputs. All other layers are split as by ``tp_plan="auto"``.

    Args:
        config: That of the model.

    Returns:
        Styles of all modules and parameters that the plan names, by their names with ``*`` for a layer's number.

    Raises:
        TypeError: It is no config.
        ValueError: transformers has no plan for this architecture.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"sequence_parallel_plan takes a model's config, got {type(config).__name__}; give it "
            "AutoConfig.from_pretrained(name), or model.config"
        )
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    with torch.device("meta"):
        model = _class_of(config)
    usual: dict[str, str] = model.tp_plan or {}
    attention = {_generic(name) for name, module in model.named_modules() if _attends(module)}
    plan = {}
    for name, style in usual.items():
        if not any(name == one or name.startswith(f"{one}.") for one in attention):
            plan[name] = style
        elif style in ("rowwise", _OF_WHOLE_INPUT):
            plan[name] = _OF_WHOLE_INPUT
        elif _WHOLE in ALL_PARALLEL_STYLES:  # else a plan replaces the model's own: what it does not name is whole
            plan[name] = _WHOLE
    if not plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; load it in every process, and "
            "divide its context alone: enable(model, sequence_parallel='auto')"
        )
    return plan


def _class_of(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this config on the current device, of the class that its checkpoint names."""
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if named is not None and issubclass(named, PreTrainedModel):
        return named._from_config(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _attends(module: nn.Module) -> bool:
    """Whether a module has the projections of one layer's attention."""
    return "layer_idx" in vars(module) and any(hasattr(module, name) for name in ("is_causal", "num_key_value_groups"))


def _generic(name: str) -> str:
    """A module's name with ``*`` for numbers, as plans have it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
