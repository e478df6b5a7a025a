"""Errors: invalid input, features that stock transformers runs, exhausted memory. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any


class InputError(ValueError):
    """Something that the caller can set right, in one line: the value, the bound and the remedy.

    Messages name arguments in backticks, with a value or without: `dtype`, `dtype="bfloat16"`. The command line shows
    its options instead (`cli.console`).
    """


def one_line(error: BaseException, width: int = 400) -> str:
    """An error of another library in one line of at most `width` letters."""
    return textwrap.shorten(str(error) or type(error).__name__, width, placeholder=" …").rstrip(".")


class Unsupported(Exception):  # noqa: N818 - an outcome that calls recover from, by running stock
    """A model, call, prompt or layer cannot run with shared context, or processors not in the sampling kernel.

    Args:
        what: What cannot, and why.
        remedy: What to do about it, if anything.
        of_prompts: Whether the prompts alone are the reason, so that a call with a kept cache runs stock without the
            cache; otherwise it raises.
    """

    def __init__(self, what: str, remedy: str | None = None, *, of_prompts: bool = False):
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what, self.remedy, self.of_prompts = what, remedy, of_prompts


class PassFailedError(RuntimeError):
    """A forward pass failed within, so that this process cannot agree with the others, which may wait in that pass."""


class PeerFailedError(RuntimeError):
    """Another process of the model failed, so that this one cannot go on.

    Attributes:
        rank: Its number in the group of processes.
        cause: What it raised.
        remedy: What to do, after the cause in the message; empty where the next call may run.
    """

    def __init__(self, rank: int, cause: str, remedy: str = ""):
        super().__init__(f"rank {rank}, with which this process computes the model, failed: {cause}{remedy}")
        self.rank, self.cause, self.remedy = rank, cause, remedy

    def __reduce__(self) -> tuple[type[PeerFailedError], tuple[int, str, str]]:
        return PeerFailedError, (self.rank, self.cause, self.remedy)


def reason_of(check: Callable[..., object], *arguments: Any) -> str | None:
    """Run a check that raises `Unsupported`; returns its reason, or None if it passes."""
    try:
        check(*arguments)
    except Unsupported as error:
        return str(error)
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; for memory of the CPU torch raises a RuntimeError."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether PyTorch's allocator caused an error; ending a failed capture raises another on top of it."""
    import torch

    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
