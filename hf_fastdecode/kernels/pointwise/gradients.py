"""Gradients of this folder's operators: those of their references, which are computed again in the backward pass.

The forward pass, and that of a checkpoint, is then one launch, and the inputs alone are kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Operator = Callable[..., Any]
"""Takes tensors, and returns one or a tuple of them."""


def differentiable(operator: Operator, reference: Operator, *inputs: Tensor) -> Any:
    """The operator's result, with the gradient of its reference if any input needs one."""
    if torch.is_grad_enabled() and any(one.requires_grad for one in inputs):
        return _WithGradient.apply(operator, reference, *inputs)
    return operator(*inputs)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, reference: Operator, *inputs: Tensor) -> Any:
        ctx.reference = reference
        ctx.save_for_backward(*inputs)
        return operator(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [one.detach().requires_grad_(needs) for one, needs in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.reference(*inputs)
        found = iter(torch.autograd.grad(outputs, [one for one in inputs if one.requires_grad], grads))
        return None, None, *(next(found) if needs else None for needs in needed)
