"""The processes of a measurement, which torchrun starts, what they send, and times of calls that all make at once.

Rank 0 says what is measured, and has the rows; the others follow it. What they tell each other on the host goes over a
gloo group of their own, so that a process that waits for another keeps its GPU idle.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from hf_fastdecode._compat import all_gather_vectors
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.calls import Times, collect, idle_time, percentiles
from hf_fastdecode.measurement.rows import status_of
from hf_fastdecode.parallel import shards

from ..operator_time import replays

Result = TypeVar("Result")

_SECONDS = 600  # of waiting for another process, such as for its prefill of a long context


class PeerStatusError(Exception):
    """Another process could not measure; the message is its status."""


class Processes:
    """The processes that torchrun started, each with a device; `group` is theirs, whose collectives are measured."""

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
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, one, group=self._host)
        return found

    def first(self, one: Any) -> Any:
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


def guarded_by_all(
    columns: Iterable[str], drop: Callable[[], None], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """As `guarded`, on all processes: where any of them fails, all of them `drop` what they hold."""
    try:
        found = {"status": "ok"} | measure()
    except Exception as error:
        drop()
        found = {"status": str(error) if isinstance(error, PeerStatusError) else status_of(error)}
    collect()
    return dict.fromkeys(columns) | found


class OneProcess:
    """This process alone, to time what it does while others wait."""

    rank, count = 0, 1

    def __init__(self, device: torch.device):
        self.device = device

    def gathered(self, one: Any) -> list[Any]:
        return [one]

    def first(self, one: Any) -> Any:
        return one

    def together(self, work: Callable[[], Result]) -> Result:
        return work()


def device_of_process(name: str) -> torch.device:
    """The device of this process: a GPU of its own, or the CPU; `name` is ``auto``, ``cpu`` or ``cuda``."""
    place, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
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


@contextmanager
def counted_sends(ranks: int) -> Iterator[list[int]]:
    """Within, the bytes that this process sends by collectives and to neighbours are added to the list.

    An all-gather sends what a rank gives to each of the others, an all-reduce its part and its sums to all:
    ``2 (p - 1) / p`` of its bytes (the paper's equation 12).
    """
    sent: list[int] = []
    all_gather, all_reduce, batch = all_gather_vectors, dist.all_reduce, dist.batch_isend_irecv

    def gather(out: torch.Tensor, given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sent.append((ranks - 1) * given.nbytes)
        return all_gather(out, given, *rest, **named)

    def reduce(given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sent.append(2 * (ranks - 1) * given.nbytes // ranks)
        return all_reduce(given, *rest, **named)

    def send(operations: list[Any]) -> Any:
        sent.extend(one.tensor.nbytes for one in operations if one.op is dist.isend)
        return batch(operations)

    with (
        patch.object(shards, "all_gather_vectors", gather),
        patch.object(dist, "all_reduce", reduce),
        patch.object(dist, "batch_isend_irecv", send),
    ):
        yield sent


def time_together(
    processes: Processes | OneProcess, call: Callable[[], object], *, budget_s: float
) -> tuple[Times, bool]:
    """Seconds of a call that all processes make: of the slowest one at each percentile, and whether it was captured.

    On CUDA the call is captured in a graph, if it can be on every process; else it is made again and again, with the
    time of its launches. How often it is timed is the same on all of them.
    """
    device = processes.device
    if device.type != "cuda":
        return _slowest(processes, _wall(call, processes, budget_s)), False
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, plans, connects, and allocates what is allocated once
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        # The communication library's own thread calls CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        here = True
    except RuntimeError:
        torch.cuda.synchronize()
        here = False
    captured = all(processes.gathered(here))
    again = graph.replay if captured else call
    times = replays(again, _count(processes, min(replays(again, 3)), budget_s))
    del again
    if here:
        graph.reset()
    return _slowest(processes, times), captured


def _wall(call: Callable[[], object], processes: Processes | OneProcess, budget_s: float) -> list[float]:
    def once() -> float:
        processes.gathered(None)
        start = idle_time(processes.device)
        call()
        return idle_time(processes.device) - start

    return [once() for _ in range(_count(processes, (once(), once())[1], budget_s, least=3))]


def _count(processes: Processes | OneProcess, seconds: float, budget_s: float, least: int = 5) -> int:
    slowest = max(processes.gathered(seconds))
    return max(least, min(40, math.ceil(budget_s / slowest)))


def _slowest(processes: Processes | OneProcess, samples: list[float]) -> Times:
    return Times(*map(max, zip(*processes.gathered(tuple(percentiles(samples))), strict=True)))
