"""Experts of a mixture, by transformers' interface for them: their products, and the gate between.

transformers' own implementations copy the weights of each row's experts, or sort and gather rows by some fifty
launches. The kernels of `kernels.experts` serve the few rows of captured passes, unless these leave products to
PyTorch (``fuse_projections=False``). Other passes keep transformers' ``grouped_mm``, by `grouped_experts` where that
serves them, or else whatever it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator
from itertools import product
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat import EXPERTS_FIELD
from ...kernels.device import interpreted
from ...kernels.experts import reference
from ...kernels.experts.api import experts, grouped_experts, largest, route
from ...kernels.experts.config import (
    MOST_EXPERTS,
    MOST_LARGEST,
    MOST_PAIRS,
    MOST_WIDTH,
    Gate,
    Routing,
    Weights,
    grouped_refusal,
    refusal,
    routing_refusal,
)
from ...kernels.failures import Kernel, KernelFailedError, failure
from ...kernels.limits import HALF_PRECISION
from ...kernels.pointwise.api import Activation
from ...kernels.row_products.config import fuses_products
from .gated import products_here
from .norms import sum_of_experts
from .trial import (
    FusedKind,
    by_kernel,
    close,
    function_key,
    is_plain,
    names_in,
    own_result,
    random,
    runs_fused,
    settings,
    twin,
)

_COUNT, _HIDDEN, _INNER, _ROWS = 3, 32, 48, 18
_SCALES = torch.logspace(-3, 5, 9, base=2, device="cpu").repeat(2)[:, None]
"""Scales of tokens: large elements show limits of gates."""
_WEIGHTS, _BIASES = {"gate_up_proj", "down_proj"}, {"gate_up_proj_bias", "down_proj_bias"}
_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "_is_expert_parallel")
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
_SCALES_OF_SHARES, _GROUPS, _KEPT = ("routed_scaling_factor",), ("num_group", "n_group"), ("topk_group",)
_CORRECTION = "e_score_correction_bias"
_GROUPED = "grouped_mm"
_OF_TRANSFORMERS = (_GROUPED, "batched_mm")
"""Implementations that are replaced: transformers' choices, of which it takes one by default."""


class Form(NamedTuple):
    """The formula of a module, of whose weights `transposed` and `interleaved` are as of `Weights`."""

    transposed: bool
    interleaved: bool
    gate: Gate


def may_be(module: type[nn.Module]) -> bool:
    return hasattr(module, "_apply_gate") and "down_proj" in names_in(module)


def key(module: nn.Module) -> Hashable | None:
    flags = tuple(getattr(module, name, None) for name in _FLAGS)
    gated, biased, normed, _, _, split = flags
    names = _WEIGHTS | (_BIASES if biased else set())
    if not gated or normed or split or module._parameters.keys() != names or module._buffers:
        return None
    activation = module._modules.get("act_fn", vars(module).get("act_fn"))
    if module._modules.keys() - {"act_fn"} or (isinstance(activation, nn.Module) and not is_plain(activation)):
        return None
    of_module, of_activation = settings(module), settings(activation)
    if of_module is None or (activation is not None and of_activation is None):
        return None
    own: Any = type(module)
    return of_module, flags, of_activation, function_key(own._apply_gate)


