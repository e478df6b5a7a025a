"""Watchdog over the processes of a model: when one of them fails, the calls of all end with a `PeerFailedError`.

Each process logs its events: the calls, passes and collectives that it begins, and how it leaves calls. All processes
of a group must have the same ones. A heartbeat thread exchanges the latest events through the store of the group; it
never takes part in collectives. A second thread gives up the group when a peer's events differ from this process's or
its heartbeat stops: the group is aborted, so that a thread that waits in a collective gets an error, and refused from
then on. A slow peer has not failed: its heartbeat goes on. An error that all processes raise at the same event leaves
the group as it is. Threads start with the first call; between calls, heartbeats are sent once a second.
"""

from __future__ import annotations

import atexit
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import product
from threading import Condition, Lock, RLock, Thread
from time import monotonic, sleep
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import distributed

from ..errors import PeerFailedError, one_line
from ..log import logger
from .ranks import Clearable, NoWatchdog

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import PrefixStore

_IN_CALLS, _BETWEEN_CALLS = 0.2, 1.0
"""Seconds between heartbeats."""

_LEAST = 0.02
"""Seconds between heartbeats at least, however short calls are."""

_GRACE = 1.0
"""Seconds for a peer's error to be raised here too, and for a call to end whose store's process has ended."""

_SILENT = 2.0
"""Seconds without a heartbeat after which a peer counts as the one that closed a connection."""

_LOGGED = 64
"""Latest events that a heartbeat has: a host may run ahead of another one, whose device still computes."""

_END = "the end of the call"
_STORE = "the store of the process group, which this rank or torchrun holds,"
_START_AGAIN = "; these processes cannot compute the model together any more: end them and start them again"


class Event(NamedTuple):
    """A call, pass or collective that a process began, or the end of a call."""

    doing: str
    communicates: bool = False  # collectives that are not logged follow, as within a pass
    error: str | None = None  # by which a call ended


class Heartbeat(NamedTuple):
    """A message to peers: `total` events so far, the latest `events`, and `failed` as of `Watchdog`."""

    beat: int
    in_call: bool
    total: int
    events: tuple[Event, ...]
    failed: tuple[int, str] | None = None

    @classmethod
    def of_text(cls, text: bytes | str) -> Heartbeat:
        beat, in_call, total, events, failed = json.loads(text)
        return cls(beat, in_call, total, tuple(Event(*one) for one in events), failed and (failed[0], failed[1]))


def difference(rank: int, mine: Heartbeat, peer: int, theirs: Heartbeat) -> tuple[int, str] | None:
    """The rank that failed and the cause, if events of two processes differ; None if those that both have do not.

    Errors between collectives need not be the same: no process waits for another one there.
    """
    first, theirs_first = mine.total - len(mine.events), theirs.total - len(theirs.events)
    for number in range(max(first, theirs_first), min(mine.total, theirs.total)):
        here, there = mine.events[number - first], theirs.events[number - theirs_first]
        if here.doing != there.doing or (here.communicates and here.error != there.error):
            if there.error is not None:
                return peer, there.error
            if here.error is not None:
                return rank, here.error
            return peer, f"it reached {there.doing} where another process reached {here.doing}"
    return None


