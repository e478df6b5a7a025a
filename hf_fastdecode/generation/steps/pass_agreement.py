"""Which captured passes of another decoding loop the processes of a model replay, and which passes they run eagerly.

No rank may replay a pass that another runs eagerly, and all capture in one order. What follows from a pass's arguments
and the batch alone is the same on every rank, and so are growing suffixes and what a loop of transformers' own does:
nobody is asked. What one rank may know otherwise is agreed on by one collective: failures of earlier captures, memory,
and whether its captured pass fits the batch. That holds for the passes that follow, as long as the nodes are the same
and rows are no longer than what the captures of all ranks serve. Code of the user's may do something else on each
rank, so that its loops ask before each pass.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import NamedTuple

from ...attention.forest import Forest
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ...parallel.agreement import NoRoomError, Ranks
from .captured_pass import CapturedPass
from .cuda_graph import CaptureOptions


class Way(IntEnum):
    """How a rank would run a pass; all take the least of what any of them would."""

    NOT_AT_ALL = 0  # memory for its tokens is short
    EAGERLY = 1
    CAPTURING = 2
    REPLAYING = 3


class Bounds(NamedTuple):
    """What a captured pass serves, for the nodes that its tables fit.

    Attributes:
        row: Most tokens of a row by the end of the call, see `SharedContextCache.longest_row`.
        suffix: Most tokens of a suffix before the pass.
    """

    row: int = sys.maxsize
    suffix: int = sys.maxsize

    @classmethod
    def of(cls, step: CapturedPass) -> Bounds:
        return cls(step.longest_row or sys.maxsize, step.longest_suffix or sys.maxsize)


_ANY = Bounds()


class _Known(NamedTuple):
    """A captured pass, and for which nodes all ranks are known to replay theirs: None before they agreed."""

    step: CapturedPass
    forest: Forest | None = None
    limits: Bounds = _ANY


class PassAgreement:
    """What ranks have agreed on in one call.

    Args:
        asks_always: Whether the loop is the user's.
    """

    def __init__(self, ranks: Ranks, *, asks_always: bool):
        self._ranks = ranks
        self.asks_always = asks_always and ranks.count > 1
        self._known: dict[CaptureOptions, _Known] = {}

    def keep(self, options: CaptureOptions, step: CapturedPass) -> None:
        """Keep a pass that all ranks have captured or found."""
        self._known[options] = _Known(step)

    def forget(self) -> None:
        """Let go of all captured passes."""
        self._known = {}

    def replayed(self, cache: SharedContextCache, options: CaptureOptions) -> CapturedPass | None:
        """The captured pass that all ranks replay, where that is known without asking them."""
        known = self._known.get(options)
        if known is None or self.asks_always or known.forest is not cache.forest:
            return None
        row, suffix = known.limits
        serves = cache.longest_row(options.queries) <= row and cache.suffix_length <= suffix
        return known.step if serves and known.step.reads(cache) else None

    def refuse(self, reason: str) -> str:
        """Run a pass eagerly, for a reason that other ranks need not have in a loop of the user's."""
        if self.asks_always:
            self._ask(Way.EAGERLY, reason)
        return reason

    def ask(
        self, cache: SharedContextCache, options: CaptureOptions, reason: str | None, *, has_room: bool
    ) -> tuple[CapturedPass | None, str | None]:
        """The captured pass that all ranks replay, or why all run it eagerly; neither where all are to capture it.

        Args:
            reason: Why this rank does not capture such passes.
            has_room: Whether this rank's suffixes have room for the pass.

        Raises:
            NoRoomError: On all ranks, as memory of one is short.
        """
        known = self._known.get(options)
        fits = known is not None and known.step.fits(cache)
        way = Way.EAGERLY if reason is not None else Way.REPLAYING if fits else Way.CAPTURING
        limits = Bounds.of(known.step) if known is not None and fits else _ANY
        agreed, reason, limits = self._ask(way if has_room else Way.NOT_AT_ALL, reason, limits)
        if known is None or agreed != Way.REPLAYING:
            return None, reason
        self._known[options] = _Known(known.step, cache.forest, limits)
        return known.step, None

    def _ask(self, way: Way, reason: str | None, limits: Bounds = _ANY) -> tuple[Way, str | None, Bounds]:
        """The way of all ranks, why it is eager, and what the captures of all serve; one collective."""
        ranks = self._ranks
        least, most, *smallest = ranks.smallest(way, -way, *limits)
        if least == Way.NOT_AT_ALL:
            raise NoRoomError("the memory of a process of the model does not suffice for the tokens of a pass")
        if least == Way.EAGERLY and -most != Way.EAGERLY:
            try:
                with ranks.together():
                    if reason is not None:
                        raise Unsupported(reason)
            except Unsupported as error:
                reason = error.what
        return Way(least), reason, Bounds(*smallest)
