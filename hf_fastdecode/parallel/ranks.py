"""The processes that compute a model together, and their agreements.

They are those between which parameters are split, as by tensor parallelism, or contexts divided (`sequence`); both at
once is Helix parallelism. They run the same forward passes, in each of which they communicate: one with fewer rows, or
by another path, would leave the others waiting, or receive data of another pass. So what one of them could decide
otherwise is decided by an `Offer` of each: what one refuses all refuse, a number becomes the smallest of all, and what
must be the same is compared. In a decoding loop rank 0's tokens count, and where rows end by its clock or code.

All methods of `Ranks` are collective: every process of the group calls the same ones in the same order. A process that
computes a model by itself is `ALONE`, which agrees with itself at no cost.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from itertools import accumulate, pairwise
from numbers import Number
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PassFailedError, PeerFailedError, Unsupported, ran_out_of_memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAMED = 4
"""Differing fields that an error names at most."""

_MOST = torch.iinfo(torch.int64).max
_MOST_NUMBERS = 8
"""Most numbers of an offer: ranks that failed before they had any send as many."""


class NoRoomError(torch.OutOfMemoryError):
    """Memory ran out in one process of the model; all of them raise it at the same point."""


class Clearable(Protocol):
    """An object that keeps the communicators of NCCL from closing, as a captured graph does."""

    def clear(self) -> None: ...


class NoWatchdog:
    """The watchdog of a process that computes a model by itself, without peers; see `watchdog.Watchdog`."""

    failed: tuple[int, str] | None = None

    def call(self, name: str, timeout: float) -> AbstractContextManager[None]:
        return nullcontext()

    def running_pass(self, timeout: float) -> AbstractContextManager[None]:
        return nullcontext()

    def enter_foreign_loop(self) -> None: ...

    def frees(self, one: Clearable) -> None: ...

    def step(self, doing: str) -> None: ...


class Offer:
    """A rank's part of an agreement (`Ranks.together`), and the result.

    After it each of up to 8 `numbers` is the minimum over the ranks, and `different` says which of the compared fields
    differ between ranks; None if none does.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.different: str | None = None
        self.fields: Callable[[], Mapping[str, object]] = dict
        self.what = ""

    def compare(self, fields: Callable[[], Mapping[str, object]], what: str = "") -> None:
        """Compare fields by name, which are made where there are ranks to compare them with.

        If `what` names a call, all ranks raise ValueError where they differ; without it, `different` tells.
        """
        self.fields, self.what = fields, what


