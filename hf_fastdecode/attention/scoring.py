"""What a layer does to the scores of its attention, beside the products that make them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How a layer weighs the keys of a row.

    Attributes:
        scale: Factor on the scores.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        window: When given, a query sees only so many tokens of its row, of which it is itself the last.
        sinks: ``[heads]`` fp32: when given, a score of each query head that adds to the softmax's denominator, but
            stands for no key.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    @property
    def report_suffix(self) -> str:
        """Report suffix naming features beyond causal attention."""
        window = "" if self.window is None else f", within a window of {self.window} tokens"
        return window if self.sinks is None else f"{window}, with sinks"
