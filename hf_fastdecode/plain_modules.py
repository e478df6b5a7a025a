"""Modules whose call computes what their class's code says, which kernels may compute in their place."""

from __future__ import annotations

import types
from typing import TypeGuard

from torch import nn


def is_unchanged(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's `forward`, without hooks."""
    own = vars(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own or "_call_impl" in own:
        return False
    forward = own.get("forward")
    return forward is None or (isinstance(forward, types.MethodType) and forward.__func__ is type(module).forward)


def is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a call of the module is `F.linear` and no more; other libraries replace `nn.Linear.forward` too."""
    if type(module) is not nn.Linear or not is_unchanged(module):
        return False
    return getattr(nn.Linear.forward, "__globals__", None) is vars(nn.modules.linear)
