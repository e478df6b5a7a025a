"""Rows that decode together: how many fit in memory, and waves of them.

A row takes what its layers store of each new token, and some elements per entry of the vocabulary for its logits. Rows
are counted with capacity for as many tokens as they may draw, but no more than `_EXPECTED`: most end before a large
`max_length`. Rows that draw more are counted again whenever suffixes grow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ...kernels.device import free_memory

_EXPECTED = 1024
"""New tokens of a row that its capacity is counted with, if it may draw more."""

_USED_SHARE = 0.9
"""Share of free memory that rows may take; what remains is for the passes' activations, captures, and small pieces."""

_LOGIT_BYTES = 16
"""Bytes per row and entry of the vocabulary: logits of the prompt and of a step, and processed ones in fp32."""

_UNCOUNTED_SHARE = 64
"""Rows that need less than this fraction of a device's memory are not counted, which would ask the driver."""


class Logits(NamedTuple):
    """The device of logits, and their number per row."""

    device: torch.device
    vocabulary: int


def usable_memory(device: torch.device) -> int | None:
    """Free bytes that rows may take on a device; None where they are not known, as on a CPU."""
    return int(_USED_SHARE * free_memory(device)) if device.type == "cuda" else None


def rows_that_fit(cache: SharedContextCache, rows: int, logits: Logits, new_tokens: int, *, beside: int = 0) -> int:
    """Number of rows over the nodes of a cache that fit in memory at once, of so many rows; at least 1.

    Args:
        new_tokens: Most tokens that a row draws.
        beside: Further bytes on the device of the logits, however many rows decode.
    """
    per_row, held = Counter({logits.device: _LOGIT_BYTES * logits.vocabulary}), Counter({logits.device: -beside})
    room = cache.state.division.room(min(new_tokens, _EXPECTED))
    for layer in cache.attention_layers:
        per_row[layer.device] += room * layer.storage.suffix_bytes_per_token
        held[layer.device] += layer.storage.suffix_bytes  # which are given up, should rows not fit
    for layer in cache.state_layers:
        per_row[layer.device] += layer.row_bytes
    fit = rows
    for device, needed in per_row.items():
        if (usable := _usable_for(device, rows * needed)) is not None:
            fit = min(fit, max(1, (usable + held[device]) // needed))
    return fit


def suffixes_may_grow(cache: SharedContextCache, tokens: int) -> bool:
    """Whether memory suffices for a capacity of `tokens` tokens in each suffix."""
    more, copied = Counter[torch.device](), Counter[torch.device]()
    room = cache.state.division.room(tokens)
    most = None if cache.state.max_suffix is None else cache.state.division.room(cache.state.max_suffix)
    for layer in cache.attention_layers:
        storage, device = layer.storage, layer.device
        per_token = cache.rows * storage.suffix_bytes_per_token
        more[device] += per_token * (storage.grown_capacity(room, most) - storage.capacity)
        copied[device] = max(copied[device], per_token * storage.capacity)  # the largest, until it is copied
    needed = {device: grown + copied[device] for device, grown in more.items()}
    return all((usable := _usable_for(device, one)) is None or one <= usable for device, one in needed.items())


def _usable_for(device: torch.device, needed: int) -> int | None:
    """`usable_memory`, or None where so many bytes are not worth asking the device."""
    if device.type == "cuda" and needed * _UNCOUNTED_SHARE < torch.cuda.get_device_properties(device).total_memory:
        return None
    return usable_memory(device)


FIRST_ROOM = 512
"""Initial capacity in new tokens per row; doubled as needed."""


@dataclass
class Wave:
    """A batch of rows that decode together."""

    rows: Tensor  # [rows] int64: row numbers in the call
    tokens: Tensor  # [rows, capacity] int64: prompts followed by sampled tokens
    unfinished: Tensor
    ends: Tensor  # [rows] int64: number of sampled tokens when the row finished
    drawn: int = 0  # tokens sampled per row
    generator: Tensor | None = None  # state of torch's generator before the next draw, or after the last, if it draws
    scores: list[Tensor] = field(default_factory=list)  # [rows, vocabulary] per step, if requested
    logits: list[Tensor] = field(default_factory=list)  # raw ones, likewise
    logprobs: list[Tensor] = field(default_factory=list)  # [rows] fp32 per step, of sampled tokens, if available

    @classmethod
    def of(cls, prompts: Tensor, max_new_tokens: int) -> Wave:
        rows, width = prompts.shape
        tokens = prompts.new_empty(rows, width + min(max_new_tokens, FIRST_ROOM))
        tokens[:, :width] = prompts
        index = torch.arange(rows, device=prompts.device)
        return cls(index, tokens, torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index))

    def part(self, rows: slice) -> Wave:
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
