"""Begins a call's captured prefill before transformers prepares the call, which takes some milliseconds.

The guess is that this call, like the last one, prefills its one prompt whole by a captured pass. The pass runs on a
stream of its own while the call is prepared. When the call comes to its prefill, tokens are compared: if they are
those of the pass, its results are used, and otherwise dropped. A wrong guess costs the device the time of the pass.
Therefore only calls with the arguments of the last one are guessed, and after a wrong guess none until one would have
been right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..beside import Beside
from .captured_prefill import CapturedPrefill


class Scope(Protocol):
    """A call of `generate`, see `CallScope`."""

    def callback(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function at the call's end."""
        ...


class PrefillAhead:
    """A captured pass over one prompt that was begun ahead.

    Attributes:
        ids: ``[1, length]`` int64: the prompt that was guessed, in a copy, as the caller may write to its own.
        was_right: Whether its outputs were used.
    """

    def __init__(self, captured: CapturedPrefill, ids: Tensor):
        self.captured, self.ids, self.was_right = captured, ids.clone(), False
        self._beside = Beside(ids.device, "prefill")
        with self._beside.here():
            self._outputs = captured.begin(self.ids[0])

    def is_of(self, captured: CapturedPrefill, tokens: Tensor) -> bool:
        """Whether it is a pass of this capture over these tokens, ``[length]`` int64 on the CPU."""
        return captured is self.captured and torch.equal(self.ids[0].cpu(), tokens)

    def outputs(self) -> tuple[Tensor, ...]:
        """What the pass returns, for work that is queued from now on."""
        self.was_right = True
        self.join()
        return self._outputs

    def join(self) -> None:
        """Let work that is queued from now on wait for the pass, whose memory it may use."""
        self._beside.join()