class Watchdog(NoWatchdog):
    """Watches the other processes of a group while this one is in a call; see `watchdog_of`.

    Args:
        groups: Groups that the model communicates over. The first has all its processes.
        store: The first one's, for this object alone. Only the heartbeat thread uses it: it waits without end where
            the process that holds it is stopped.

    Attributes:
        failed: The rank that failed, and its cause, once the groups are given up.
    """

    def __init__(self, groups: Sequence[ProcessGroup], store: PrefixStore):
        self._groups, self._store, self._pid = [ref(group) for group in groups], store, os.getpid()
        self._rank = groups[0].rank()
        self._others = [rank for rank in range(groups[0].size()) if rank != self._rank]
        self.failed: tuple[int, str] | None = None
        self._turn = RLock()  # of the thread whose call it is
        self._news = Condition(Lock())  # notified of events, heartbeats, and what follows from them
        # The log is replaced as a whole: the heartbeat reads it while a call goes on.
        self._log: tuple[int, tuple[Event, ...]] = (1, (Event("no call"),))
        self._in_call = self._in_foreign_loop = self._connection_broke = self._is_ending = False
        self._timeout = self._entered = float("inf")
        # In seconds of `_now`.
        self._peers: dict[int, Heartbeat] = {}
        self._heard: dict[int, float] = {}  # when a peer's last new heartbeat was read
        self._behind: dict[int, float] = {}  # for how long a peer's error has not been raised here
        self._time = self._answered = self._looked = 0.0
        self._read = monotonic()
        self._lost: tuple[float, str] | None = None  # since when the store is out of reach, and its error
        self._beats = self._wanted = self._written = 0
        self._threads: list[Thread] = []
        self._holders: WeakSet[Clearable] = WeakSet()

    @contextmanager
    def call(self, name: str, timeout: float) -> Iterator[None]:
        """Context of a call that all processes of the group make, by one name; those of other threads wait for it.

        A peer counts as failed so many seconds after its last heartbeat. Raises PeerFailedError where one failed, in
        this call or an earlier one.
        """
        if os.getpid() != self._pid:  # in a fork, which has no part in it
            yield
            return
        with self._turn:
            if self._in_call:  # of this thread
                yield
                return
            self._enter(name, timeout)
            try:
                yield
            except BaseException as error:
                self._leave(error)
                raise
            else:
                self._leave(None)
            finally:
                self._in_call = False  # also where the wait for peers was interrupted

    @contextmanager
    def running_pass(self, timeout: float) -> Iterator[None]:
        """Context of a forward pass, in which the processes communicate; outside of a call, a call by itself."""
        with nullcontext() if self._in_call else self.call("forward", timeout):
            self._raise_if_failed()
            communicates = self._last.communicates
            self._advance("a forward pass", communicates=True)
            yield
            self._advance("the end of a forward pass", communicates=communicates)

    def enter_foreign_loop(self) -> None:
        """The remaining call runs passes that are not logged, between which collectives may be."""
        self._in_foreign_loop = True
        self._advance("a loop of transformers", communicates=True)

    def step(self, doing: str) -> None:
        """Log a collective, the same on all ranks; raises PeerFailedError if a peer has failed."""
        self._raise_if_failed()
        self._advance(doing, communicates=self._in_foreign_loop)

    def frees(self, one: Clearable) -> None:
        """Clear this when the groups are given up."""
        with self._news:
            self._holders.add(one)

    def also(self, groups: Sequence[ProcessGroup]) -> None:
        """Give up these groups too, which another model communicates over."""
        with self._news:
            known = {id(group()) for group in self._groups}
            self._groups += [ref(group) for group in groups if id(group) not in known]

    def end(self) -> None:
        """End the threads, at the end of the process; wait for seconds at most."""
        with self._news:
            self._is_ending = True
            self._send()
        for thread in self._threads:
            thread.join(_SILENT)

    @property
    def _last(self) -> Event:
        return self._log[1][-1]

    def _advance(self, doing: str, *, communicates: bool = False, error: str | None = None) -> None:
        count, events = self._log
        self._log = count + 1, (*events[1 - _LOGGED :], Event(doing, communicates, error))

    def _raise_if_failed(self, when: str = "") -> None:
        if self.failed is not None:
            raise PeerFailedError(*self.failed, when + _START_AGAIN)

    def _enter(self, name: str, timeout: float) -> None:
        with self._news:
            if not self._threads and self.failed is None:
                for thread, body in (("heartbeat", self._exchange), ("watchdog", self._watch)):
                    self._threads.append(Thread(target=body, name=f"hf_fastdecode-{thread}", daemon=True))
                    self._threads[-1].start()
            self._timeout, self._entered = timeout, self._now()
            self._news.notify_all()
            self._news.wait_for(lambda: self.failed is not None or self._is_settled())
            self._raise_if_failed(" (in an earlier call)")
            self._in_foreign_loop, self._in_call = False, True
            self._advance(f"a call of {name}")
            self._send()

    def _leave(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid:
            return
        text = None if error is None else f"{type(error).__name__}: {one_line(error)}"
        with self._news:
            broke = _of_communication(error)
            if broke and isinstance(error, Exception) and self.failed is None:
                self._connection_broke = True  # by a peer that says so, or whose heartbeat stops
                self._news.notify_all()
                self._news.wait_for(lambda: self.failed is not None, 2 * _SILENT)
            by_peer = self.failed
            if broke and text is not None:
                self._fail(self._rank, text)
            self._advance(_END, communicates=self._last.communicates, error=text)
            self._in_call = self._connection_broke = False
            self._send()
            if by_peer is None and error is not None:
                self._wait_until_sent()
        if by_peer is not None:
            if error is not None:
                clear_frames(error.__traceback__)  # which may hold captured steps
            if error is None or isinstance(error, Exception):
                raise PeerFailedError(*by_peer, _START_AGAIN) from error

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._beats, self._in_call, *self._log, self.failed)

    def _now(self) -> float:
        """Seconds in which this process ran: while it was stopped, or held the GIL, no peer could be heard."""
        read, self._read = self._read, monotonic()
        self._time += min(self._read - read, 2 * _BETWEEN_CALLS)
        return self._time

    def _is_settled(self) -> bool:
        """Whether the last call ended without an error, or all peers are known to have left it too."""
        left = {rank for rank, peer in self._peers.items() if peer.total >= self._log[0]}
        return self._last.error is None or left.issuperset(self._others)

    def _send(self) -> None:
        self._wanted += 1
        self._news.notify_all()

    def _wait_until_sent(self) -> None:
        """Wait until peers can read what this process sends; a second at most.

        Rank 0, which may end, and the store with it, waits until they have read it.
        """
        wanted, last = self._wanted, self._beats + 3 if self._rank == 0 else 0

        def is_sent() -> bool:
            is_read = self._is_settled() if self.failed is None else all(one.failed for one in self._peers.values())
            return self._lost is not None or (self._written >= wanted and (is_read or self._beats >= last))

        self._news.wait_for(is_sent, 1.0)

    def _exchange(self) -> None:
        """Body of the heartbeat thread: writes this process's heartbeat, and reads the others'."""
        known: set[int] = set()
        while True:
            with self._news:
                wanted, mine = self._wanted, self._heartbeat()
            try:
                self._store.set(str(self._rank), json.dumps(mine))
                known.update(rank for rank in self._others if rank not in known and self._store.check([str(rank)]))
                found = {rank: Heartbeat.of_text(self._store.get(str(rank))) for rank in known}  # waits for a key
            except RuntimeError as error:  # of torch.distributed: the process that holds the store may have ended
                with self._news:
                    self._lost = self._now(), one_line(error, 160)
                    self._news.notify_all()
                return
            with self._news:
                self._answered = self._now()
                for rank, theirs in found.items():
                    if rank not in self._peers or self._peers[rank].beat != theirs.beat:
                        self._heard[rank] = self._answered
                    self._peers[rank] = theirs
                self._written = wanted
                self._beats += 1
                group = self._groups[0]()
                self._is_ending |= (
                    group is None or group not in distributed.distributed_c10d._world.pg_map
                )  # destroyed
                self._look()
                self._news.notify_all()
                if self._is_ending:
                    return
                seconds = _IN_CALLS if self._in_call or self._last.error is not None else _BETWEEN_CALLS
                if self._wanted == wanted:
                    self._news.wait(seconds)
            sleep(_LEAST)

    def _look(self) -> None:
        """Give up the groups if a peer did, cannot take part in this call any more, or is silent."""
        now, mine, is_waiting = self._now(), self._heartbeat(), self._in_call or not self._is_settled()
        # Where this process was stopped, its call gets time to leave, as the peer did.
        step, self._looked = min(now - self._looked, 2 * _IN_CALLS), now
        limit = _SILENT if self._connection_broke else self._timeout
        for rank, peer in self._peers.items():
            theirs, waited = peer.events[-1], self._behind.pop(rank, -step) + step
            if peer.failed is not None:
                self._fail(*peer.failed)
            elif (failed := difference(self._rank, mine, rank, peer)) is not None:
                self._fail(*failed)
            elif mine.in_call and theirs.error is not None and peer.total == mine.total + 1:
                # This process raises the error too, or goes on to a collective; within one, it waits for the peer.
                self._behind[rank] = waited
                if waited > (_GRACE if self._last.communicates else self._timeout):
                    self._fail(rank, theirs.error)
            elif is_waiting and now - self._heard[rank] > limit:
                closed = "its connections were closed, and " if self._connection_broke else ""
                last = f"in {theirs.doing}" if peer.in_call else "outside of a call"
                self._fail(rank, f"{closed}it is silent for more than {limit:g} s (last known to be {last})")
        if is_waiting and now - self._entered > self._timeout:
            self._entered = float("inf")  # once a call
            for rank in {*self._others}.difference(rank for rank, peer in self._peers.items() if peer.in_call):
                what = f"a call of a model has waited {self._timeout:g} s for rank {rank}"
                why = "which does not take part in it: every process of the model must make the same calls"
                logger.warning("%s, %s", what, why)

    def _watch(self) -> None:
        """Body of the thread that aborts the groups once they are given up, and notices that the store is gone."""
        with self._news:
            while self.failed is None:
                if self._is_ending:
                    return
                is_waiting, now = self._in_call or not self._is_settled(), self._now()
                if is_waiting and self._lost is not None:
                    if self._connection_broke or now - self._lost[0] > _GRACE:
                        self._fail(0, f"{_STORE} is gone ({self._lost[1]})")
                elif is_waiting and now - self._answered > self._timeout:
                    self._fail(0, f"{_STORE} has not answered for {self._timeout:g} s")
                if self.failed is None:
                    self._news.wait(_IN_CALLS if is_waiting else None)
            # Before connections close, which others notice at once, and before this process ends with the store in it.
            self._wait_until_sent()
            self._is_ending = True
        Thread(target=self._free, name="hf_fastdecode-free", daemon=True).start()
        for group in self._groups:
            if (one := group()) is not None:
                try:
                    abort(one)
                except Exception:
                    logger.warning("the communication of a process group cannot be closed", exc_info=True)

    def _fail(self, rank: int, cause: str) -> None:
        """Give up the groups, for the first cause that is given."""
        if self.failed is None:
            self.failed = rank, cause
            self._send()

    def _free(self) -> None:
        """Free what is held, once no call uses it, or if the call waits: NCCL's lock is held until all is free."""
        with self._news:
            self._news.wait_for(lambda: not self._in_call, _GRACE)
            holders = list(self._holders)
        for one in holders:
            try:
                one.clear()
            except RuntimeError:  # of a device whose last kernel failed
                logger.warning("captured steps cannot be freed", exc_info=True)


