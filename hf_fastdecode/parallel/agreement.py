"""What the processes of a model decide together.

They run the same forward passes, in each of which they communicate: one with fewer rows, or by
another path, would leave the others waiting, or receive data of another pass. Therefore they compare each call at
its start, take the tokens that rank 0 draws, and take together each decision that one of them could take otherwise.

All methods of `Ranks` are collective: every process of the group calls the same ones in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import PeerFailedError, Unsupported, ran_out_of_memory
from .watchdog import NO_WATCHDOG, NoWatchdog

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NAMED = 4
"""Differing fields that an error names at most."""


class NoRoomError(torch.OutOfMemoryError):
    """Memory of one process of the model does not suffice, which all of them know and raise at the same place."""


class PassFailedError(RuntimeError):
    """A forward pass failed within, so that this process cannot agree with the others, which may wait in that pass."""


class Ranks:
    """The processes that compute a model together, numbered from 0 in their group: here one, which agrees with itself.

    Attributes:
        count: Number of processes.
        watchdog: Ends the calls of all when one fails.
    """

    count = 1
    watchdog = NO_WATCHDOG

    def first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor; all ranks give one of the same shape and dtype, which may be written to."""
        return tensor

    def smallest(self, *numbers: int) -> list[int]:
        """Each number's minimum over the ranks."""
        return list(numbers)

    def all(self, *conditions: bool) -> list[bool]:
        """For each condition, whether it holds on every rank."""
        return [bool(one) for one in self.smallest(*conditions)]

    def differences(self, fields: Callable[[], Mapping[str, str]]) -> str | None:
        """Which fields differ between ranks, with their values, for errors; None if they are the same everywhere.

        Args:
            fields: Makes them where there are ranks to compare them with.
        """
        return None

    def together(self) -> AbstractContextManager[None]:
        """Context of work without communication, which fails on every rank if it does on one.

        All ranks go on alike: they all raise `NoRoomError`, or all `Unsupported`, or none of them either.

        Raises:
            NoRoomError: Memory ran out on some rank.
            PeerFailedError: Another rank raised another error than `Unsupported`, and this one `Unsupported` or none.
            Unsupported: Only this error was raised; with the reason of the first such rank where this one has none.
        """
        return nullcontext()

    def pass_before_capture(self) -> AbstractContextManager[None]:
        """Context of a first pass that is not captured yet.

        Raises:
            PassFailedError: It failed on this one of several ranks, other than by `Unsupported`, which all raise.
        """
        return nullcontext()


ALONE = Ranks()


class Together(Ranks):
    """Several processes, which communicate tensors of one device.

    Args:
        group: The group that the model's own passes communicate over: as it is one, the order of all collectives is.
        device: That of the model.
        watchdog: The group's.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, watchdog: NoWatchdog = NO_WATCHDOG):
        self._group, self._device, self.watchdog = group, device, watchdog
        self.count, self._rank = group.size(), group.rank()

    def first(self, tensor: Tensor) -> Tensor:
        sent = tensor.to(self._device).contiguous()
        self.watchdog.step("a broadcast of rank 0")  # after the copy, which may wait for the device until a peer fails
        dist.broadcast(sent, group=self._group, group_src=0)
        return sent.to(tensor.device)

    def smallest(self, *numbers: int) -> list[int]:
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self.watchdog.step(f"a comparison of {len(numbers)}")
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return [int(one) for one in found.tolist()]

    def differences(self, fields: Callable[[], Mapping[str, str]]) -> str | None:
        made = dict(fields())
        digest = int.from_bytes(blake2b(json.dumps(made, sort_keys=True).encode(), digest_size=7).digest())
        least, most = self.smallest(digest, -digest)
        return None if least == -most else differences(self._gathered(made))

    @contextmanager
    def together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        try:
            if self.all(error is None) == [True]:
                return
            failures_by_rank = self._gathered(None if error is None else (_kind(error), error_text(error)))
            first: dict[str, tuple[int, str]] = {}
            for rank, failure in enumerate(failures_by_rank):
                if failure is not None:
                    first.setdefault(failure[0], (rank, failure[1]))
            if "memory" in first:
                rank, text = first["memory"]
                raise NoRoomError(
                    f"the memory of rank {rank} of the model's processes does not suffice: {text}"
                ) from error
            if "other" in first:
                if error is not None and _kind(error) == "other":
                    raise error
                raise PeerFailedError(*first["other"]) from error
            if error is not None:
                raise error
            rank, text = first["unsupported"]
            raise Unsupported(f"on rank {rank}, {text}")
        finally:
            error = None  # whose traceback holds this frame

    @contextmanager
    def pass_before_capture(self) -> Iterator[None]:
        try:
            yield
        except (Unsupported, PeerFailedError):
            raise
        except Exception as error:
            raise PassFailedError(
                f"a forward pass failed before its capture, in which the other processes of the model may wait "
                f"({error_text(error)}); use mode='eager'"
            ) from error

    def _gathered(self, one: Any) -> list[Any]:
        """What each rank gave."""
        self.watchdog.step("an exchange of errors")
        found: list[Any] = [None] * self.count
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            dist.all_gather_object(found, one, group=self._group)
        return found


def _kind(error: Exception) -> str:
    if ran_out_of_memory(error):
        return "memory"
    return "unsupported" if isinstance(error, Unsupported) else "other"


def error_text(error: Exception) -> str:
    """An error's text for another process, with its class unless that is `Unsupported`."""
    if isinstance(error, Unsupported):
        return str(error)
    return f"{type(error).__name__}: {error}"


def differences(fields: Sequence[Mapping[str, str]]) -> str:
    """Which of the ranks' fields differ, as ``name is 1 on rank 0 and 2 on rank 1``."""
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
        shape = list(value.shape)
        if value.numel() <= 1:
            return f"{value.tolist()}"
        return f"{str(value.dtype).removeprefix('torch.')} {shape} with content {checksum(value):016x}"
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
