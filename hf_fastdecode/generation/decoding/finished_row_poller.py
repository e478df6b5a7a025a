"""Asynchronous polling of finished rows, so that the host does not wait for the device at every step."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_STEPS_BETWEEN_POLLS = 8
"""Steps between polls on a GPU; a result is up to twice as many steps old."""


class FinishedRowPoller:
    """Copies the mask of unfinished rows to the host asynchronously, and keeps generator states to restore.

    Args:
        device: Device of the mask.
        synchronous: Poll at every step and wait for the result.
        draws: Whether steps advance torch's generator of the device.
    """

    def __init__(self, device: torch.device, *, synchronous: bool, draws: bool):
        self.device = device
        self.is_async = device.type == "cuda" and not synchronous
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        self._states: deque[tuple[int, Tensor]] | None = None
        if self.is_async and draws:
            self._states = deque(maxlen=2 * _STEPS_BETWEEN_POLLS + 2)

    def poll(self, mask: Tensor, step: int) -> Tensor | None:
        """Return the mask on the host, possibly some steps old; None between polls.

        Args:
            mask: ``[rows]`` bool.
            step: Steps completed.
        """
        if not self.is_async:
            return mask.cpu()
        if self._states is not None:
            self._states.append((step, torch.cuda.get_rng_state(self.device)))
        if step % _STEPS_BETWEEN_POLLS:
            return None
        known = None
        if self._pending is not None:
            known, copied = self._pending
            copied.synchronize()
        copy = torch.empty(mask.shape, dtype=torch.bool, pin_memory=True, device="cpu")
        copy.copy_(mask, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))  # may not be the current device
        self._pending = copy, event
        return known

    def restore_generator(self, step: int) -> None:
        """Restore the generator's state after `step` steps."""
        for known, state in self._states or ():
            if known == step:
                torch.cuda.set_rng_state(state, self.device)
