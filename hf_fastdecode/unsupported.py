"""The exception for what this package leaves to stock transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unsupported(Exception):  # noqa: N818 - an outcome that calls recover from, by running stock
    """A model, call, prompt or layer cannot run with shared context, or processors not in the sampling kernel.

    Args:
        what: What cannot, and why.
        remedy: What to do about it, if anything.
    """

    def __init__(self, what: str, remedy: str | None = None):
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy = what, remedy


def reason_of(check: Callable[..., object], *arguments: Any) -> str | None:
    """Run a check that raises `Unsupported`; returns its reason, or None if it passes."""
    try:
        check(*arguments)
    except Unsupported as error:
        return str(error)
    return None
