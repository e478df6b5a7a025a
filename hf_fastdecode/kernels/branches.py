"""Work of a captured step that runs concurrently, as parallel branches of its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

_BRANCHES = 2

_branching: ContextVar[bool] = ContextVar("branching", default=False)


@contextmanager
def branching() -> Iterator[None]:
    """Context in which `concurrently` makes branches: of a pass that is captured, or that runs before its capture."""
    token = _branching.set(True)
    try:
        yield
    finally:
        _branching.reset(token)


def concurrently(tasks: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Results of tasks that do not need each other's; they run one after another where no branches are wanted."""
    return in_branches(tasks, device) if _branching.get() and device.type == "cuda" else [task() for task in tasks]


def in_branches(tasks: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Results of tasks on a CUDA device, each on a stream of its own while streams suffice."""
    main = torch.cuda.current_stream(device)
    streams = [main, *branch_streams(device)[: len(tasks) - 1]]
    for stream in streams[1:]:
        stream.wait_stream(main)
    outputs = []
    for index, task in enumerate(tasks):
        with torch.cuda.stream(streams[index % len(streams)]):
            outputs.append(task())
    # Branch memory is reused only by branches, each of which first waits for all earlier work of `main`.
    for stream in streams[1:]:
        main.wait_stream(stream)
    return outputs


@cache
def branch_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Streams for parallel branches. All captures of a device use them: cuBLAS keeps a workspace for each stream."""
    return tuple(torch.cuda.Stream(device) for _ in range(_BRANCHES))
