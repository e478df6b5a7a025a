"""RMSNorm modules."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import uncompiled_call
from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import MOST_COLUMNS, NormForm, rms_norm
from .runs import is_plain, runs_fused
from .sums import waiting_sums
from .trial import TRIED_IN, matching, random, settings, twin

WHAT = "norms"

_EPS = ("variance_epsilon", "eps")
_COLUMNS = 96

_SCALES = torch.tensor([1, 0.1, 0.01, 0.001] * 2, dtype=TRIED_IN, device="cpu")[:, None]
"""Of rows: small ones show where an epsilon is added."""


def may_be(module: type[nn.Module]) -> bool:
    """Whether modules of a class may be norms."""
    return "norm" in module.__name__.lower()


def kind(module: nn.Module) -> Hashable | None:
    """What tells norms apart that compute differently; None for a module that is no norm with a weight."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    of_module = settings(module) if eps_of(module) is not None else None
    return (of_module, weight.dtype == torch.float32) if of_module is not None else None


def form_of(module: nn.Module) -> NormForm | None:
    """Which form a norm computes; None if none of them."""
    eps, own = eps_of(module), module._parameters["weight"]
    assert eps is not None
    assert own is not None
    x = random(8, _COLUMNS, seed=1) * _SCALES
    weight = random(_COLUMNS, seed=2, dtype=torch.float32 if own.dtype == torch.float32 else TRIED_IN)
    found = type(module).forward(twin(module, weight=weight), x)
    return matching(found, ((form, reference.rms_norm(x, weight, eps, form)) for form in NormForm))


def replacement(module: nn.Module, form: NormForm) -> Any:
    """What runs in the place of the module."""
    return partial(_run, module, form)


def _run(module: nn.Module, form: NormForm, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    sums, weight, eps = waiting_sums(), module._parameters.get("weight"), eps_of(module)
    waits = sums is not None and sums.waits(x)
    # Of queries and keys of many tokens, which models transpose first: [batch, heads, length, head_dim]. A sum that
    # waits would be computed by looking at it.
    transposed = not waits and x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
    if (
        args
        or kwargs
        or not is_plain(module)
        or type(weight) is not nn.Parameter
        or eps is None
        or not runs_fused(x)
        or not (waits or transposed or x.is_contiguous())
        or weight.shape != x.shape[-1:]
        or weight.device != x.device
        or weight.shape[0] > MOST_COLUMNS
        or (form is NormForm.ROUNDED and weight.dtype != x.dtype)
    ):
        return uncompiled_call(module, x, *args, **kwargs)
    try:
        if sums is not None and waits:
            with sums.taken() as (first, plus):
                return rms_norm(first, weight, eps, form, plus)
        if transposed:
            return rms_norm(x.transpose(1, 2), weight, eps, form).transpose(1, 2)
        return rms_norm(x, weight, eps, form)
    except (ValueError, KernelFailedError):  # a weight that is not contiguous, or no kernel
        return uncompiled_call(module, x)


def eps_of(module: nn.Module) -> float | None:
    """What a norm adds to the mean, by its attribute."""
    found = (vars(module).get(name) for name in _EPS)
    return next((value for value in found if isinstance(value, float)), None)
