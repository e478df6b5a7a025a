"""This folder's operators with their gradients, which one launch computes from the inputs, all that is kept for it.

Where that kernel fails or does not serve the inputs, gradients are those of the reference, computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..failures import KernelFailedError
from ..limits import refused
from . import api, reference

Gradients = tuple[Tensor | None, ...]


class Operator(NamedTuple):
    """An operator of `api`, called with its tensors and, by name, how it computes."""

    run: Callable[..., Any]  # returns a tensor or a tuple of them
    reference: Callable[..., Any]
    backward: Callable[..., Gradients]  # given the results' gradients, which inputs need one, and what `run` is given
    linear: int = 0  # inputs, the first ones, in which it is linear, with results of their shapes

    def __call__(self, *inputs: Tensor, **how: Any) -> Any:
        if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
            return _WithGradient.apply(self, how, *inputs)
        return self.run(*inputs, **how)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, how: dict[str, Any], *inputs: Tensor) -> Any:
        ctx.operator, ctx.how = operator, how
        # The gradient of what is linear does not depend on it.
        left_out = operator.linear if not any(ctx.needs_input_grad[2 + operator.linear :]) else 0
        ctx.save_for_backward(*inputs[left_out:])
        return operator.run(*inputs, **how)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        needed, saved = ctx.needs_input_grad[2:], ctx.saved_tensors  # which checkpoints unpack once
        inputs = *grads[: len(needed) - len(saved)], *saved
        try:
            found = ctx.operator.backward(grads, needed, *inputs, **ctx.how)
        except (ValueError, KernelFailedError):
            found = _of_reference(ctx.operator.reference, grads, needed, *inputs, **ctx.how)
        return None, None, *found


def _of_reference(
    operator: Callable[..., Any], grads: tuple[Tensor, ...], needed: tuple[bool, ...], *inputs: Tensor, **how: Any
) -> Gradients:
    inputs = tuple(one.detach().requires_grad_(needs) for one, needs in zip(inputs, needed, strict=True))
    with torch.enable_grad():
        outputs = operator(*inputs, **how)
    found = iter(torch.autograd.grad(outputs, [one for one in inputs if one.requires_grad], grads))
    return tuple(next(found) if needs else None for needs in needed)


def _of_rms_norm(grads: tuple[Tensor], needed: tuple[bool, bool], x: Tensor, weight: Tensor, **how: Any) -> Gradients:
    return api.rms_norm_gradients(*grads, x, weight, **how, of_weight=needed[1])


def _of_rotate(
    grads: tuple[Tensor, Tensor],
    needed: tuple[bool, ...],
    queries: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    **how: Any,
) -> Gradients:
    if any(needed[2:]):
        raise refused("the kernel has no gradients of cosines and sines", cos, sin)
    of_queries, of_keys = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
    return *api.rotate(of_queries, of_keys, cos, sin, **how, backward=True), None, None


def _of_gated(grads: tuple[Tensor], needed: tuple[bool, bool], gate: Tensor, up: Tensor, **how: Any) -> Gradients:
    return api.gated_gradients(*grads, gate, up, **how)


rms_norm = Operator(api.rms_norm, reference.rms_norm, _of_rms_norm)
rotate = Operator(api.rotate, reference.rotate, _of_rotate, linear=2)
gated = Operator(api.gated, reference.gated, _of_gated)