_COMMUNICATION = re.compile("gloo|nccl|connection (closed|reset)|pair closure", re.IGNORECASE)


def _of_communication(error: BaseException | None) -> bool:
    """Whether an error, or a cause of it, is of communication."""
    while error is not None:
        if isinstance(error, distributed.DistError):
            return True
        if isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


_TAGS = range(0x0F5D_0000, 0x0F5D_0008)
"""Tags of messages that no process sends; gloo chooses one of its network devices by the tag."""


def abort(group: ProcessGroup) -> None:
    """End the collectives of a group in this process, those in flight too, so that every later one raises an error.

    Not from a thread that runs collectives: NCCL returns once no captured graph holds the communicator any more.
    """
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    backends = [getattr(one, "wrapped_pg", one) for one in backends]  # by TORCH_DISTRIBUTED_DEBUG=DETAIL
    for backend in {id(one): one for one in backends}.values():
        is_gloo = distributed.is_gloo_available() and isinstance(backend, distributed.ProcessGroupGloo)
        if not is_gloo:
            backend.abort()
            continue
        # gloo's `abort` ends nothing that is in flight, but a message that is late closes all connections. One from a
        # peer whose connection was closed before is not late, so that each peer is waited for.
        others = (rank for rank in range(backend.size()) if rank != backend.rank())
        for peer, tag in product(others, _TAGS):
            message = torch.empty(1, device="cpu")
            with suppress(RuntimeError):
                backend.recv([message], peer, tag).wait(timedelta(milliseconds=1))


_watchdogs: WeakKeyDictionary[ProcessGroup, Watchdog] = WeakKeyDictionary()
_made: Counter[str] = Counter()
"""Watchdogs that were made, by name of the group, which a later group may have too, in the same store."""


def watchdog_of(groups: Sequence[ProcessGroup]) -> Watchdog:
    """The watchdog of the first of a model's groups, the same one from its first call until the group is destroyed.

    Processes make the watchdogs of groups of one name in the same order.
    """
    first = groups[0]
    found = _watchdogs.get(first)
    if found is None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

        if not _made:  # threads end before the interpreter, in whose last moments they must not run
            atexit.register(_end_all)
            os.register_at_fork(after_in_child=_watchdogs.clear)
        _made[first.group_name] += 1
        store = _get_process_group_store(first).clone()  # type: ignore[attr-defined]  # a new connection: on one, requests wait
        name = f"hf_fastdecode/{first.group_name}/{_made[first.group_name]}"
        found = _watchdogs[first] = Watchdog(groups, PrefixStore(name, store))
    else:
        found.also(groups)
    return found


def _end_all() -> None:
    for watchdog in list(_watchdogs.values()):
        watchdog.end()
