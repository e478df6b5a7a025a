"""Base class of projections whose outputs also determine the values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Projection(nn.Module):
    """Linear layer that is no `nn.Linear`, so that quantizers and adapters leave it out.

    Rounding errors of its weight would be amplified in the values, and an adapter of keys would change the values too.

    Args:
        in_features: Width of the inputs.
        out_features: Width of the outputs.
        bias: Whether there is a bias.
    """

    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        linear = nn.Linear(in_features, out_features, bias=bias)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def as_linear(self) -> nn.Linear:
        """An `nn.Linear` that shares the parameters, which transformers knows how to initialise."""
        linear: Any = nn.Linear(1, 1, device=torch.device("meta"))
        linear.weight, linear.bias = self.weight, self.bias
        return linear

    def extra_repr(self) -> str:
        """As of `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
