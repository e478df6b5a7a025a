"""Captures that fail: why, and what runs eagerly in their place.

A capture may run out of memory, be refused by a kernel or a view (`Unsupported`), perhaps for this batch's rows or
lengths alone, or meet an operation that CUDA does not allow during a capture.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from ...errors import Unsupported, ran_out_of_memory
from ...parallel.ranks import PassFailedError
from ..call_context import CallContext


class Failure(NamedTuple):
    """Why a capture failed.

    Attributes:
        reason: The error's first line.
        out_of_memory: Whether PyTorch's memory did not suffice: fewer rows may be captured.
        unsupported: Whether it was refused: other rows and lengths may be captured.
    """

    reason: str
    out_of_memory: bool
    unsupported: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Classify the error of a capture; one for which other processes wait (`PassFailedError`) is raised again."""
        if isinstance(error, PassFailedError):
            raise error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return cls(reason, ran_out_of_memory(error), isinstance(error, Unsupported))


def fall_back(call: CallContext, what: str, failure: Failure, key: Hashable, *, lasts: bool, raises: bool) -> str:
    """Run eagerly what could not be captured, with a warning once; returns the reason.

    Args:
        what: What runs eagerly, as the warning says it.
        key: What it is for `Captures.failures`.
        lasts: Whether it is not captured again until `Captures.retry`.
        raises: Whether a forced mode raises ValueError.
    """
    if raises and (forced := call.options.needs_capture):
        raise cannot_run(forced, failure.reason)
    if lasts:
        call.state.captures.fail(key, failure.reason, call.model.device)
    call.state.log_once(f"{what} ({failure.reason})")
    return failure.reason


def cannot_run(forced: str, reason: str) -> ValueError:
    """The error of a forced option that cannot be fulfilled."""
    return ValueError(f"{forced} cannot run: {reason}; use {forced.partition('=')[0]}='auto'")
