"""Sums that wait for the norm that follows: ``residual + hidden``, then a norm of it, in one launch.

Between a layer's products a model adds its input, by an operator, and hands the sum to its next norm. `WaitingSums`
leaves such a sum undone until the next operation: a norm that runs as a kernel takes it along, any other operation
first has it computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...kernels.pointwise.api import Plus

_SUMS = (torch.add, Tensor.add, Tensor.__add__)
_HALF = (torch.float16, torch.bfloat16)
_METADATA = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
)
"""Reads of attributes that do not lead to a tensor's memory."""


class WaitingSums(TorchFunctionMode):
    """Context in which this thread's sums wait. Of several function modes it must be entered last.

    A function mode sees every operation on tensors and every read of their attributes, so that none reads memory
    that is not written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._terms: tuple[Tensor, Tensor] | None = None
        self._total: Tensor | None = None

    def __enter__(self) -> Any:
        self._token = _active.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._token)
        self.compute()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _METADATA:
            return function(*args, **(kwargs or {}))
        self.compute()
        if function in _SUMS and not kwargs and len(args) == 2 and _can_wait(*args):
            self._terms, self._total = args, torch.empty_like(args[0])
            return self._total
        return function(*args, **(kwargs or {}))

    def compute(self) -> None:
        """Compute the sum that waits, if any."""
        if (terms := self._terms) is not None:
            total, self._terms, self._total = self._total, None, None
            torch.add(*terms, out=total)

    def waits(self, total: Tensor) -> bool:
        """Whether this is the sum that waits."""
        return self._terms is not None and total is self._total

    @contextmanager
    def taken(self) -> Iterator[tuple[Tensor, Plus]]:
        """Context that yields the sum that waits to who computes it; computed here if that fails."""
        terms, total = self._terms, self._total
        assert terms is not None
        assert total is not None
        self._terms = self._total = None
        try:
            yield terms[0], Plus(terms[1], total)
        except BaseException:
            torch.add(*terms, out=total)
            raise


# Of this thread's pass.
_active: ContextVar[WaitingSums | None] = ContextVar("hf_fastdecode_sums", default=None)


def waiting_sums() -> WaitingSums | None:
    """The context of this thread, if any."""
    return _active.get()


def _can_wait(first: Any, second: Any) -> bool:
    """Whether these are plain tensors that a norm's kernel adds."""
    return (
        type(first) is type(second) is Tensor
        and first.shape == second.shape
        and first.dtype == second.dtype
        and first.dtype in _HALF
        and first.is_contiguous()
        and second.is_contiguous()
        and first.device == second.device
        and not torch.is_grad_enabled()
    )