def form_of(module: nn.Module) -> Form | None:
    transposed, interleaved = bool(module.is_transposed), not module.is_concatenated
    shapes = [(_COUNT, 2 * _INNER, _HIDDEN), (_COUNT, _HIDDEN, _INNER)]
    if transposed:
        shapes = [(count, width, columns) for count, columns, width in shapes]
    tensors = [random(*shape, seed=seed, dtype=torch.float32) / 4 for seed, shape in enumerate(shapes)]
    if module.has_bias:
        tensors += [random(_COUNT, width, seed=width, dtype=torch.float32) for width in (2 * _INNER, _HIDDEN)]
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    parts: dict[str, nn.Module | Tensor] = dict(zip(names, tensors, strict=False))
    small: Any = twin(module, **parts, **{name: part for name, part in module._modules.items() if part is not None})
    small.num_experts = _COUNT
    x = random(_ROWS, _HIDDEN, seed=6, dtype=torch.float32) * _SCALES
    shares, chosen = random(_ROWS, _COUNT, seed=7, dtype=torch.float32).topk(2)
    weights = _weights(small, transposed=transposed, interleaved=interleaved)
    inputs = random(_ROWS, 2 * _INNER, seed=8, dtype=torch.float32) * _SCALES
    inputs = torch.cat((inputs, inputs * max(_own(module, _LIMITS, 1.0))))
    opened = small._apply_gate(inputs)
    fits = (gate for gate in _gates(module) if close(opened, reference.opened(inputs, weights, gate)))
    if (gate := next(fits, None)) is None:
        return None
    found = inspect.unwrap(type(module).forward)(small, x, chosen, shares)
    expected = reference.experts(x, weights, chosen, shares, gate)
    return Form(transposed, interleaved, gate) if close(found, expected) else None


def computes_here(module: nn.Module) -> str | None:
    """The implementation of a layer's experts, where it is one that is replaced."""
    implementation = vars(getattr(module, "config", None) or object).get(EXPERTS_FIELD)
    return implementation if implementation in _OF_TRANSFORMERS else None


def weights_of(module: nn.Module, form: Form) -> Weights:
    """The weights of a layer's experts, whose form is known."""
    return _weights(module, transposed=form.transposed, interleaved=form.interleaved)


def _run(module: nn.Module, form: Form, *args: Any, **kwargs: Any) -> Tensor | None:
    implementation = computes_here(module)
    if implementation is None or len(args) != 3 or kwargs or not runs_fused(args[0]):
        return None
    x, chosen, shares = args
    weights = weights_of(module, form)
    if fuses_products() and refusal(x, weights, chosen, shares) is None:
        return sum_of_experts(experts(x, weights, chosen, shares, form.gate))
    if implementation == _GROUPED and grouped_refusal(x, weights, chosen, shares) is None:
        return grouped_experts(x, weights, chosen, shares, form.gate)
    return None


def _weights(module: Any, *, transposed: bool, interleaved: bool) -> Weights:
    biased = module.has_bias
    return Weights(
        module.gate_up_proj,
        module.down_proj,
        module.gate_up_proj_bias if biased else None,
        module.down_proj_bias if biased else None,
        transposed=transposed,
        interleaved=interleaved,
    )


def _gates(module: nn.Module) -> Iterator[Gate]:
    """Gates that may stand between the products, with the module's own limits and factors."""
    limits, alphas = _own(module, _LIMITS, inf), _own(module, _ALPHAS, 1.0)
    for activation, limit, offset in product(Activation, limits, (0.0, 1.0)):
        for alpha in alphas if activation is Activation.SILU else (1.0,):
            yield Gate(activation, alpha, limit, offset)


def _own(module: nn.Module, names: tuple[str, ...], default: float) -> set[float]:
    """The module's numbers of these names, and a default."""
    own: list[Any] = [vars(module).get(name) for name in names]
    return {default, *(number for number in own if type(number) in (int, float))}


EXPERTS = FusedKind("mixtures of experts", may_be, key, form_of, by_kernel(_run))


def _router_may_be(module: type[nn.Module]) -> bool:
    return {"topk", "linear"} <= set(names_in(module))


def _router_key(module: nn.Module) -> Hashable | None:
    weight, extra = module._parameters.get("weight"), {_CORRECTION}
    if weight is None or weight.dim() != 2 or module._parameters.keys() - {"weight", "bias"} - extra:
        return None
    if module._modules or module._buffers.keys() - extra or weight.shape[1] > MOST_WIDTH:
        return None
    of_module = settings(module)
    biased = module._parameters.get("bias") is not None, _correction(module) is not None
    return None if of_module is None or all(biased) else (of_module, tuple(weight.shape), biased)


def _correction(module: nn.Module) -> Tensor | None:
    """A correction that is added to a router's scores for the choice alone."""
    of_buffers, of_parameters = (found.get(_CORRECTION) for found in (module._buffers, module._parameters))
    return of_parameters if of_buffers is None else of_buffers


