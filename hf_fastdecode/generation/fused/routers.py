"""Routers of experts: scores, the largest of each row, and their softmax, in one launch in captured passes."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from ..._compat import uncompiled_call
from ...kernels.experts import reference
from ...kernels.experts.api import route
from ...kernels.experts.config import MOST_LARGEST, MOST_WIDTH, Routing, routing_refusal
from ...kernels.failures import KernelFailedError
from ...kernels.row_products.config import fuses_products
from .products import products_here
from .runs import is_plain, runs_fused
from .trial import names_in, random, settings, twin

WHAT = "routers"

_ROWS = 24


def may_be(module: type[nn.Module]) -> bool:
    """Whether modules of a class may be routers."""
    return {"topk", "linear"} <= set(names_in(module))


def kind(module: nn.Module) -> Hashable | None:
    """What tells modules apart that compute differently; None for a module of other parts."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or module._parameters.keys() - {"weight", "bias"}:
        return None
    if module._modules or module._buffers or weight.shape[1] > MOST_WIDTH:
        return None
    of_module = settings(module)
    biased = module._parameters.get("bias") is not None
    return None if of_module is None else (of_module, tuple(weight.shape), biased)


def form_of(module: nn.Module) -> Routing | None:
    """How a router chooses; None if it computes anything else."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    parts = {"weight": random(*weight.shape, seed=1) / 8}
    if bias is not None:
        parts["bias"] = random(*bias.shape, seed=2)
    x = random(_ROWS, weight.shape[1], seed=3)
    found = type(module).forward(twin(module, **parts), x)
    if not isinstance(found, tuple) or len(found) != 3 or found[2].dim() != 2:
        return None
    count = found[2].shape[1]
    if not 1 <= count <= MOST_LARGEST:
        return None
    for first, whole in product((False, True), repeat=2):
        routing = Routing(count, first, whole)
        expected = reference.route(x, parts["weight"], parts.get("bias"), routing)
        if all(_same(one, other) for one, other in zip(found, expected, strict=True)):
            return routing
    return None


def replacement(module: nn.Module, routing: Routing) -> Any:
    """What runs in the place of the module."""
    return partial(_run, module, routing)


def _run(module: nn.Module, routing: Routing, *args: Any, **kwargs: Any) -> Any:
    products = products_here()
    if products is None or not fuses_products() or len(args) != 1 or kwargs or not is_plain(module):
        return uncompiled_call(module, *args, **kwargs)
    x, weight, bias = args[0], module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or not runs_fused(x):
        return uncompiled_call(module, x)
    rows = x.reshape(-1, x.shape[-1])
    if routing_refusal(rows, weight, bias, routing) is not None:
        return uncompiled_call(module, x)
    try:
        return route(rows, weight, bias, routing, products.counters(x.device))
    except KernelFailedError:
        return uncompiled_call(module, x)


def _same(found: Any, expected: torch.Tensor) -> bool:
    return (
        isinstance(found, torch.Tensor)
        and (found.shape, found.dtype) == (expected.shape, expected.dtype)
        and torch.allclose(found, expected, rtol=1e-2, atol=1e-3)
    )
