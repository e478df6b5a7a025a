"""Judges from what the other processes of a group tell whether one of them has failed, and gives up the group then.

A thread looks at them while this process is in a call. When one failed, it closes the group's communication, so that
the thread that waits in it gets an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING
from weakref import WeakSet, ref

from torch import distributed

from ..log import logger
from .abort import abort
from .heartbeat import IN_CALLS, LONGEST, Heartbeat
from .standing import Exit, Standing, parted, settled, waits_in_vain
from .unwatched import Clearable, Unwatched

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import PrefixStore


_GRACE = 1.0
"""Seconds for a peer's error to be raised here too, and for a call to end whose store's process has ended."""

_SILENT = 2.0
"""Seconds of silence that tell which peer closed a connection."""

_STORE = "the store of the process group, which this rank or torchrun holds,"


class PeerJudge(Unwatched, ABC):
    """Base of `PeerWatch` that judges its peers, in calls of which the watch keeps account.

    Args:
        groups: Groups that the model communicates over. The first has all its processes.
        store: The first one's, for this object alone.

    Attributes:
        failed: The rank that failed, and its cause, once the groups are given up.
    """

    def __init__(self, groups: Sequence[ProcessGroup], store: PrefixStore):
        self._groups = [ref(group) for group in groups]
        self._rank = groups[0].rank()
        self.failed: tuple[int, str] | None = None
        self._in_call = False
        self._exits: tuple[Exit, ...] = ()
        self._timeout = self._entered = float("inf")
        self._vain: dict[int, float] = {}  # for how long a peer that left has been waited for, by rank
        self._looked = monotonic()  # when peers were last looked at
        self._is_ending = False
        self._freeing = Lock()
        self._holders: WeakSet[Clearable] = WeakSet()
        size = groups[0].size()
        self._heartbeat = Heartbeat(store, self._rank, size, Lock(), self._standing, self._has_told_enough)
        self._news = self._heartbeat.news
        self._judge: Thread | None = None

    @abstractmethod
    def _standing(self) -> Standing:
        """Where this process stands."""

    def _start(self) -> None:
        """Start the threads, unless they run."""
        if self._judge is None:
            self._heartbeat.start()
            self._judge = Thread(target=self._run, name="hf_fastdecode-peers", daemon=True)
            self._judge.start()

    def also(self, groups: Sequence[ProcessGroup]) -> None:
        """Give up these groups too, which another model communicates over."""
        known = {id(group()) for group in self._groups}
        if any(id(group) not in known for group in groups):
            with self._news:
                self._groups += [ref(group) for group in groups if id(group) not in known]

    def frees(self, one: Clearable) -> None:
        """Clear this when the groups are given up."""
        with self._freeing:  # which goes through them in another thread
            self._holders.add(one)

    def end(self) -> None:
        """End the threads, at the end of the process; wait for seconds at most."""
        with self._news:
            self._is_ending = True
            self._news.notify_all()
            self._heartbeat.ask()
        self._heartbeat.join()
        if self._judge is not None:
            self._judge.join(_SILENT)

    def _has_told_enough(self) -> bool:
        group = self._groups[0]()
        if group is None or group not in distributed.distributed_c10d._world.pg_map:  # destroyed
            self._is_ending = True
            self._news.notify_all()
        return self._is_ending

    def _last_seen(self, rank: int) -> str:
        peer = self._heartbeat.peers.get(rank, Standing())
        return f"last seen in {peer.place}" if peer.in_call else "last seen outside of a call"

    def _free(self) -> None:
        with self._freeing:
            for one in list(self._holders):
                try:
                    one.clear()
                except RuntimeError:  # of a device whose last kernel failed
                    logger.warning("captured steps cannot be freed", exc_info=True)

    def _free_soon(self) -> None:
        """Free what is held, once no call uses it, or if the call waits: NCCL's lock is held until all is free."""
        with self._news:
            self._news.wait_for(lambda: not self._in_call, _GRACE)
        self._free()

    def _left_alike(self) -> bool | None:
        """Whether all processes left the last call like this one; None if that is not known yet."""
        peers = self._heartbeat.peers
        alike = [settled(self._standing(), peers.get(rank, Standing())) for rank in self._heartbeat.others]
        return False if False in alike else None if None in alike else True

    def _settle(self) -> None:
        """After an error, wait until all processes have left that call, and give up the group if not all did alike."""
        while self.failed is None and not (alike := self._left_alike()):
            if alike is False or self._heartbeat.lost is not None:
                self._fail(self._rank, str(self._exits[-1].error))
            self._look_at_peers()
            self._tell_who_is_away()
            if self.failed is None:
                self._news.wait(IN_CALLS)

    def _find_who_closed(self) -> None:
        """Find the peer because of which communication failed: it says so, or falls silent."""
        end, heartbeat = monotonic() + 1.5 * _SILENT, self._heartbeat
        while self.failed is None and monotonic() < end:
            self._look_at_peers()
            silent = max(heartbeat.others, key=lambda rank: heartbeat.silence.get(rank, 0.0))
            if heartbeat.silence.get(silent, 0.0) > _SILENT:
                self._fail(silent, f"its connections were closed, and it is silent ({self._last_seen(silent)})")
            elif heartbeat.lost is not None and self._rank != 0:
                self._fail(0, "its connections were closed, and the store of the process group with them")
            if self.failed is None:
                self._news.wait(IN_CALLS)

    def _fail(self, rank: int, cause: str) -> None:
        """Give up the groups, for the first cause that is given."""
        if self.failed is None:
            self.failed = rank, cause
            self._heartbeat.ask()
            self._news.notify_all()

    def _is_known(self) -> bool:
        """Whether all peers that live have given up the groups."""
        peers, silence = self._heartbeat.peers, self._heartbeat.silence
        return all(peer.failed is not None or silence[rank] > _SILENT for rank, peer in peers.items())

    def _adopt(self) -> None:
        """Give up the groups if a peer did."""
        for peer in self._heartbeat.peers.values():
            if peer.failed is not None:
                self._fail(*peer.failed)

    def _look_at_peers(self) -> None:
        """Give up the groups if a peer did, or cannot take part in this call any more."""
        self._adopt()
        mine, now, heartbeat = self._standing(), monotonic(), self._heartbeat
        # At most so much, so that where this process was stopped, its call gets time to leave, as the peer did.
        since, self._looked = min(now - self._looked, 2 * IN_CALLS), now
        for rank, theirs in heartbeat.peers.items():
            if (cause := parted(mine, theirs)) is not None:
                self._fail(rank, cause)
            elif (cause := waits_in_vain(mine, theirs)) is not None:
                self._vain[rank] = self._vain.get(rank, -since) + since
                # Between collectives it computes something else, after which it raises the error too, or goes on.
                if self._vain[rank] > (_GRACE if mine.count % 2 else self._timeout):
                    self._fail(rank, cause)
            else:
                self._vain.pop(rank, None)
                if heartbeat.silence[rank] > self._timeout:
                    self._fail(rank, f"it is silent for more than {self._timeout:g} s ({self._last_seen(rank)})")

    def _run(self) -> None:
        """Body of the thread that looks at the peers in calls, and closes the groups when one failed."""
        rounds, unanswered, last, heartbeat = 0, 0.0, monotonic(), self._heartbeat
        with self._news:
            while self.failed is None:
                if self._is_ending:
                    return
                self._adopt()
                if not self._in_call:
                    self._news.wait()
                    unanswered, last = 0.0, monotonic()
                    continue
                self._look_at_peers()
                now = monotonic()
                unanswered = 0.0 if heartbeat.rounds != rounds else unanswered + min(now - last, LONGEST)
                rounds, last = heartbeat.rounds, now
                if unanswered > self._timeout:
                    self._fail(0, f"{_STORE} has not answered for {unanswered:.0f} s")
                elif heartbeat.lost is not None and now - heartbeat.lost[0] > _GRACE:
                    self._fail(0, f"{_STORE} is gone ({heartbeat.lost[1]})")
                self._tell_who_is_away()
                if self.failed is None:
                    self._news.wait(IN_CALLS)
            # Before connections close, which others notice at once, and before this process ends with the store in it.
            heartbeat.until_written(lambda: self._rank != 0 or self._is_known())
            self._is_ending = True
        Thread(target=self._free_soon, name="hf_fastdecode-free", daemon=True).start()
        for group in self._groups:
            if (one := group()) is not None:
                try:
                    abort(one)
                except Exception:
                    logger.warning("the communication of a process group cannot be closed", exc_info=True)

    def _tell_who_is_away(self) -> None:
        """Log, once a call, which processes live but take no part in it."""
        if monotonic() - self._entered <= self._timeout:
            return
        self._entered = float("inf")
        for rank in self._heartbeat.others:
            if not self._heartbeat.peers.get(rank, Standing()).in_call:
                logger.warning(
                    "a call of a model has waited %.0f s for rank %d, which does not take part in it: every process "
                    "of the model must make the same calls",
                    self._timeout,
                    rank,
                )
