"""Earlier context of a prefill pass, gathered by all ranks alike, whatever each of them reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from ..attention.forest import Span
from ..attention.kv import Segment


class GatheredContexts:
    """Gathers spans in one order on all ranks, of which each reads those that its own tokens see.

    A rank that left out what it does not read would receive what others gather later.

    Args:
        spans: All that the pass reads, in the order in which they are gathered.
        read_here: Those that this rank reads.
        gather: Gathers keys and values of a span, with all ranks.
    """

    def __init__(self, spans: Sequence[Span], read_here: Collection[Span], gather: Callable[[Span], Segment]):
        self._left, self._read_here, self._gather = deque(spans), read_here, gather
        self._gathered: dict[Span, Segment] = {}
        self._last: Span | None = None

    def __call__(self, span: Span) -> Segment:
        """Keys and values of a span, which may be asked for again until the next one is."""
        if self._last not in (None, span):
            del self._gathered[self._last]
        self._last = span
        while span not in self._gathered:
            one = self._left.popleft()
            found = self._gather(one)
            if one in self._read_here:
                self._gathered[one] = found
        return self._gathered[span]

    def finish(self) -> None:
        """Gather what this rank has not read."""
        while self._left:
            self._gather(self._left.popleft())
