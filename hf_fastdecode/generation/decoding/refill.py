"""Decoding of more rows than decode at once: waiting rows take the slots of finished ones.

Each slot of the batch holds one row of the call; rows are at steps of their own. A row's tokens do not
depend on the others: it begins after its prompt's nodes with an empty suffix, and its random numbers, if any, come
from its number and its own step. A captured step goes on with other rows, since the tables that it reads have a length
per row. Slots are refilled once enough of them hold finished rows, which also saves transfers: the host looks every
few steps only. Rows of one prompt are taken into any slot. Where prompts differ, the batch is put in the call's order,
for the rows of a node to be neighbours, by a copy of the suffixes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ..prompts.start import Start
from ..report import CallReport
from ..steps.modes import Steps, StepsMaker
from .sampling import Sampler, TokenLogProbs
from .stopping import FinishedRowPoller, Stopping
from .waves import FIRST_ROOM, Wave, suffixes_may_grow

_WAIT_FOR = 16
"""Slots are refilled once one in this many holds a finished row; a refill costs about a step."""


@dataclass
class Refill:
    """The rows of a call, of which a part decodes at once."""

    prompts: Tensor  # [rows, width] int64
    start: Start
    sampler: Sampler
    stopping: Stopping
    make_steps: StepsMaker
    report: CallReport
    new_tokens: int  # most that a row draws
    pad: Tensor  # the token after a row's end, 0-dimensional int64
    log_probs: TokenLogProbs | None = None  # for which log-probabilities are gathered

    def __post_init__(self) -> None:
        self.device, self.width = self.prompts.device, self.prompts.shape[1]
        self.paths = self.start.cache.forest.paths
        self.slots: list[int] = []  # the row of each slot of the batch
        # By slot, the tokens drawn since its row began: its suffix has one less. They go on counting after its end.
        self.lengths: list[int] = []
        self.waiting = deque(range(len(self.prompts)))  # rows without a slot, in order
        self.drawn = torch.zeros(len(self.prompts), dtype=torch.long, device=self.device)  # tokens of each row
        self.unfinished = torch.ones_like(self.drawn, dtype=torch.bool)
        self.tokens = self.prompts  # [rows, width + capacity + 1]; the last column takes what finished rows draw
        self.gathered = None if self.log_probs is None else torch.zeros(len(self.prompts), 0, device=self.device)
        self._grow(min(self.new_tokens, FIRST_ROOM))
        self._longest = 0  # tokens of any row before a draw, so far
        self._rows = self._columns = self._positions = self.drawn[:0]

    def run(self, cache: SharedContextCache) -> Wave:
        """Decode all rows, the first of which are those of the cache; returns them as one wave."""
        self.slots = [self.waiting.popleft() for _ in range(cache.rows)]
        self.lengths = [1] * cache.rows
        self._follow_slots()
        self._draw(self._rows, self.start.logits[: cache.rows], [0] * cache.rows)
        steps, step = self.make_steps(cache), 0
        poller = FinishedRowPoller(self.device, synchronous=False, draws=False)
        while True:
            mask = poller.poll(self.unfinished, step := step + 1)
            if max(self.lengths) >= self.new_tokens:  # whose suffixes must not grow further
                mask = self.unfinished.cpu()
            if mask is not None:
                if not bool(mask.any()):
                    break
                steps = self._replace_finished(steps, mask)
            steps = self._make_room(steps)
            last = self.tokens[self._rows, self._columns - 1]
            logits = steps(last, self._positions)
            self._draw(self._rows, logits, self.lengths)
            self.lengths = [length + 1 for length in self.lengths]
            self._columns, self._positions = self._columns + 1, self._positions + 1
        self.report.observe(steps.cache)
        return self._whole()

    def _replace_finished(self, steps: Steps, mask: Tensor) -> Steps:
        """Refill, compact, or empty the slots of finished rows, if it is time; `mask` says which rows go on."""
        finished = [slot for slot, row in enumerate(self.slots) if not mask[row]]
        at_end = max(self.lengths) >= self.new_tokens
        if self.waiting:
            if finished and (at_end or len(finished) * _WAIT_FOR >= len(self.slots)):
                steps = self._refill(steps, finished)
        elif steps.should_compact(len(self.slots) - len(finished), self.new_tokens - min(self.lengths)):
            gone = set(finished)
            steps = self._keep(steps, [slot for slot in range(len(self.slots)) if slot not in gone])
            self.report.compactions += 1
        if max(self.lengths) >= self.new_tokens:  # finished rows that stay in the batch
            long = [slot for slot, length in enumerate(self.lengths) if length >= self.new_tokens]
            steps = steps.restart({slot: self.paths[self.slots[slot]] for slot in long})
            for slot in long:
                self.lengths[slot] = 1
            self._follow_slots()
        return steps

    def _refill(self, steps: Steps, finished: list[int]) -> Steps:
        """Give slots of finished rows to waiting ones, and draw these rows' first tokens."""
        taken = finished[: len(self.waiting)]
        for slot in taken:
            self.slots[slot], self.lengths[slot] = self.waiting.popleft(), 1
        new = [self.slots[slot] for slot in taken]
        order = None
        if len({self.paths[row] for row in self.slots}) > 1:
            order = sorted(range(len(self.slots)), key=self.slots.__getitem__)
        steps = steps.restart({slot: self.paths[row] for slot, row in zip(taken, new, strict=True)}, order)
        if order is not None:
            self.slots, self.lengths = [self.slots[at] for at in order], [self.lengths[at] for at in order]
        self._follow_slots()
        rows = self._on_device(new)
        self._draw(rows, self.start.logits[rows.to(self.start.logits.device)], [0] * len(new))
        self.report.refilled += len(new)
        return steps

    def _make_room(self, steps: Steps) -> Steps:
        """While memory does not suffice for the next token, let rows that have drawn fewest wait, to begin anew."""
        while len(self.slots) > 1 and not steps.cache.has_room(needed := steps.cache.suffix_length + 1):
            if suffixes_may_grow(steps.cache, needed):
                break
            by_length = sorted(range(len(self.slots)), key=self.lengths.__getitem__, reverse=True)
            stay = set(by_length[: (len(by_length) + 1) // 2])
            gone = [row for slot, row in enumerate(self.slots) if slot not in stay]
            self._begin_anew(gone)
            steps = self._keep(steps, sorted(stay))
        return steps

    def _begin_anew(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        again = index[self.unfinished[index]]
        self.waiting.extendleft(reversed(again.tolist()))
        self.tokens[again, self.width :] = self.pad
        self.drawn[again] = 0
        self.sampler.forget(again)

    def _keep(self, steps: Steps, slots: list[int]) -> Steps:
        steps = steps.select(slots)
        self.slots, self.lengths = [self.slots[at] for at in slots], [self.lengths[at] for at in slots]
        self._follow_slots()
        return steps

    def _follow_slots(self) -> None:
        """Write to the device where each slot's row is: its number, next column and next position."""
        self._rows, lengths = self._on_device([self.slots, self.lengths])
        self._columns = self.width + lengths
        self._positions = self.start.positions[self._rows] + lengths - 1

    def _on_device(self, numbers: list[int] | list[list[int]]) -> Tensor:
        """Numbers in int64, by a copy for which the host does not wait."""
        return torch.tensor(numbers, dtype=torch.long, device="cpu").to(self.device, non_blocking=True)

    def _grow(self, capacity: int) -> None:
        """Let the table hold `capacity` tokens of each row."""
        more = self.pad.expand(len(self.tokens), self.width + capacity + 1 - self.tokens.shape[1])
        self.tokens = torch.cat([self.tokens, more], dim=1)
        if self.gathered is not None:
            self.gathered = torch.cat([self.gathered, self.gathered.new_zeros(more.shape)], dim=1)

    def _draw(self, rows: Tensor, logits: Tensor, lengths: Sequence[int]) -> None:
        """Draw a token for each unfinished one of these rows, whose slots have these `lengths`."""
        self._longest = max(self._longest, *lengths)
        if self.log_probs is not None:
            self.log_probs.before_draw(logits, self._longest)
        width = self.width
        self.stopping.warn(width + self._longest + 1, self.tokens)
        if width + self._longest + 1 == self.tokens.shape[1]:
            self._grow(2 * self._longest)
        before, live = self.drawn[rows], self.unfinished[rows]
        tokens, log_prob = self._sampled(rows, logits, lengths, before)
        column = torch.where(live, before, self.tokens.shape[1] - width - 1)
        self.tokens[rows, width + column] = torch.where(live, tokens, self.pad)
        if self.gathered is not None and log_prob is not None:
            self.gathered[rows, column] = log_prob
        drawn = before + live
        over = drawn >= self.new_tokens
        ended = self.stopping.rows_end(tokens, rows, drawn)
        self.drawn[rows] = drawn
        self.unfinished[rows] = live & ~(over if ended is None else over | ended)

    def _sampled(
        self, rows: Tensor, logits: Tensor, lengths: Sequence[int], before: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[rows]`` for the logits, and their log-probabilities where these are recorded."""
        sampler, recorded = self.sampler, self.gathered is not None
        if not sampler.reads_tokens or len(set(lengths)) == 1:
            ids = self.tokens[rows, : self.width + lengths[0]] if sampler.needs_finished_rows else None
            drawn = sampler.draw(logits, rows, ids, before)
            return drawn.tokens, drawn.token_logprobs if recorded else None
        slots_of = defaultdict[int, list[int]](list)  # processors take rows of one length at a time
        for slot, length in enumerate(lengths):
            slots_of[length].append(slot)
        tokens = torch.empty_like(rows)
        log_probs = torch.zeros(len(rows), device=rows.device) if recorded else None
        for length, slots in slots_of.items():
            at = torch.tensor(slots, device=rows.device)
            ids = self.tokens[rows[at], : self.width + length]
            drawn = sampler.draw(logits[at.to(logits.device)], rows[at], ids, before[at])
            tokens[at] = drawn.tokens
            if log_probs is not None and (found := drawn.token_logprobs) is not None:
                log_probs[at] = found
        return tokens, log_probs

    def _whole(self) -> Wave:
        longest, width = int(self.drawn.max()), self.width
        rows = torch.arange(len(self.prompts), device=self.device)
        tokens = self.tokens[:, : width + longest].contiguous()
        wave = Wave(rows, tokens, torch.zeros_like(self.unfinished), self.drawn, longest)
        if self.gathered is not None:
            wave.logprobs = list(self.gathered[:, :longest].unbind(1))
        return wave
