"""The package's logger. Its lines on stderr begin with the package's name where a program has set up no logging."""

from __future__ import annotations

import logging
import sys
from typing import Final

NAME: Final = "hf_fastdecode"

logger: Final = logging.getLogger(NAME)


class _LastResort(logging.Handler):
    """`logging.lastResort` with the package's name before the message; silent where another handler has the record."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.lastResort is None or any(one is not self for one in _handlers()):
            return
        try:
            print(f"{NAME}: {self.format(record)}", file=sys.stderr, flush=True)
        except Exception:  # such as a closed stream: logging never breaks a program
            self.handleError(record)


def _handlers() -> list[logging.Handler]:
    """Handlers that get this logger's records."""
    root = logging.getLogger()
    return [*logger.handlers, *(root.handlers if logger.propagate else ())]


logger.addHandler(_LastResort(logging.WARNING))
