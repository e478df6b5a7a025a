"""A lock that calls of `generate` hold, which an interruption (Ctrl-C) at any point of taking it leaves free."""

from __future__ import annotations

import threading
import time

_SECONDS = 0.005
"""Between two tries of who waits: for calls of other threads, which take far longer.

No event or condition wakes up who waits: an interruption within its methods may leave taken for ever the lock that it
has itself, which is what `CallLock` is for.
"""


class LockHolder:
    """Who may hold a lock: a call, in the thread that makes this object.

    Args:
        scope: The scope of a call that holds it from its start to its end.
    """

    def __init__(self, scope: object = None):
        self.thread, self.scope = threading.get_ident(), scope


class CallLock:
    """A lock that is taken by a single operation of the interpreter, which tells who holds it.

    So `release` after an interruption finds whether there is anything to release. A lock of `threading` may be taken
    without its `acquire` having returned.
    """

    def __init__(self) -> None:
        self._holders: dict[str, LockHolder] = {}

    @property
    def holder(self) -> LockHolder | None:
        """Who holds it."""
        return self._holders.get("")

    def acquire(self, holder: LockHolder, *, wait: bool) -> bool:
        """Take it, at once or once it is free; within a ``try`` whose ``finally`` releases it. Whether it is taken."""
        while self._holders.setdefault("", holder) is not holder:
            if not wait:
                return False
            time.sleep(_SECONDS)
        return True

    def release(self, holder: LockHolder | None) -> None:
        """Release it, if this is who holds it."""
        if holder is not None and self.holder is holder:
            del self._holders[""]
