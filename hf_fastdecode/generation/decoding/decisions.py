"""Decisions of a decoding loop, taken alike by all processes that compute the model together.

Every step of such processes must have the same rows. Rank 0's tokens count, so that each may have another seed, and so
do its time limit and criteria, in loops of transformers' own too. Rows leave the batch, or are split into waves, on
all of them or on none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from ...cache.shared import SharedContextCache
from ...parallel.agreement import NoRoomError, Ranks
from .room import suffixes_may_grow
from .sampling import Drawn, Sampler
from .stopping import Stopping


@dataclass(frozen=True)
class Decisions:
    """How a loop runs, and what it decides at each step.

    Attributes:
        ranks: The processes of the model.
        can_compact: Whether finished rows can be compacted: needs a pad token, no returned cache, and no custom
            processors.
        needs_all_rows: Whether a streamer, or custom processors or criteria, see all rows at every step.
        polls_synchronously: Whether to poll at every step: custom code must not see undone steps, and time limits
            count device time.
        by_rank_0: Whether rank 0 decides which rows end, because others could see it differently.
        keeps_logprobs: Whether log-probabilities are returned anywhere.
    """

    ranks: Ranks
    can_compact: bool
    needs_all_rows: bool
    polls_synchronously: bool
    by_rank_0: bool
    keeps_logprobs: bool

    @classmethod
    def agreed(
        cls,
        ranks: Ranks,
        stopping: Stopping,
        sampler: Sampler,
        *,
        streams: bool,
        returns_cache: bool,
        keeps_logprobs: bool,
    ) -> Decisions:
        """Agree on how a loop with these parts runs, of which each process may have its own."""
        watched = streams or stopping.custom or sampler.custom
        can_compact, divisible, polls_late, alike, unread = ranks.all(
            stopping.pads and not returns_cache and not sampler.custom,
            not (streams or stopping.needs_all_rows or sampler.needs_all_rows),
            not (watched or stopping.timed),
            ranks.count == 1 or not stopping.differs_by_process,
            not keeps_logprobs,
        )
        return cls(ranks, can_compact, not divisible, not polls_late, not alike, not unread)

    def drawn(self, drawn: Drawn) -> Drawn:
        """What rank 0 has drawn; scores and logits stay this process's, which are the same."""
        logprobs = drawn.logprobs
        if logprobs is not None and self.keeps_logprobs:
            logprobs = self.ranks.first(logprobs)
        return drawn._replace(tokens=self.ranks.first(drawn.tokens), logprobs=logprobs)

    def ended(self, ended: Tensor | None, unfinished: Tensor) -> Tensor | None:
        """Rows that end now, bool ``[rows]``; None without criteria."""
        if not self.by_rank_0:
            return ended
        own = torch.zeros_like(unfinished) if ended is None else ended.clone()  # which may be a criterion's tensor
        return self.ranks.first(own)

    def over(self, over: bool) -> bool:
        """Whether all rows end now."""
        return bool(self.ranks.first(torch.tensor([over], device="cpu"))) if self.by_rank_0 else over

    def compacts(self, pays: bool) -> bool:
        """Whether finished rows leave the batch now, which must pay on all processes."""
        return self.ranks.all(pays) == [True]

    def reserve(self, cache: SharedContextCache, *, counted: bool) -> None:
        """Make sure of the next token's memory on every process, or raise `NoRoomError` on every one.

        Several processes also allocate it: later, in a pass, one could not tell the others that its memory is short.

        Args:
            counted: Whether free memory decides, before an allocation fails.
        """
        needed = cache.suffix_length + 1
        if cache.has_room(needed):
            return
        fits = not counted or suffixes_may_grow(cache, needed)
        if self.ranks.count > 1 and fits:
            try:
                cache.reserve(needed)
            except torch.OutOfMemoryError:
                fits = False
        if self.ranks.all(fits) == [False]:
            whose = "" if self.ranks.count == 1 else " of a process of the model"
            raise NoRoomError(f"the memory{whose} does not suffice for the next tokens")


class CriteriaOfRank0(StoppingCriteriaList):
    """Stopping criteria of a loop of transformers' own, all of which end as rank 0's do; a collective each time."""

    def __init__(self, criteria: StoppingCriteriaList, ranks: Ranks):
        super().__init__(criteria)
        self._ranks = ranks

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self._ranks.first(super().__call__(input_ids, scores, **kwargs))


def agreed_criteria(ranks: Ranks, criteria: StoppingCriteriaList, device: torch.device) -> StoppingCriteriaList:
    """Criteria that end a loop of transformers' own alike on all processes, where they could end it otherwise."""
    if ranks.count == 1 or ranks.all(not Stopping(criteria, device).differs_by_process) == [True]:
        return criteria
    return CriteriaOfRank0(criteria, ranks)