def _router_form_of(module: nn.Module) -> Routing | None:
    weight, bias, correction = module._parameters["weight"], module._parameters.get("bias"), _correction(module)
    assert weight is not None
    parts = {"weight": random(*weight.shape, seed=1) / 8}
    if bias is not None:
        parts["bias"] = random(*bias.shape, seed=2)
    if correction is not None:
        parts[_CORRECTION] = random(len(weight), seed=4, dtype=torch.float32)
    x = random(_ROWS, weight.shape[1], seed=3)
    found = own_result(twin(module, **parts), x)
    if not isinstance(found, tuple) or len(found) != 3 or found[2].dim() != 2:
        return None
    count = found[2].shape[1]
    if not 1 <= count <= MOST_LARGEST:
        return None
    found, given = _in_order(*found), parts.get("bias", parts.get(_CORRECTION))
    for routing in _routings(module, count, len(weight), wide=found[0].dtype == torch.float32):
        expected = _in_order(*reference.route(x, parts["weight"], given, routing))
        if all(close(one, other, rtol=1e-2) for one, other in zip(found, expected, strict=True)):
            return routing
    return None


def _in_order(scores: Tensor, shares: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Result of a router, with a row's experts in the order of their numbers: some leave it open."""
    chosen, order = chosen.sort(-1)
    return scores, shares.gather(-1, order), chosen


def _routings(module: nn.Module, count: int, experts: int, *, wide: bool) -> Iterator[Routing]:
    """Routings that may be a module's, with its own factors and groups."""
    groups, kept = (sorted(_own(module, names, 1)) for names in (_GROUPS, _KEPT))
    given = product(groups, kept, (False, True), (False, True), _own(module, _SCALES_OF_SHARES, 1.0))
    for of_all, of_row, first, whole, scale in given:
        if of_row <= of_all and experts % of_all == 0 and (first or of_all == 1):
            routing = Routing(count, first, whole, wide, scale, int(of_all), int(of_row))
            if _correction(module) is None:
                yield routing
            elif first:
                yield routing._replace(corrected=True)
                yield routing._replace(corrected=True, normed=True)


def _run_router(module: nn.Module, routing: Routing, *args: Any, **kwargs: Any) -> Any:
    products, weight = products_here(), module._parameters.get("weight")
    bias = _correction(module) if routing.corrected else module._parameters.get("bias")
    if products is None or not fuses_products() or len(args) != 1 or kwargs or weight is None:
        return None
    rows = args[0].reshape(-1, args[0].shape[-1])
    if not runs_fused(args[0]) or routing_refusal(rows, weight, bias, routing) is not None:
        return None
    return route(rows, weight, bias, routing, products.counters(rows.device))


ROUTERS = FusedKind("routers", _router_may_be, _router_key, _router_form_of, by_kernel(_run_router))


_DTYPES = (*HALF_PRECISION, torch.float32)


class LargestOfFew(TorchFunctionMode):
    """Context in which this thread's `torch.topk` of plain tensors on a GPU is the kernel, where that serves them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function in (torch.topk, Tensor.topk) and (served := _served(*args, **options)) is not None:
            try:
                return torch.return_types.topk(largest(*served))
            except KernelFailedError:
                pass
        return function(*args, **options)


def _served(
    input: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None
) -> tuple[Tensor, int] | None:
    """The kernel's arguments; None where it does not serve the call."""
    if type(input) is not Tensor or type(k) is not int or not largest or out is not None:
        return None
    if input.dim() != 2 or dim not in (1, -1) or not input.is_contiguous() or input.dtype not in _DTYPES:
        return None
    rows, columns = input.shape
    few = 1 <= k <= min(columns, MOST_LARGEST) and columns <= MOST_EXPERTS and 1 <= rows <= MOST_PAIRS
    if not few or not (input.is_cuda or interpreted()) or (torch.is_grad_enabled() and input.requires_grad):
        return None
    return (input, k) if failure(Kernel.EXPERTS, input.device) is None else None
