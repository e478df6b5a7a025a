"""Exchanges where the processes of a group stand, by a thread in each that writes to the store of the group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Condition, Lock, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING

from ..errors import one_line
from .standing import Standing

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import PrefixStore

IN_CALLS, BETWEEN_CALLS = 0.2, 1.0
"""Seconds between heartbeats."""

_LEAST = 0.02
"""Seconds between two exchanges at least, however short calls are; not where one tells an error."""

LONGEST = 2 * BETWEEN_CALLS
"""Seconds that one interval counts at most, so that a process that was stopped takes no other for silent."""


class Heartbeat:
    """Writes where this process stands, at intervals and when asked to, and reads where its peers do.

    Only its thread uses the store, which waits without end where the process that holds it is stopped.

    Args:
        store: For this object alone.
        rank: This process's.
        size: Number of processes.
        lock: Held by those who read attributes or call methods, but `join`.
        tell: Where this process stands.
        is_over: Whether the heartbeat ends.

    Attributes:
        news: Notified after each exchange.
        peers: Where the others stand, by rank; those that have told it.
        silence: Seconds without a new heartbeat, by rank.
        rounds: Exchanges so far.
        lost: Since when the store is out of reach, and its error; None while it is not.
    """

    def __init__(
        self,
        store: PrefixStore,
        rank: int,
        size: int,
        lock: Lock,
        tell: Callable[[], Standing],
        is_over: Callable[[], bool],
    ):
        self.others = [one for one in range(size) if one != rank]
        self.peers: dict[int, Standing] = {}
        self.silence: dict[int, float] = {}
        self.rounds = 0
        self.lost: tuple[float, str] | None = None
        self._store, self._rank, self._tell, self._is_over = store, rank, tell, is_over
        self.news, self._request = Condition(lock), Condition(lock)
        self._wanted = self._written = 0
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it has run before."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="hf_fastdecode-heartbeat", daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """Write where this process stands now."""
        self._wanted += 1
        self._request.notify()

    def until_written(self, and_then: Callable[[], bool] = lambda: True) -> None:
        """Wait until the others can read what was asked to be written, and for a condition; for a second at most."""
        wanted = self._wanted
        self.news.wait_for(lambda: self.lost is not None or (self._written >= wanted and and_then()), 1.0)

    def join(self) -> None:
        """Wait for the thread to end, for a second at most; without the lock."""
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        last, known = monotonic(), set[int]()
        while True:
            with self.news:
                wanted, mine = self._wanted, replace(self._tell(), beat=self.rounds)
            try:
                found = self._exchange(mine, known)
            except RuntimeError as error:  # of torch.distributed: the process that holds the store may have ended
                with self.news:
                    self.lost = monotonic(), one_line(error, 160)
                    self.news.notify_all()
                return
            with self.news:
                now = monotonic()
                for rank, theirs in found.items():
                    is_new = rank not in self.peers or self.peers[rank].beat != theirs.beat
                    self.silence[rank] = 0.0 if is_new else self.silence[rank] + min(now - last, LONGEST)
                    self.peers[rank] = theirs
                last = now
                self._written = wanted
                self.rounds += 1
                self.news.notify_all()
                if self._is_over():
                    return
                soon = mine.in_call or mine.error_exit is not None or mine.failed is not None
                if self._wanted == wanted:
                    self._request.wait(IN_CALLS if soon else BETWEEN_CALLS)
            if mine.error_exit is None and mine.failed is None:
                sleep(_LEAST)

    def _exchange(self, mine: Standing, known: set[int]) -> dict[int, Standing]:
        """Write this process's standing and read the others'; `known` are those that wrote theirs before."""
        self._store.set(str(self._rank), mine.to_text())
        known.update(rank for rank in self.others if rank not in known and self._store.check([str(rank)]))
        return {rank: Standing.of_text(self._store.get(str(rank))) for rank in known}  # `get` waits for a key
