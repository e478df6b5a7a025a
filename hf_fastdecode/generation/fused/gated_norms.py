"""RMSNorm modules with a gate, behind the states of gated delta nets and Mamba-2."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..._compat import uncompiled_call
from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import GatedNormForm, gated_rms_norm
from . import norms
from .runs import is_plain, runs_fused
from .trial import TRIED_IN, matching, random, twin

WHAT = "gated norms"

_GROUP = "group_size"
"""Attribute with the numbers of a group."""

_COLUMNS = 96


def may_be(module: type[nn.Module]) -> bool:
    """Whether modules of a class may be norms with a gate."""
    return norms.may_be(module) and "gated" in module.__name__.lower()


def kind(module: nn.Module) -> Hashable | None:
    """What tells norms apart that compute differently; None for a module that is no norm with a weight."""
    found = norms.kind(module)
    return None if found is None else (WHAT, found)


def form_of(module: nn.Module) -> GatedNormForm | None:
    """Which form a norm computes; None if none of them."""
    eps, group = norms.eps_of(module), vars(module).get(_GROUP)
    assert eps is not None
    columns = 2 * group if group else _COLUMNS
    x, gate, weight = (
        random(*shape, seed=seed) for seed, shape in enumerate(((5, columns), (5, columns), (columns,)))
    )
    small = twin(module, weight=weight)
    found = type(module).forward(small, x, gate)
    forms = (
        (form, reference.gated_rms_norm(x, gate, weight.to(TRIED_IN), eps, form, group=group))
        for form in GatedNormForm
    )
    return matching(found, forms)


def replacement(module: nn.Module, form: GatedNormForm) -> Any:
    """What runs in the place of the module."""
    return partial(_run, module, form)


def _run(module: nn.Module, form: GatedNormForm, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    weight, eps, gate = module._parameters.get("weight"), norms.eps_of(module), args[0] if args else kwargs.get("gate")
    if (
        len(args) + len(kwargs) != 1
        or type(gate) is not Tensor
        or not is_plain(module)
        or type(weight) is not nn.Parameter
        or eps is None
        or not runs_fused(x)
        or gate.device != x.device
        or weight.device != x.device
    ):
        return uncompiled_call(module, x, *args, **kwargs)
    try:
        return gated_rms_norm(x, gate, weight, eps, form, group=vars(module).get(_GROUP))
    except (ValueError, KernelFailedError):
        return uncompiled_call(module, x, *args, **kwargs)
