"""The ends of rows: criteria, split into host-side counts, device-side end tokens and user code, and who decides."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ...cache.shared import SharedContextCache
from ...parallel.ranks import NoRoomError, Ranks
from .sampling import Drawn
from .waves import suffixes_may_grow


class HostStoppingCriteria(StoppingCriteria):
    """Base class of criteria that end a whole call and read no tokens, so that steps need not wait for the device."""

    @abstractmethod
    def is_over(self, length: int) -> bool:
        """Whether every row ends now, at so many tokens per row, prompt included; asked once per step."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Bool ``[rows]`` for ids ``[rows, length]``, as transformers' loop asks for it."""
        over = self.is_over(input_ids.shape[1])
        return torch.full((len(input_ids),), over, dtype=torch.bool, device=input_ids.device)


class RowLengthCriteria(StoppingCriteria):
    """Ends each row after a number of drawn tokens of its own; reads no tokens, so that rows may wait for each other.

    It calls itself an end-of-sequence criterion: finished rows are padded, and may be compacted away.

    Args:
        prompt_length: Tokens of each row before the first one drawn, padding included.
        lengths: ``[rows]`` int64.
    """

    def __init__(self, prompt_length: int, lengths: Tensor):
        self.prompt_length, self.lengths = prompt_length, lengths
        self.eos_token_id = torch.tensor([-1], device=lengths.device)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Bool ``[rows]`` for ids ``[rows, length]``, as transformers' loop asks for it."""
        return input_ids.shape[1] - self.prompt_length >= self.lengths.to(input_ids.device)


class Stopping:
    """Stopping criteria of one call.

    Attributes:
        max_length: Length in tokens, prompt included, at which every row ends; None without such a criterion.
        pads: Whether finished rows continue with the pad token, so that they can be compacted away.
        timed: Whether there is a time limit.
        custom: Whether there are criteria that read tokens, other than transformers' end-token ones.
        counts_steps: Whether all rows end at one step: by time, or by `HostStoppingCriteria`.
        differs_by_process: Whether processes that decode the same tokens may not all end at once: by time, or by other
            code.
        draws_on: Whether finished rows go on drawing tokens until the call's last row ends, at a step that tokens
            decide.
        needs_all_rows: Whether `custom` criteria may look at more than a row's own tokens.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device):
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        lengths = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        self.max_length = min((int(criterion.max_length) for criterion in lengths), default=None)
        self._warnings = [criterion for criterion in lengths if criterion.max_position_embeddings]
        self._deadlines = [
            criterion.initial_timestamp + criterion.max_time
            for criterion in criteria
            if type(criterion) is MaxTimeCriteria
        ]
        ends = [criterion.eos_token_id for criterion in criteria if type(criterion) is EosTokenCriteria]
        self.eos = torch.cat([ids.reshape(-1).to(device) for ids in ends]) if ends else None
        self._on_host = [criterion for criterion in criteria if isinstance(criterion, HostStoppingCriteria)]
        self._row_lengths = [one.lengths.to(device) for one in criteria if type(one) is RowLengthCriteria]
        known = (MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria, RowLengthCriteria)
        self._others = [one for one in criteria if type(one) not in known and one not in self._on_host]
        self.timed, self.custom = bool(self._deadlines), bool(self._others)
        self.counts_steps = bool(self._deadlines or self._on_host)
        self.differs_by_process = self.counts_steps or self.custom
        self.draws_on = self.custom and not (self.pads or self.counts_steps)
        self.needs_all_rows = any(type(criterion) is not StopStringCriteria for criterion in self._others)

    def all_end(self, length: int, view: Tensor) -> bool:
        """Whether every row ends now, by length, time or `HostStoppingCriteria`; needs no token from the device.

        The `view` of ids ``[rows, length]`` is for transformers' warning about the model's maximum length.
        """
        self.warn(length, view)
        late = any(time.time() > deadline for deadline in self._deadlines)
        over = [criterion.is_over(length) for criterion in self._on_host]
        return late or any(over) or (self.max_length is not None and length >= self.max_length)

    def warn(self, length: int, view: Tensor) -> None:
        """Let transformers warn of ids `view`, of up to `length` tokens, that are more than the model is made for."""
        for criterion in self._warnings:
            if length >= criterion.max_position_embeddings:
                criterion(view[:, :length], None)

    def rows_end(
        self,
        tokens: Tensor,
        rows: Tensor,
        drawn: int | Tensor,
        input_ids: Tensor | None = None,
        scores: tuple[Tensor, ...] | None = None,
    ) -> Tensor | None:
        """Rows that end with the sampled tokens, as bool ``[rows]``; None without such criteria.

        Args:
            tokens: ``[rows]`` int64, just sampled.
            rows: ``[rows]`` int64: the row numbers in the call.
            drawn: Tokens sampled with them, of every row or of each: ``[rows]`` int64.
            input_ids: ``[rows, length]`` including them, for `custom` criteria, which may modify it in place.
            scores: Collected scores, if requested.
        """
        ended = torch.isin(tokens, self.eos) if self.eos is not None else None
        for lengths in self._row_lengths:
            over = lengths[rows] <= drawn
            ended = over if ended is None else ended | over
        for criterion in self._others:
            more = torch.as_tensor(criterion(input_ids, scores), device=tokens.device).bool()
            more = more.expand(len(tokens)) if more.dim() == 0 else more
            ended = more if ended is None else ended | more
        return ended


class CriteriaOfRank0(StoppingCriteriaList):
    """Stopping criteria of a loop of transformers' own, all of which end as rank 0's do; a collective each time."""

    def __init__(self, criteria: StoppingCriteriaList, ranks: Ranks):
        super().__init__(criteria)
        self._ranks = ranks

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self._ranks.first(super().__call__(input_ids, scores, **kwargs))[0]


class CountedCriteria(StoppingCriteriaList):
    """Stopping criteria of a loop of transformers' own, which count tokens until each row ends.

    Args:
        prompts: ``[rows, width]``.

    Attributes:
        drawn: ``[rows]`` int64: tokens of each row up to its end.
    """

    def __init__(self, criteria: StoppingCriteriaList, prompts: Tensor):
        super().__init__(criteria)
        self._criteria, self._width = criteria, prompts.shape[1]
        self.drawn = torch.zeros(len(prompts), dtype=torch.long, device=prompts.device)
        self._unfinished = torch.ones_like(self.drawn, dtype=torch.bool)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        ended = self._criteria(input_ids, scores, **kwargs)
        self.drawn = self.drawn.masked_fill(self._unfinished, input_ids.shape[1] - self._width)
        self._unfinished = self._unfinished & ~ended
        return ended


def agreed_criteria(
    ranks: Ranks, criteria: StoppingCriteriaList, config: GenerationConfig, device: torch.device
) -> StoppingCriteriaList:
    """Criteria that end a loop of transformers' own alike on all processes, where they could end it otherwise."""
    if ranks.alone:
        return criteria
    config.max_time = None  # the criteria have it; a draft that ended by it would be shorter on one of them
    alike = ranks.all(not Stopping(criteria, device).differs_by_process) == [True]
    return criteria if alike else CriteriaOfRank0(criteria, ranks)


