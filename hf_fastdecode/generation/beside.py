"""A stream beside the current one, for checks that need not wait for the passes of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """Work beside what is queued on a device from now on; it sees all that was queued before.

    Args:
        device: Where other than CUDA, work is done when it is asked for.
    """

    def __init__(self, device: torch.device):
        self._stream, self._before = None, None
        if device.type == "cuda":
            self._stream = _stream(device)
            self._before = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Context whose work runs beside; results are for the host, which waits for them alone."""
        if self._stream is not None and self._before is not None:
            self._stream.wait_event(self._before)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield
