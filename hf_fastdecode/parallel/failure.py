"""Ends the calls of all processes of a model when one of them fails, so that none waits for it for ever.

Each process tells the others where it stands (`Heartbeat`). A thread judges what they tell (`PeerJudge`): a peer that
left by an error of its own, went another way, or was silent for too long has failed. The thread then closes the
group's communication, so that the thread that waits in it gets an error, which becomes a `PeerFailedError`. The group
is refused from then on.

A slow peer is not a failed one: its heartbeat goes on. Within a call, calls and collectives are counted, no more: the
watch communicates beside them, never in them. Threads start with the first call; between calls, each asks for
the others once a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from time import monotonic
from traceback import clear_frames
from typing import TYPE_CHECKING

from torch import distributed

from ..errors import PeerFailedError, one_line
from .judge import PeerJudge
from .standing import Exit, Standing, remembered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import PrefixStore

_START_AGAIN = "; these processes cannot compute the model together any more: end them and start them again"

_RECENT = 64
"""Collectives and passes that a process tells: more than one is ahead of another, whose device still computes."""

_COMMUNICATION = re.compile("gloo|nccl|connection (closed|reset)|pair closure", re.IGNORECASE)


def _of_communication(error: BaseException | None) -> bool:
    """Whether communication failed, or what an error was raised from."""
    while error is not None:
        if isinstance(error, distributed.DistError):
            return True
        if isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class PeerWatch(PeerJudge):
    """Watches the other processes of a group while this one is in a call; see `watch_of`.

    It keeps account of this process's calls, passes and collectives, which all processes of the group count alike.
    """

    def __init__(self, groups: Sequence[ProcessGroup], store: PrefixStore):
        super().__init__(groups, store)
        self._pid = os.getpid()
        self._recent: tuple[tuple[int, str], ...] = ((0, ""),)  # what was begun, counted; other threads read it
        self._place, self._began = "", 0
        self._in_foreign_loop = False
        self._caller: int | None = None  # the thread of the call

    @contextmanager
    def call(self, name: str, timeout: float) -> Iterator[None]:
        """Context of a call that all processes of the group make; those of other threads wait for it.

        Args:
            name: What is called; the same on all ranks.
            timeout: Seconds after a peer's last heartbeat until it counts as failed.

        Raises:
            PeerFailedError: A peer failed, in this call or an earlier one.
        """
        # Within another call, or in a fork, which has no part in it.
        if self._caller == get_ident() or os.getpid() != self._pid:
            yield
            return
        with self._one_at_a_time():
            self._enter(name, timeout)
            error: BaseException | None = None
            try:
                yield
            except BaseException as raised:
                error = raised
                raise
            finally:
                try:
                    self._leave(error)
                finally:
                    error = None  # whose traceback holds this frame

    @contextmanager
    def running_pass(self, timeout: float) -> Iterator[None]:
        """Context of a forward pass, in which the processes communicate; a call of its own outside of one."""
        if os.getpid() != self._pid:  # in a fork, which has no part in it
            yield
            return
        if not self._in_call:
            with self.call("forward", timeout), self.running_pass(timeout):
                yield
            return
        self._raise_if_failed()
        odd = self._recent[-1][0] % 2 == 1
        self._advance("a forward pass", odd=True)
        yield
        self._advance("the end of a forward pass", odd=odd)

    def enter_foreign_loop(self) -> None:
        """The rest of the call is passes that are not counted, between which collectives may be."""
        self._in_foreign_loop = True
        self._advance("a loop of transformers", odd=True)

    def at(self, place: str) -> None:
        """Tell in which part of the call this process is."""
        self._place = place

    def step(self, doing: str) -> None:
        """Count a collective, the same on all ranks; raises PeerFailedError if a peer has failed."""
        self._raise_if_failed()
        self._advance(doing, odd=self._in_foreign_loop)

    def _advance(self, doing: str, *, odd: bool = False) -> None:
        count = self._recent[-1][0] + 1
        self._recent = (*self._recent[1 - _RECENT :], (count + (count % 2 != odd), doing))

    def _raise_if_failed(self) -> None:
        if self.failed is not None:
            raise PeerFailedError(*self.failed, _START_AGAIN)

    def _standing(self) -> Standing:
        return Standing(0, self._in_call, self._recent, self._place, self._exits, self.failed, self._began)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Context of this thread's call, for which those of other threads wait."""
        with self._news:
            self._news.wait_for(lambda: self._caller is None)
            self._caller = get_ident()
        try:
            yield
        finally:
            if os.getpid() == self._pid:
                with self._news:
                    self._caller = None
                    self._news.notify_all()

    def _enter(self, name: str, timeout: float) -> None:
        with self._news:
            if self.failed is None:
                self._start()
            self._timeout, self._entered, self._place = timeout, monotonic(), name
            self._settle()
            if self.failed is not None:
                raise PeerFailedError(*self.failed, f" (in an earlier call){_START_AGAIN}")
            self._vain.clear()
            self._in_foreign_loop = False
            self._advance(f"a call of {name}")
            self._began, self._in_call = self._recent[-1][0], True
            self._heartbeat.ask()
            self._news.notify_all()

    def _leave(self, error: BaseException | None) -> None:
        if os.getpid() != self._pid:
            return
        text = None if error is None else f"{type(error).__name__}: {one_line(error)}"
        with self._news:
            if isinstance(error, Exception) and self.failed is None and _of_communication(error):
                self._find_who_closed()
            by_peer = self.failed
            if by_peer is None and text is not None and _of_communication(error):
                self._fail(self._rank, text)
            self._exits = remembered(*self._exits, Exit(self._recent[-1][0], text))
            self._in_call = False
            self._heartbeat.ask()
            self._news.notify_all()
            if by_peer is None and error is not None:
                last = self._heartbeat.rounds + 3 if self._rank == 0 else 0  # rank 0 may end, and the store with it
                self._heartbeat.until_written(lambda: self._heartbeat.rounds >= last or self._left_alike() is not None)
        if by_peer is not None:
            if error is not None:
                clear_frames(error.__traceback__)  # which may hold captured steps
            self._free()
            if error is None or isinstance(error, Exception):
                raise PeerFailedError(*by_peer, _START_AGAIN) from error
