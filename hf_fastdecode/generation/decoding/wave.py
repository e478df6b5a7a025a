"""Waves: rows that decode together, with their tokens and collected outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST_ROOM = 512
"""Initial capacity in new tokens per row; doubled as needed."""


@dataclass
class Wave:
    """A batch of rows that decode together.

    Attributes:
        rows: ``[rows]`` int64: row numbers in the call.
        tokens: ``[rows, capacity]`` int64: prompts followed by sampled tokens.
        ends: ``[rows]`` int64: number of sampled tokens when the row finished.
        drawn: Tokens sampled per row.
        generator: State of torch's generator before the next draw, or after the last one; None if nothing is drawn
            with it.
        scores: Collected scores, one ``[rows, vocabulary]`` per step, if requested.
        logits: Collected raw logits, likewise.
        logprobs: Log-probabilities of the sampled tokens under the raw logits, ``[rows]`` fp32 per step, if available.
    """

    rows: Tensor
    tokens: Tensor
    unfinished: Tensor
    ends: Tensor
    drawn: int = 0
    generator: Tensor | None = None
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, prompts: Tensor, max_new_tokens: int) -> Wave:
        """A wave of all rows of a call, before the first token."""
        rows, width = prompts.shape
        tokens = prompts.new_empty(rows, width + min(max_new_tokens, FIRST_ROOM))
        tokens[:, :width] = prompts
        index = torch.arange(rows, device=prompts.device)
        return cls(index, tokens, torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index))

    def part(self, rows: slice) -> Wave:
        """A wave of some of the rows."""
        return Wave(
            self.rows[rows],
            self.tokens[rows].clone(),
            self.unfinished[rows],
            self.ends[rows],
            self.drawn,
            self.generator,
            logprobs=[step[rows] for step in self.logprobs],
        )

    def with_next(self, tokens: Tensor, width: int) -> Tensor:
        """Write one step's tokens ``[rows]``, made permanent by `commit`; returns ``[rows, length]`` with them."""
        at = width + self.drawn
        if at == self.tokens.shape[1]:
            room = self.tokens.new_empty(len(tokens), self.drawn)
            self.tokens = torch.cat([self.tokens, room], dim=1)
        self.tokens[:, at] = tokens
        return self.tokens[:, : at + 1]

    def commit(self, ended: Tensor | None) -> None:
        """Commit the step's tokens and mark the rows `ended` (bool ``[rows]``) as finished."""
        if ended is not None:
            ends = torch.where(self.unfinished & ended, self.drawn + 1, self.ends)
            unfinished = self.unfinished & ~ended
            self.ends, self.unfinished = ends, unfinished
        self.drawn += 1

    def end(self) -> None:
        """Mark all unfinished rows as finished."""
        self.ends = torch.where(self.unfinished, self.drawn, self.ends)
        self.unfinished = torch.zeros_like(self.unfinished)


def concatenate(waves: list[Wave], pad: Tensor) -> Wave:
    """Concatenate waves to one in the call's row order, padded to one length."""
    drawn = max(wave.drawn for wave in waves)
    rows = sum(len(wave.rows) for wave in waves)
    first = waves[0]
    whole = Wave(
        torch.arange(rows, device=first.rows.device),
        pad.expand(rows, first.tokens.shape[1] - first.drawn + drawn).clone(),
        first.unfinished.new_zeros(rows),
        first.ends.new_zeros(rows),
        drawn,
        max(waves, key=lambda wave: wave.drawn).generator,  # the loop over all rows ends with the last of them
    )
    for wave in waves:
        whole.tokens[wave.rows, : wave.tokens.shape[1]] = wave.tokens
        whole.ends[wave.rows] = wave.ends
    if all(len(wave.logprobs) == wave.drawn for wave in waves):
        whole.logprobs = list(first.logprobs[0].new_zeros(drawn, rows))
        for wave in waves:
            for step, logprobs in enumerate(wave.logprobs):
                whole.logprobs[step][wave.rows] = logprobs
    return whole
