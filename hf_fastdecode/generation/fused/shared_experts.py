"""Mixtures whose output is the sum of chosen experts and of one module for all rows, such as DeepSeek's.

Where that module is as wide as some of the experts, it is computed as so many more, in the experts' launches: its
products have their shape, and the sum is one that is computed in any case.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...instance_methods import is_linear
from ...kernels.experts.api import experts
from ...kernels.experts.config import Gate, Shared, refusal, shared_refusal
from ...kernels.failures import KernelFailedError
from ...kernels.row_products.config import fuses_products
from .experts import EXPERTS, Form, computes_here, weights_of
from .gated import GATED
from .norms import sum_of_experts
from .trial import FusedKind, Returns, by_kernel, function_key, is_plain, names_in, random, runs_fused, settings, twin

_ROUTER, _EXPERTS, _SHARED = "gate", "experts", "shared_experts"
_PARTS = {_ROUTER, _EXPERTS, _SHARED}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def may_be(module: type[nn.Module]) -> bool:
    return set(names_in(module)) >= _PARTS


def key(module: nn.Module) -> Hashable | None:
    if module._modules.keys() != _PARTS or module._parameters or module._buffers:
        return None
    chosen, shared = module._modules[_EXPERTS], module._modules[_SHARED]
    if chosen is None or shared is None or not (EXPERTS.may_be(type(chosen)) and GATED.may_be(type(shared))):
        return None
    keys = settings(module), EXPERTS.key(chosen), GATED.key(shared)
    return None if any(one is None for one in keys) else ("shared experts", function_key(type(module).forward), keys)


def form_of(module: Any) -> Form | None:
    """The form of the experts, where the module's is the same function and all that the code does is add."""
    form: Form | None = EXPERTS.form_of(module.experts)
    if form is None or form.gate != Gate(GATED.form_of(module.shared_experts)):
        return None
    x, shares, chosen = random(3, 2, 16, seed=0), random(6, 2, seed=1), torch.zeros(6, 2, dtype=torch.int64)
    router = Returns((random(6, 4, seed=2), shares, chosen))
    of_chosen, of_all = Returns(random(6, 16, seed=3)), Returns(random(3, 2, 16, seed=4))
    small = twin(module, **{_ROUTER: router, _EXPERTS: of_chosen, _SHARED: of_all})
    found = type(module).forward(small, x)
    rows, *others = of_chosen.seen
    same = torch.equal(found, of_chosen.result.view_as(x) + of_all.result) and torch.equal(rows, x.view(6, 16))
    seen = (*router.seen, *of_all.seen)
    same = same and len(seen) == 2 and all(torch.equal(one.view_as(x), x) for one in seen)
    return form if same and len(others) == 2 and others[0] is chosen and others[1] is shares else None


def _run(module: Any, form: Form, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    of_rows, of_all = module.experts, module.shared_experts
    if args or kwargs or not fuses_products() or not runs_fused(x) or computes_here(of_rows) is None:
        return None
    parts = [of_all._modules.get(name) for name in _PROJECTIONS]
    plain = all(is_plain(one) for part in (of_rows, of_all) for one in part.modules())
    if not plain or not all(map(is_linear, parts)) or any(one.bias is not None for one in parts):
        return None
    gate, up, down = parts
    weights, shared = weights_of(of_rows, form), Shared(gate.weight, up.weight, down.weight)
    rows = x.reshape(-1, x.shape[-1])
    if shared_refusal(rows, weights, shared) is not None:
        return None
    _, shares, chosen = module.gate(x)
    if refusal(rows, weights, chosen, shares) is None:
        with suppress(ValueError, KernelFailedError):
            return sum_of_experts(experts(rows, weights, chosen, shares, form.gate, shared=shared)).view_as(x)
    result: Tensor = of_rows(rows, chosen, shares).view_as(x) + of_all(x)  # the router has run
    return result


SHARED_EXPERTS = FusedKind("mixtures with shared experts", may_be, key, form_of, by_kernel(_run))
