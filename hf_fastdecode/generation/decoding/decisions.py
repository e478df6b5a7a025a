"""Decisions of a decoding loop, taken alike by all processes of a model, and the memory that they depend on.

Every step of such processes must have the same rows. Rank 0's tokens count, so that each may have another seed, and so
do its time limit and criteria, in loops of transformers' own too. Rows leave the batch, or are split into waves, on
all of them or on none.

A row takes what its layers store of each new token, and some elements per entry of the vocabulary for its logits. Rows
are counted with capacity for as many tokens as they may draw, but no more than `_EXPECTED`: most end before a large
`max_length`. Rows that draw more are counted again whenever suffixes grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from ...cache.shared import SharedContextCache
from ...parallel.agreement import NoRoomError, Ranks
from ..steps.graph_capture import free_memory
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


_EXPECTED = 1024
"""New tokens of a row that its room is counted with, if it may draw more."""

_USED_SHARE = 0.9
"""Share of free memory that rows may take; the rest is for the passes' activations, captures, and small pieces."""

_LOGIT_BYTES = 16
"""Bytes per row and entry of the vocabulary: logits of the prompt and of a step, and processed ones in fp32."""

_UNCOUNTED_SHARE = 64
"""Rows that need less than this fraction of a device's memory are not counted, which would ask the driver."""


class Logits(NamedTuple):
    """Where logits are, and their number per row."""

    device: torch.device
    vocabulary: int


def usable_memory(device: torch.device) -> int | None:
    """Free bytes that rows may take on a device; None where they are not known, as on a CPU."""
    return int(_USED_SHARE * free_memory(device)) if device.type == "cuda" else None


def rows_that_fit(cache: SharedContextCache, rows: int, logits: Logits, new_tokens: int, *, beside: int = 0) -> int:
    """Of so many rows over the nodes of a cache, how many fit in memory at once; at least 1.

    Args:
        new_tokens: Most tokens that a row draws.
        beside: Further bytes on the device of the logits, however many rows decode.
    """
    per_row, held = dict[torch.device, int](), dict[torch.device, int]()
    room = cache.state.division.room(min(new_tokens, _EXPECTED))
    for layer in cache.attention_layers:
        device, storage = layer.device, layer.storage
        per_row[device] = per_row.get(device, 0) + room * storage.suffix_bytes_per_token
        held[device] = held.get(device, 0) + storage.suffix_bytes  # which are given up, should rows not fit
    for states in cache.state_layers:
        per_row[states.device] = per_row.get(states.device, 0) + states.row_bytes
    per_row[logits.device] = per_row.get(logits.device, 0) + _LOGIT_BYTES * logits.vocabulary
    fit = rows
    for device, needed in per_row.items():
        taken = beside if device == logits.device else 0
        usable = usable_memory(device) if _counts(device, rows * needed + taken) else None
        if usable is not None:
            fit = min(fit, max(1, (usable + held.get(device, 0) - taken) // needed))
    return fit


def suffixes_may_grow(cache: SharedContextCache, tokens: int) -> bool:
    """Whether memory suffices to make room for `tokens` tokens in each suffix."""
    more, largest = dict[torch.device, int](), dict[torch.device, int]()
    room = cache.state.division.room(tokens)
    most = None if cache.state.max_suffix is None else cache.state.division.room(cache.state.max_suffix)
    for layer in cache.attention_layers:
        storage, device = layer.storage, layer.device
        per_token = cache.rows * storage.suffix_bytes_per_token
        tokens_more = storage.grown_capacity(room, most) - storage.capacity
        more[device] = more.get(device, 0) + per_token * tokens_more
        largest[device] = max(largest.get(device, 0), per_token * storage.capacity)  # freed once it is copied
    for device, grown in more.items():
        needed = grown + largest[device]
        usable = usable_memory(device) if _counts(device, needed) else None
        if usable is not None and needed > usable:
            return False
    return True


def _counts(device: torch.device, needed: int) -> bool:
    """Whether so many bytes are worth to ask the device for its free memory."""
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return needed * _UNCOUNTED_SHARE >= whole
