"""Gated feed-forward modules, ``down(activation(gate(x)) * up(x))``, and the products of few rows that they share.

`RowProducts` reads each weight in one launch (`kernels.row_products`), for the projections of captured steps too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import uncompiled_call
from ...instance_methods import is_linear
from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import Activation
from ...kernels.pointwise.gradients import gated
from ...kernels.row_products.config import refusal
from .trial import (
    TRIED_IN,
    FusedKind,
    is_plain,
    linear,
    matching,
    names_in,
    own_result,
    random,
    runs_fused,
    settings,
    twin,
)

_WIDTH, _HIDDEN = 32, 48
_SCALES = torch.logspace(-3, 5, 9, base=2, device="cpu").to(TRIED_IN)[:, None]
"""Scales of tokens: large elements show limits of activations."""
_APART, _TOGETHER = frozenset({"gate_proj", "up_proj", "down_proj"}), frozenset({"gate_up_proj", "down_proj"})
_ACTIVATIONS = ("act_fn", "activation_fn")


def may_be(module: type[nn.Module]) -> bool:
    return "down_proj" in names_in(module)


def key(module: nn.Module) -> Hashable | None:
    names, activation = module._modules.keys() - _ACTIVATIONS, _activation(module)
    if names not in (_APART, _TOGETHER) or module._parameters or module._buffers or not _may_be_replaced(activation):
        return None
    of_module, of_activation = settings(module), settings(activation)
    if of_module is None or of_activation is None:
        return None
    return of_module, frozenset(names), of_activation


def form_of(module: nn.Module) -> Activation | None:
    together = "gate_up_proj" in module._modules
    parts: dict[str, nn.Module] = {"down_proj": linear(_HIDDEN, _WIDTH, seed=3)}
    if together:
        parts["gate_up_proj"] = linear(_WIDTH, 2 * _HIDDEN, seed=4)
    else:
        parts |= {"gate_proj": linear(_WIDTH, _HIDDEN, seed=4), "up_proj": linear(_WIDTH, _HIDDEN, seed=5)}
    kept = {name: part for name, part in module._modules.items() if name in _ACTIVATIONS and part is not None}
    small, x = twin(module, **parts, **kept), random(2, 9, _WIDTH, seed=6) * _SCALES
    found = own_result(small, x)
    gate, up = _projected(small, x)
    forms = ((form, parts["down_proj"](reference.gated(gate, up, form))) for form in Activation)
    return matching(found, forms)


def _run(module: nn.Module, activation: Activation, own: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    plain = is_plain(module) and _activation(module) is own and _may_be_replaced(own)
    if args or kwargs or not runs_fused(x, differentiable=True) or not plain:
        return uncompiled_call(module, x, *args, **kwargs)
    down: Any = module.down_proj
    if (hidden := _product(module, activation, x)) is not None:
        return down(hidden)
    gate, up = _projected(module, x)
    if not (type(gate) is type(up) is Tensor and gate.dtype == up.dtype == x.dtype and gate.shape == up.shape):
        return uncompiled_call(module, x)
    try:
        hidden = gated(gate, up, activation=activation)
    except KernelFailedError:
        return uncompiled_call(module, x)
    return down(hidden)


def _product(module: nn.Module, activation: Activation, x: Tensor) -> Tensor | None:
    """The input of `down_proj`, computed in one launch; None where projections are not plain or rows are many."""
    if (products := products_here()) is None:
        return None
    gate, up = (module._modules.get(name) for name in ("gate_proj", "up_proj"))
    if not (is_linear(gate) and is_linear(up)):
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


GATED = FusedKind(
    "gated activations", may_be, key, form_of, lambda module, form: partial(_run, module, form, _activation(module))
)


class RowProducts:
    """Products of a pass, or of its capture.

    Where parts of a product are added up within a launch, the launches of a stream count in the same memory by turns.
    A capture has memory of its own, which each replay sets to zero.
    """

    def __init__(self) -> None:
        self._arrived: dict[tuple[torch.cuda.Stream, bool], Tensor] = {}

    @contextmanager
    def here(self) -> Iterator[None]:
        """Context in which `products_here` returns these."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def linears(
        self, inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> list[Tensor] | None:
        """`F.linear` of one input by several weights; None where the kernel does not serve them."""
        if refusal(inputs, weights, biases) is not None:
            return None
        from ...kernels.row_products.api import row_products

        with suppress(KernelFailedError):
            return row_products(inputs, weights, biases, self.counters(inputs.device))
        return None

    def gated(
        self,
        inputs: Tensor,
        weights: tuple[Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None],
        activation: Activation,
    ) -> Tensor | None:
        """``activation(F.linear(inputs, gate)) * F.linear(inputs, up)``; None where the kernel does not serve them."""
        if refusal(inputs, weights, biases) is not None or weights[0].shape != weights[1].shape:
            return None
        from ...kernels.row_products.api import gated_product

        with suppress(KernelFailedError):
            return gated_product(inputs, *weights, biases, activation, self.counters(inputs.device))
        return None

    def counters(self, device: torch.device) -> Tensor | None:
        """Arrival counters of launches on the current stream; None without a GPU."""
        from ...kernels.device import counters

        if device.type != "cuda":
            return None
        key = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
        if (arrived := self._arrived.get(key)) is None:
            arrived = self._arrived[key] = counters(device)
        return arrived


# Of this thread's pass.
_active: ContextVar[RowProducts | None] = ContextVar("hf_fastdecode_products", default=None)


def products_here() -> RowProducts | None:
    """The products of this thread's pass, if any."""
    return _active.get()
