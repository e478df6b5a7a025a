"""Whether a replaced module runs its kernel: in passes of this package, in half precision, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_on: ContextVar[bool] = ContextVar("hf_fastdecode_fused", default=False)


@contextmanager
def fused_here() -> Iterator[None]:
    """Context in which replaced modules run their kernels; other threads, also of the same model, are unaffected."""
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def runs_fused(x: Tensor) -> bool:
    """Whether kernels compute with this input."""
    return (
        _on.get()
        and x.dtype in (torch.float16, torch.bfloat16)
        and 0 not in x.shape
        and not torch.is_grad_enabled()
        and type(x) is Tensor
    )
