"""Ctrl-C while modules are imported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C, as shells count it."""


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Within, Ctrl-C ends the process at once with exit code 130.

    An import that a KeyboardInterrupt breaks off shows a traceback, turns it into another error or swallows it. A
    handler that is not Python's default stays, and with it an ignored signal.
    """
    main_thread = threading.current_thread() is threading.main_thread()  # others may set no handlers
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
