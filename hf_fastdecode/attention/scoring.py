"""Options of a layer's attention scores: scale, soft cap, sliding window and sinks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """Score options of a layer.

    Attributes:
        scale: Factor on the scores.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        window: When given, a query sees only the last ``window`` tokens up to and including its own.
        sinks: ``[heads]`` fp32: when given, one more score per query head in the softmax's denominator, without
            a value.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def report_note(self) -> str:
        """Text for reports: what there is beyond causal attention; empty if nothing."""
        window = "" if self.window is None else f", within a window of {self.window} tokens"
        softcap = "" if self.softcap is None else f", with a soft cap of {self.softcap:g}"
        return window + softcap + ("" if self.sinks is None else ", with sinks")
