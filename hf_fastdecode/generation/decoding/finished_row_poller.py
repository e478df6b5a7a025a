"""When the host learns which rows are alive, without waiting for the device at every step."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_STEPS_BETWEEN_POLLS = 8
"""Steps between two looks on a GPU; the host is ahead of what it knows by up to twice as many."""


class FinishedRowPoller:
    """Copies a mask to the host in the background, and remembers random states to go back to.

    Args:
        device: Where the mask is.
        synchronous: Look at every step, and wait for it.
        draws: Whether steps draw from torch's generator of the device.
    """

    def __init__(self, device: torch.device, *, synchronous: bool, draws: bool):
        self.device = device
        self.is_async = device.type == "cuda" and not synchronous
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        self._states: deque[tuple[int, Tensor]] | None = None
        if self.is_async and draws:
            self._states = deque(maxlen=2 * _STEPS_BETWEEN_POLLS + 2)

    def poll(self, mask: Tensor, step: int) -> Tensor | None:
        """The mask on the host, as it is or as it was some steps ago; None between two looks.

        Args:
            mask: ``[rows]`` bool.
            step: Steps done.
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
        event.record(torch.cuda.current_stream(self.device))  # the current device may be another one
        self._pending = copy, event
        return known

    def restore_generator(self, step: int) -> None:
        """Put the random generator back to where it was after `step` steps."""
        for known, state in self._states or ():
            if known == step:
                torch.cuda.set_rng_state(state, self.device)
