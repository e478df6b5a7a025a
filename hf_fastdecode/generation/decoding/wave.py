"""Rows that decode together, and what was drawn for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_FIRST_ROOM = 512
"""New tokens of a row that memory is taken for at first; it doubles as they come."""


@dataclass
class Wave:
    """Rows that decode together.

    Attributes:
        rows: ``[rows]`` int64: their numbers in the call.
        tokens: ``[rows, capacity]`` int64: prompts, and behind them what was drawn.
        unfinished: ``[rows]`` bool.
        ends: ``[rows]`` int64: how many tokens a row had drawn when it ended.
        drawn: Tokens drawn for each row.
        scores: What the user asked to be collected, one ``[rows, vocabulary]`` a step.
        logits: Likewise.
        logprobs: ``[rows]`` fp32 a step, where the sampler gives them: of the drawn tokens, by the raw logits.
    """

    rows: Tensor
    tokens: Tensor
    unfinished: Tensor
    ends: Tensor
    drawn: int = 0
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, prompts: Tensor, max_new_tokens: int) -> Wave:
        """All rows of a call, before the first token."""
        rows, width = prompts.shape
        tokens = prompts.new_empty(rows, width + min(max_new_tokens, _FIRST_ROOM))
        tokens[:, :width] = prompts
        index = torch.arange(rows, device=prompts.device)
        return cls(index, tokens, torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index))

    def part(self, rows: slice) -> Wave:
        """Some of the rows, to go on by themselves."""
        return Wave(
            self.rows[rows],
            self.tokens[rows].clone(),
            self.unfinished[rows],
            self.ends[rows],
            self.drawn,
            logprobs=[step[rows] for step in self.logprobs],
        )

    def with_next(self, tokens: Tensor, width: int) -> Tensor:
        """The rows so far with the tokens ``[rows]`` of one step, which `commit` takes over."""
        at = width + self.drawn
        if at == self.tokens.shape[1]:
            room = self.tokens.new_empty(len(tokens), self.drawn)
            self.tokens = torch.cat([self.tokens, room], dim=1)
        self.tokens[:, at] = tokens
        return self.tokens[:, : at + 1]

    def commit(self, ended: Tensor | None) -> None:
        """Take over the step's tokens, with which the rows `ended` (bool ``[rows]``) end if they have not before."""
        if ended is not None:
            ends = torch.where(self.unfinished & ended, self.drawn + 1, self.ends)
            unfinished = self.unfinished & ~ended
            self.ends, self.unfinished = ends, unfinished
        self.drawn += 1

    def end(self) -> None:
        """Note that all rows end here that have not before."""
        self.ends = torch.where(self.unfinished, self.drawn, self.ends)
        self.unfinished = torch.zeros_like(self.unfinished)


def concatenate(waves: list[Wave], pad: Tensor) -> Wave:
    """The waves' rows in the call's order, padded to one length."""
    drawn = max(wave.drawn for wave in waves)
    rows = sum(len(wave.rows) for wave in waves)
    first = waves[0]
    whole = Wave(
        torch.arange(rows, device=first.rows.device),
        pad.expand(rows, first.tokens.shape[1] - first.drawn + drawn).clone(),
        first.unfinished.new_zeros(rows),
        first.ends.new_zeros(rows),
        drawn,
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