_STEPS_BETWEEN_POLLS = 8
"""Steps between polls on a GPU; a result is up to twice as many steps old."""


class FinishedRowPoller:
    """Copies the mask of unfinished rows to the host asynchronously, and keeps generator states to restore.

    `synchronous` polls at every step and waits; `draws` says whether steps advance torch's generator of the device.
    """

    def __init__(self, device: torch.device, *, synchronous: bool, draws: bool):
        self.device = device
        self.is_async = device.type == "cuda" and not synchronous
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None
        self._generators: deque[tuple[int, Tensor]] | None = None
        if self.is_async and draws:
            self._generators = deque(maxlen=2 * _STEPS_BETWEEN_POLLS + 2)

    def poll(self, mask: Tensor, step: int) -> Tensor | None:
        """Return the mask of unfinished rows on the host, possibly some steps old; None between polls."""
        if not self.is_async:
            return mask.cpu()
        if self._generators is not None:
            self._generators.append((step, torch.cuda.get_rng_state(self.device)))
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
        for known, state in self._generators or ():
            if known == step:
                torch.cuda.set_rng_state(state, self.device)


class Ends(NamedTuple):
    """The end of a step."""

    tokens: Tensor  # [rows] int64: the step's, with the pad token in finished rows
    rows: Tensor | None  # bool [rows]: rows that end; None without such criteria
    all: bool


@dataclass(frozen=True)
class Decisions:
    """How a loop runs, as the processes of the model have agreed."""

    ranks: Ranks
    fit: int  # rows that fit in memory at once
    can_compact: bool  # finished rows leave: there is a pad token, no returned cache, and no custom processor
    splits: bool  # rows may decode apart: no streamer, custom processor or criterion sees all of them at every step
    polls_late: bool  # not at every step: no custom code sees undone steps, and no time limit counts device time
    ends_alike: bool  # all processes see rows end alike; else rank 0 decides
    drops_logprobs: bool  # log-probabilities are returned nowhere

    def step(self, drawn: Drawn, unfinished: Tensor, end: Callable[[Drawn], Ends]) -> Ends:
        """A step of rank 0's tokens, and its ends where others could see them differently; one collective.

        `end` writes the tokens and asks criteria, on all processes: code of the user's counts calls.
        """
        leads = not self.ends_alike and self.ranks.rank == 0
        ends = end(drawn) if leads else None
        sent = {"tokens": drawn.tokens}
        if drawn.logprobs is not None and not self.drops_logprobs:
            sent["logprobs"] = drawn.logprobs
        if not self.ends_alike:
            rows = None if ends is None else ends.rows
            sent["rows"] = torch.zeros_like(unfinished) if rows is None else rows
            sent["all"] = torch.tensor([ends is not None and ends.all], device="cpu")
        found = dict(zip(sent, self.ranks.first(*sent.values()), strict=True))
        if ends is None:
            ends = end(drawn._replace(tokens=found["tokens"], logprobs=found.get("logprobs", drawn.logprobs)))
            if not self.ends_alike:
                ends = ends._replace(rows=found["rows"], all=bool(found["all"]))
        return ends

    def reserve(self, cache: SharedContextCache, *, counted: bool) -> None:
        """Allocate the next token's memory, before a pass in which one process could not tell others that it is short;
        if `counted`, free memory decides before an allocation fails."""
        needed = cache.suffix_length + 1
        if cache.has_room(needed):
            return
        with self.ranks.together():
            if counted and not suffixes_may_grow(cache, needed):
                raise NoRoomError("the memory does not suffice for the next tokens")
            cache.reserve(needed)
