"""The processes of a measurement: started by torchrun, they measure the same case in the same way at the same time.

Rank 0 says what is measured, and has the rows; the others follow it. What they tell each other on the host goes over a
gloo group of their own, so that a process that waits for another keeps its GPU idle.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.rows import status_of

Result = TypeVar("Result")

_SECONDS = 600  # of waiting for another process, such as for its prefill of a long context


class PeerStatusError(Exception):
    """Another process could not measure; the message is its status."""


class Processes:
    """The processes that torchrun started, each with a device.

    Attributes:
        group: Those of the default process group, whose collectives are measured.
    """

    def __init__(self, device: torch.device):
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            own = device if device.type == "cuda" else None
            dist.init_process_group(backend, timeout=timedelta(seconds=_SECONDS), device_id=own)
        group = dist.group.WORLD
        assert group is not None
        self.device, self.group, self.rank, self.count = device, group, group.rank(), group.size()
        self._host = dist.new_group(backend="gloo", timeout=timedelta(seconds=_SECONDS))

    def gathered(self, one: Any) -> list[Any]:
        """What each process gave, an object that can be pickled."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, one, group=self._host)
        return found

    def first(self, one: Any) -> Any:
        """What rank 0 gave."""
        box = [one]
        dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    def together(self, work: Callable[[], Result]) -> Result:
        """Do work that does not communicate on every process, or raise on all of them."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:
            error = raised
        statuses = self.gathered(None if error is None else status_of(error))
        if error is not None:
            raise error
        for rank, status in enumerate(statuses):
            if status is not None:
                raise PeerStatusError(status if "memory" in status else f"{status} (on rank {rank})")
        return result

    def alone(self, work: Callable[[], Result]) -> Result | None:
        """Do work on rank 0, while the others wait and have None; raises on all of them."""
        return self.together(lambda: work() if self.rank == 0 else None)

    def end(self, code: int = 0) -> NoReturn:
        """Leave with an exit code, once every process has come to its end.

        The process group is not destroyed: where its collectives were captured, that can hang.
        """
        dist.barrier(self._host)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class OneProcess:
    """This process alone, to time what it does while others wait."""

    rank, count = 0, 1

    def __init__(self, device: torch.device):
        self.device = device

    def gathered(self, one: Any) -> list[Any]:
        """What it gave."""
        return [one]


def launched() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is rank 0, which writes files."""
    return os.environ.get("RANK", "0") == "0"


def device_of_process(name: str) -> torch.device:
    """The device of this process: a GPU of its own, or the CPU; `name` is ``auto``, ``cpu`` or ``cuda``."""
    place, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", str(launched())))
    if name == "cpu" or (name == "auto" and not found):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
        return torch.device("cpu")
    if place >= found:
        raise InputError(
            f"{here} processes need a GPU each, and this machine has {found}; start at most {found}, "
            "or give `device` cpu"
        )
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device
