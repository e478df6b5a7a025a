"""Streams beside the current one: for checks that need not wait for a call's passes, and for a pass begun ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch


@cache
def _stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Beside:
    """Work beside what is queued on a device from now on; it sees all that was queued before.

    Args:
        device: Where other than CUDA, work is done when it is asked for.
        purpose: Work of one purpose is done in its order, beside that of others.
    """

    def __init__(self, device: torch.device, purpose: str):
        self._stream, self._before = None, None
        if device.type == "cuda":
            self._stream = _stream(device, purpose)
            self._before = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Context whose work runs beside; its results are for the host, which waits for them alone, or need `join`."""
        if self._stream is not None and self._before is not None:
            self._stream.wait_event(self._before)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let work that is queued from now on, on the current stream, wait for what runs beside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
