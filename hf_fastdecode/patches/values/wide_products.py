"""Matrix products that leave their accumulators in fp32, and modules that keep the dtype they were stored in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attention.autocast import no_autocast
from .projection import Projection
from .stored_products import Product, sum_of_products, wide


class KeyProjection(Projection):
    """A projection of keys whose result is not rounded to the model's dtype, which may be coarser than the cache's."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., e]`` in fp32, or in fp64 for fp64."""
        dtype = wide(x.dtype)
        with no_autocast(x.device):
            if x.is_cuda and x.dtype == self.weight.dtype != dtype and not torch.is_grad_enabled():
                out = torch.mm(x.flatten(0, -2), self.weight.mT, out_dtype=dtype).unflatten(0, x.shape[:-1])
                return out if self.bias is None else out + self.bias
            return F.linear(x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class KeepsDtype(nn.Module):
    """A module whose buffers follow the model to other devices, but keep their dtype when it is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)


class StoredMatrix(KeepsDtype):
    """A matrix as ``values * scales``, with a scale per column, that stays as it was rounded in conversion.

    Args:
        rows: Of the matrix.
        columns: Of the matrix.
        dtype: Of the values.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(rows, columns, dtype=dtype))
        self.register_buffer("scales", torch.ones(columns, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., rows]`` to ``[..., columns]`` in fp32, see `sum_of_products`."""
        return sum_of_products([self.product(x)])

    def product(self, x: Tensor) -> Product:
        """The operands of a product of `x` with this matrix."""
        return Product(x, self.values, self.scales)
