"""What a row says where there are no numbers."""

from __future__ import annotations

import textwrap

import torch


class NotAvailableError(Exception):
    """A way cannot run here; the message says why."""


def status_of(error: Exception) -> str:
    """What a row says of an error: memory and refusals are results, all else has failed."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    # A mode that is asked for by name runs or raises so.
    if isinstance(error, NotAvailableError) or (isinstance(error, ValueError) and " cannot run: " in str(error)):
        return f"not run: {error}"
    return "failed: " + textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
