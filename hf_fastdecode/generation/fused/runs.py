"""Whether a replaced module runs its kernel: in passes of this package, in half precision, without gradients.

It is asked at every call, since hooks and methods may be put on a module between passes, and within one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ..instance_patch import own_method

_on: ContextVar[bool] = ContextVar("hf_fastdecode_fused", default=False)


@contextmanager
def fused_here() -> Iterator[None]:
    """Context in which replaced modules run their kernels; other threads, also of the same model, are unaffected."""
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's `forward`."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own or "_call_impl" in own:
        return False
    return "forward" not in own or own_method(module, "forward") is None


def runs_fused(x: Tensor) -> bool:
    """Whether kernels compute with this input."""
    return (
        _on.get()
        and x.dtype in (torch.float16, torch.bfloat16)
        and 0 not in x.shape
        and not torch.is_grad_enabled()
        and type(x) is Tensor
    )