class Ranks:
    """The processes that compute a model together, numbered from 0 in their group: here one, which agrees with itself.

    Attributes:
        count, rank: Number of processes, and this one's number.
        alone: Whether it need not agree on what is not agreed on, such as captured prefill.
        watchdog: Ends the calls of all when one fails.
    """

    count, rank, alone = 1, 0, True
    watchdog = NoWatchdog()

    def first(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rank 0's tensors; all ranks give some of the same shapes and dtypes, which may be written to."""
        return tensors

    def smallest(self, *numbers: int) -> list[int]:
        return list(numbers)

    def all(self, *conditions: bool) -> list[bool]:
        """For each condition, whether it holds on every rank."""
        return [bool(one) for one in self.smallest(*conditions)]

    def together(self) -> AbstractContextManager[Offer]:
        """Context of work without communication, which fails on every rank if it does on one; yields the rank's offer.

        All ranks go on alike: they all raise ValueError, `NoRoomError` or `Unsupported`, or none of them any.

        Raises:
            ValueError: Compared fields differ, see `Offer.compare`.
            NoRoomError: Memory ran out on some rank.
            PeerFailedError: Another rank raised another error than `Unsupported`, and this one `Unsupported` or none.
            Unsupported: Only this error was raised; with the reason of the first such rank where this one has none.
        """
        return nullcontext(Offer())

    def all_raise(self, error: Exception) -> bool:
        """Whether every rank raises this error, so that they may go on from it alike."""
        return True

    def pass_before_capture(self) -> AbstractContextManager[None]:
        """Context of a first pass that is not captured yet.

        Raises PassFailedError if it failed on this one of several ranks, other than by `Unsupported`, which all raise.
        """
        return nullcontext()


ALONE = Ranks()


class Together(Ranks):
    """Several processes, which communicate tensors of the model's device.

    As the group is that of the model's passes, all collectives have one order. `model` is what they compute, for
    errors.
    """

    alone = False

    def __init__(
        self, group: ProcessGroup, device: torch.device, watchdog: NoWatchdog = ALONE.watchdog, model: str = "a model"
    ):
        self._group, self._device, self.watchdog, self._model = group, device, watchdog, model
        self.count, self.rank = group.size(), group.rank()

    def first(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """As `Ranks.first`, by one collective: larger elements first, so that all are aligned."""
        order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
        parts = [tensors[index].to(self._device).contiguous() for index in order]
        sent = parts[0] if len(parts) == 1 else torch.cat([one.reshape(-1).view(torch.uint8) for one in parts])
        self.watchdog.step("a broadcast of rank 0")  # after the copy, which may wait for the device until a peer fails
        dist.broadcast(sent, group=self._group, group_src=0)
        if len(parts) == 1:
            return (sent.to(tensors[0].device),)
        found = dict[int, Tensor]()
        ends = accumulate((one.nbytes for one in parts), initial=0)
        for index, (start, stop) in zip(order, pairwise(ends), strict=True):
            given = tensors[index]
            found[index] = sent[start:stop].view(given.dtype).view(given.shape).to(given.device)
        return tuple(found[index] for index in range(len(tensors)))

    def smallest(self, *numbers: int) -> list[int]:
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self.watchdog.step(f"a comparison of {len(numbers)}")
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return [int(one) for one in found.tolist()]

    @contextmanager
    def together(self) -> Iterator[Offer]:
        offer, error = Offer(), None
        try:
            yield offer
        except Exception as raised:
            error = raised
        try:
            self._agree(offer, error)
        finally:
            error = None  # whose traceback holds this frame

    def _agree(self, offer: Offer, error: Exception | None) -> None:
        made = {name: described(value) for name, value in offer.fields().items()}
        digest = int.from_bytes(blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=7).digest())
        numbers = [*offer.numbers, *[_MOST] * (_MOST_NUMBERS - len(offer.numbers))]
        succeeded, least, most, *numbers = self.smallest(error is None, digest, -digest, *numbers)
        offer.numbers = numbers[: len(offer.numbers)]
        if succeeded and least == -most:
            return
        mine = None if error is None else (_kind(error), _text(error))
        failures, fields = zip(*self._gathered((mine, made)), strict=True)
        if least != -most and all(fields):
            offer.different = differences(fields)
            if offer.what:
                raise ValueError(
                    f"{offer.what} on the {self.count} processes that compute {self._model} together: "
                    f"{offer.different}; give all of them the same call"
                ) from error
        first: dict[str, tuple[int, str]] = {}
        for rank, failure in enumerate(failures):
            if failure is not None:
                first.setdefault(failure[0], (rank, failure[1]))
        if "memory" in first:
            rank, text = first["memory"]
            raise NoRoomError(
                f"the memory of rank {rank} of the model's processes does not suffice: {text}"
            ) from error
        if "other" in first and (error is None or _kind(error) != "other"):
            raise PeerFailedError(*first["other"]) from error
        if error is not None:
            raise error
        if first:
            rank, text = first["unsupported"]  # which another group may have named already
            where = "" if text.startswith("on rank ") else f"on rank {dist.get_global_rank(self._group, rank)}, "
            raise Unsupported(f"{where}{text}")

    def all_raise(self, error: Exception) -> bool:
        return isinstance(error, NoRoomError)

    @contextmanager
    def pass_before_capture(self) -> Iterator[None]:
        try:
            yield
        except (Unsupported, PeerFailedError):
            raise
        except Exception as error:
            raise PassFailedError(
                f"a forward pass failed before its capture, in which the other processes of the model may wait "
                f"({_text(error)}); use mode='eager'"
            ) from error

    def _gathered(self, one: Any) -> list[Any]:
        self.watchdog.step("an exchange of errors")
        found: list[Any] = [None] * self.count
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            dist.all_gather_object(found, one, group=self._group)
        return found


def _kind(error: Exception) -> str:
    if ran_out_of_memory(error):
        return "memory"
    return "unsupported" if isinstance(error, Unsupported) else "other"


def _text(error: Exception) -> str:
    """An error's text for another process, with its class unless that is `Unsupported`."""
    return str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"


def differences(fields: Sequence[Mapping[str, str]]) -> str:
    """The fields that differ between ranks, as ``name is 1 on rank 0 and 2 on rank 1``."""
    first, differing = fields[0], []
    for name in dict.fromkeys(name for one in fields for name in one):
        for rank, one in enumerate(fields):
            if one.get(name) != first.get(name):
                values = first.get(name, "not given"), one.get(name, "not given")
                differing.append(f"{name} is {values[0]} on rank 0 and {values[1]} on rank {rank}")
                break
    more = len(differing) - _NAMED
    return "; ".join(differing[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def described(value: object) -> str:
    """A value in a few letters by which ranks compare it: tensors by shape and content, other objects by class."""
    if isinstance(value, Tensor):
        if value.numel() <= 1:
            return f"{value.tolist()}"
        dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        return f"{dtype} {shape} with content {checksum(value):016x}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {described(one)}' for name, one in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"[{', '.join(sorted(map(described, value)))}]"  # whose order depends on the process
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    if value is None or isinstance(value, Number | str):
        return repr(value)
    return type(value).__name__


_MULTIPLIERS = (-7046029254386353131, -4658895280553007687)  # odd, of SplitMix64


def checksum(tensor: Tensor) -> int:
    """64 bits that depend on a tensor's bytes and their order, computed on its device; only they leave it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)
    positions = torch.arange(1, len(words) + 1, device=words.device)
    mixed = (words ^ (positions * _MULTIPLIERS[0])) * _MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIERS[0]
    return int(mixed.sum()) % 2**64


def in_several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def splitting_groups(parameters: Iterable[Tensor]) -> list[ProcessGroup]:
    """The process groups over which parameters are split, as by tensor or expert parallelism; empty without one.

    The first is one of most processes, which must include those of the others; Unsupported where no group has all
    processes, as with two dimensions of a mesh. The groups of a model whose passes gather parameters (FSDP 2) are
    found too.
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
    if groups and not all(map(set(dist.get_process_group_ranks(groups[0])).issuperset, map(_ranks_of, groups))):
        sizes = " and ".join(str(group.size()) for group in found.values())
        raise Unsupported(f"its parameters are split over several groups of processes, of {sizes}")
    return groups


def _ranks_of(group: ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def splits_between(parameters: Iterable[Tensor], group: ProcessGroup) -> bool:
    """Whether the processes of this group split parameters, so that each of their passes has the same tokens."""
    splitting = splitting_groups(parameters)
    return bool(splitting) and _ranks_of(splitting[0]) == _ranks_of(group)


_REMEDY = "give False, 'auto', a process group, or a device mesh of one dimension"


def require_sequence_group(option: object) -> None:
    """Raise ValueError unless it is a value of ``sequence_parallel=``."""
    if option is False or option == "auto":
        return
    if dist.is_available():
        from torch.distributed import ProcessGroup
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(option, ProcessGroup):
            return
        if isinstance(option, int) and option == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"sequence_parallel was given what torch.distributed.new_group returns ({option}) to processes that "
                f"are not in the group, such as this one, rank {dist.get_rank()}; enable the model in the group's "
                "processes only, or give each process a group that it is in"
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
    """The processes that an option ``sequence_parallel=`` names (``"auto"``: the default group); None for one alone.

    Raises ValueError where torchrun started several processes, and there is no default group yet: each would keep all
    of the context, unnoticed until memory runs out.
    """
    if option is False:
        return None
    if option == "auto":
        started = os.environ.get("WORLD_SIZE", "1")
        if started not in ("", "1") and dist.is_available() and not dist.is_initialized():
            raise ValueError(
                f"sequence_parallel='auto' divides contexts between the {started} processes that were started "
                "(WORLD_SIZE), which have no process group yet; call torch.distributed.init_process_group before "
                "this, or use sequence_parallel=False"
            )
        return dist.group.WORLD if in_several_processes() else None
    group: ProcessGroup = option.get_group() if hasattr(option, "get_group") else option  # type: ignore[assignment]
    return group if group.size() > 1 else None


def common_group(splitting: ProcessGroup | None, dividing: ProcessGroup) -> ProcessGroup:
    """The processes that run the same calls, where some split a model and some divide contexts.

    They are either the same ones, or those of a mesh of two dimensions, one for each, which has all processes; else
    Unsupported.
    """
    if splitting is None:
        return dividing
    split, divided = _ranks_of(splitting), _ranks_of(dividing)
    if split == divided:
        return dividing
    world = dist.group.WORLD
    if {*split} & {*divided} == {dist.get_rank()} and world and len(split) * len(divided) == world.size():
        return world
    raise Unsupported(
        f"its parameters are split between the processes {split}, and contexts would be divided between {divided}",
        "take both from one device mesh of two dimensions, or use sequence_parallel=False",
    )
