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
    """Runs work on a second stream, beside later work of the current one, and after its earlier work.

    Args:
        device: On devices other than CUDA, work runs at once.
        purpose: Work of one purpose runs in order, on a stream of its own.
    """

    def __init__(self, device: torch.device, purpose: str):
        self._stream, self._before = None, None
        if device.type == "cuda":
            self._stream = _stream(device, purpose)
            self._before = torch.cuda.current_stream(device).record_event()

    @contextmanager
    def here(self) -> Iterator[None]:
        """Context whose work goes to the second stream. The host may read results; other work needs `join` first."""
        if self._stream is not None and self._before is not None:
            self._stream.wait_event(self._before)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let work that is queued on the current stream from now on wait for the second one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
