"""Ends the communication of a process group, also what other threads wait for."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TAGS = range(0x0F5D_0000, 0x0F5D_0008)
"""Of messages that no process sends; gloo chooses one of its network devices by the tag."""


def abort(group: ProcessGroup) -> None:
    """End the collectives of a group in this process, those in flight too, so that every later one raises an error.

    Not from a thread that runs collectives: NCCL returns once no captured graph holds the communicator any more.
    """
    backends = [_unwrapped(group._get_backend(device)) for device in group._device_types]
    for backend in {id(one): one for one in backends}.values():
        if distributed.is_gloo_available() and isinstance(backend, distributed.ProcessGroupGloo):
            _close(backend)
        else:
            backend.abort()


def _unwrapped(backend: Any) -> Any:
    """The backend within what TORCH_DISTRIBUTED_DEBUG=DETAIL puts around it."""
    return getattr(backend, "wrapped_pg", backend)


def _close(backend: Any) -> None:
    """Close gloo's connections: its `abort` ends nothing that is in flight, but a message that is late closes all.

    One from a peer whose connection was closed before is not late, so that each peer is waited for.
    """
    others = (rank for rank in range(backend.size()) if rank != backend.rank())
    for peer, tag in product(others, _TAGS):
        message = torch.empty(1, device="cpu")
        with suppress(RuntimeError):
            backend.recv([message], peer, tag).wait(timedelta(milliseconds=1))
