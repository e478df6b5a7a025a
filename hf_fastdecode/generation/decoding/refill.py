"""Decoding of more rows than decode at once: waiting rows take the places of finished ones.

Each place of the batch holds one row of the call; rows are at steps of their own. A row's tokens do not depend on the
others: it begins after its prompt's nodes with an empty suffix, and its random numbers, if any, come from its number
and its own step. A captured step goes on with other rows, since the tables that it reads have a length per row.

Places are refilled once enough of them hold finished rows, which also saves transfers: the host looks every few steps
only. Rows of one prompt are taken into any place. Where prompts differ, the batch is put in the call's order, for
the rows of a node to be neighbours, by a copy of the suffixes.

`Wave` holds rows that decode together, here or in waves one after another, with their tokens and collected outputs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...cache.shared import SharedContextCache
from ..prompts.start import Start
from ..report import CallReport
from ..steps.modes import Steps, StepsMaker
from .decisions import suffixes_may_grow
from .sampling import Sampler
from .stopping import FinishedRowPoller, Stopping
from .token_log_probs import TokenLogProbs

_WAIT_FOR = 16
"""Places are refilled once one in this many holds a finished row; a refill costs about a step."""


class Refill:
    """The rows of a call, of which a part decodes at once.

    Args:
        prompts: ``[rows, width]`` int64.
        new_tokens: Most tokens that a row draws.
        pad: The token after a row's end, 0-dimensional int64.
        log_probs: Recorder for which log-probabilities are gathered, if any.

    Attributes:
        places: The row of each place of the batch.
        lengths: By place, the tokens drawn since its row began: its suffix has one less. It goes on counting while a
            finished row is in the place.
        waiting: Rows without a place, in order.
        tokens: ``[rows, width + room + 1]``, whose capacity grows; the last column takes what finished rows draw.
        drawn: ``[rows]`` int64: tokens drawn by each row.
    """

    def __init__(
        self,
        prompts: Tensor,
        start: Start,
        sampler: Sampler,
        stopping: Stopping,
        make_steps: StepsMaker,
        report: CallReport,
        new_tokens: int,
        pad: Tensor,
        log_probs: TokenLogProbs | None = None,
    ):
        self.prompts, self.start, self.sampler, self.stopping = prompts, start, sampler, stopping
        self.make_steps, self.report, self.new_tokens, self.pad = make_steps, report, new_tokens, pad
        self.log_probs, self.device, self.width = log_probs, prompts.device, prompts.shape[1]
        self.paths = start.cache.forest.paths
        self.places: list[int] = []
        self.lengths: list[int] = []
        self.waiting = deque(range(len(prompts)))
        self.drawn = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        self.unfinished = torch.ones_like(self.drawn, dtype=torch.bool)
        self.tokens = prompts
        self.gathered = None if log_probs is None else torch.zeros(len(prompts), 0, device=self.device)
        self._grow(min(new_tokens, FIRST_ROOM))
        self._longest = 0  # tokens of any row before a draw, so far
        self._rows = self._columns = self._positions = self.drawn[:0]

    def run(self, cache: SharedContextCache) -> Wave:
        """Decode all rows, the first of which are those of the cache; returns them as one wave."""
        self.places = [self.waiting.popleft() for _ in range(cache.rows)]
        self.lengths = [1] * cache.rows
        self._follow_places()
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
        """Refill, compact, or empty the places of finished rows, if it is time; `mask` says which rows go on."""
        finished = [place for place, row in enumerate(self.places) if not mask[row]]
        at_end = max(self.lengths) >= self.new_tokens
        if self.waiting:
            if finished and (at_end or len(finished) * _WAIT_FOR >= len(self.places)):
                steps = self._refill(steps, finished)
        elif steps.should_compact(len(self.places) - len(finished), self.new_tokens - min(self.lengths)):
            gone = set(finished)
            steps = self._keep(steps, [place for place in range(len(self.places)) if place not in gone])
            self.report.compactions += 1
        if max(self.lengths) >= self.new_tokens:  # finished rows that stay in the batch
            long = [place for place, length in enumerate(self.lengths) if length >= self.new_tokens]
            steps = steps.restart({place: self.paths[self.places[place]] for place in long})
            for place in long:
                self.lengths[place] = 1
            self._follow_places()
        return steps

    def _refill(self, steps: Steps, finished: list[int]) -> Steps:
        """Give places of finished rows to waiting ones, and draw these rows' first tokens."""
        taken = finished[: len(self.waiting)]
        for place in taken:
            self.places[place], self.lengths[place] = self.waiting.popleft(), 1
        new = [self.places[place] for place in taken]
        order = None
        if len({self.paths[row] for row in self.places}) > 1:
            order = sorted(range(len(self.places)), key=self.places.__getitem__)
        steps = steps.restart({place: self.paths[row] for place, row in zip(taken, new, strict=True)}, order)
        if order is not None:
            self.places, self.lengths = [self.places[at] for at in order], [self.lengths[at] for at in order]
        self._follow_places()
        rows = self._on_device(new)
        self._draw(rows, self.start.logits[rows.to(self.start.logits.device)], [0] * len(new))
        self.report.refilled += len(new)
        return steps

    def _make_room(self, steps: Steps) -> Steps:
        """While memory does not suffice for the next token, let rows that have drawn fewest wait, to begin anew."""
        while len(self.places) > 1 and not steps.cache.has_room(needed := steps.cache.suffix_length + 1):
            if suffixes_may_grow(steps.cache, needed):
                break
            by_length = sorted(range(len(self.places)), key=self.lengths.__getitem__, reverse=True)
            stay = set(by_length[: (len(by_length) + 1) // 2])
            gone = [row for place, row in enumerate(self.places) if place not in stay]
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

    def _keep(self, steps: Steps, places: list[int]) -> Steps:
        steps = steps.select(places)
        self.places, self.lengths = [self.places[at] for at in places], [self.lengths[at] for at in places]
        self._follow_places()
        return steps

    def _follow_places(self) -> None:
        """Write to the device where each place's row is: its number, next column and next position."""
        self._rows, lengths = self._on_device([self.places, self.lengths])
        self._columns = self.width + lengths
        self._positions = self.start.positions[self._rows] + lengths - 1

    def _on_device(self, numbers: list[int] | list[list[int]]) -> Tensor:
        """Numbers in int64, by a copy for which the host does not wait."""
        return torch.tensor(numbers, dtype=torch.long, device="cpu").to(self.device, non_blocking=True)

    def _grow(self, room: int) -> None:
        """Make room for `room` tokens of each row."""
        more = self.pad.expand(len(self.tokens), self.width + room + 1 - self.tokens.shape[1])
        self.tokens = torch.cat([self.tokens, more], dim=1)
        if self.gathered is not None:
            self.gathered = torch.cat([self.gathered, self.gathered.new_zeros(more.shape)], dim=1)

    def _draw(self, rows: Tensor, logits: Tensor, lengths: Sequence[int]) -> None:
        """Draw a token for each unfinished one of these rows, whose places have these `lengths`."""
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
        places_of = defaultdict[int, list[int]](list)  # processors take rows of one length at a time
        for place, length in enumerate(lengths):
            places_of[length].append(place)
        tokens = torch.empty_like(rows)
        log_probs = torch.zeros(len(rows), device=rows.device) if recorded else None
        for length, places in places_of.items():
            at = torch.tensor(places, device=rows.device)
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
