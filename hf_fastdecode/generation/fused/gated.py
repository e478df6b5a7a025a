"""Gated feed-forward modules: ``down(activation(gate(x)) * up(x))``."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import uncompiled_call
from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import Activation, gated
from ...plain_modules import is_linear
from .products import products_here
from .runs import is_plain, runs_fused
from .trial import TRIED_IN, function_key, linear, matching, names_in, random, settings, twin

WHAT = "gated activations"

_WIDTH, _HIDDEN = 32, 48
_SCALES = torch.logspace(-3, 5, 9, base=2, device="cpu").to(TRIED_IN)[:, None]
"""Of tokens: large numbers show limits of activations."""
_APART, _TOGETHER = frozenset({"gate_proj", "up_proj", "down_proj"}), frozenset({"gate_up_proj", "down_proj"})
_ACTIVATIONS = ("act_fn", "activation_fn")


def may_be(module: type[nn.Module]) -> bool:
    """Whether modules of a class may be gated."""
    return "down_proj" in names_in(module)


def kind(module: nn.Module) -> Hashable | None:
    """What tells modules apart that compute differently; None for a module of other parts."""
    names, activation = module._modules.keys() - _ACTIVATIONS, _activation(module)
    if names not in (_APART, _TOGETHER) or module._parameters or module._buffers or not _may_be_replaced(activation):
        return None
    of_module = settings(module)
    of_activation = settings(activation) if isinstance(activation, nn.Module) else function_key(activation)
    if of_module is None or of_activation is None:
        return None
    return of_module, frozenset(names), of_activation


def form_of(module: nn.Module) -> Activation | None:
    """Which activation the module computes, if it computes nothing else."""
    together = "gate_up_proj" in module._modules
    parts: dict[str, nn.Module] = {"down_proj": linear(_HIDDEN, _WIDTH, seed=3)}
    if together:
        parts["gate_up_proj"] = linear(_WIDTH, 2 * _HIDDEN, seed=4)
    else:
        parts |= {"gate_proj": linear(_WIDTH, _HIDDEN, seed=4), "up_proj": linear(_WIDTH, _HIDDEN, seed=5)}
    kept = {name: part for name, part in module._modules.items() if name in _ACTIVATIONS and part is not None}
    small, x = twin(module, **parts, **kept), random(2, 9, _WIDTH, seed=6) * _SCALES
    found = type(module).forward(small, x)
    gate, up = _projected(small, x)
    forms = ((form, parts["down_proj"](reference.gated(gate, up, form))) for form in Activation)
    return matching(found, forms)


def replacement(module: nn.Module, activation: Activation) -> Any:
    """What runs in the place of the module."""
    return partial(_run, module, activation, _activation(module))


def _run(module: nn.Module, activation: Activation, own: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    plain = is_plain(module) and _activation(module) is own and _may_be_replaced(own)
    if args or kwargs or not runs_fused(x) or not plain:
        return uncompiled_call(module, x, *args, **kwargs)
    down: Any = module.down_proj
    if (hidden := _product(module, activation, x)) is not None:
        return down(hidden)
    gate, up = _projected(module, x)
    if not (type(gate) is type(up) is Tensor and gate.dtype == up.dtype == x.dtype and gate.shape == up.shape):
        return uncompiled_call(module, x)
    try:
        hidden = gated(gate, up, activation)
    except KernelFailedError:
        return uncompiled_call(module, x)
    return down(hidden)


def _product(module: nn.Module, activation: Activation, x: Tensor) -> Tensor | None:
    """What `down_proj` takes, computed in one launch; None where projections are not plain or rows are many."""
    products = products_here()
    gate, up = (module._modules.get(name) for name in ("gate_proj", "up_proj"))
    if products is None or not (is_linear(gate) and is_linear(up)):
        return None
    return products.gated(x, (gate.weight, up.weight), (gate.bias, up.bias), activation)


def _projected(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    parts: Any = module
    if "gate_up_proj" in module._modules:
        gate, up = parts.gate_up_proj(x).chunk(2, dim=-1)
        return gate, up
    return parts.gate_proj(x), parts.up_proj(x)


def _may_be_replaced(activation: Any) -> bool:
    """Whether an activation is a function, or a module whose class's `forward` is all that runs."""
    return is_plain(activation) if isinstance(activation, nn.Module) else activation is not None


def _activation(module: nn.Module) -> Any:
    found = (module._modules.get(name) or vars(module).get(name) for name in _ACTIVATIONS)
    return next(filter(None, found), None)
