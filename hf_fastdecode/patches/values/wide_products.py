"""Matrix products that leave their accumulators in fp32, and modules that keep the dtype they were stored in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...attention.autocast import no_autocast


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of `dtype` accumulate in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class KeyProjection(nn.Linear):
    """A projection of keys whose result is not rounded to the model's dtype, which may be coarser than the cache's."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d]`` to ``[..., e]`` in fp32, or in fp64 for fp64."""
        dtype = wide(x.dtype)
        if type(self.weight) is not nn.Parameter:  # a quantizer's, which multiplies by itself
            return F.linear(x, self.weight, self.bias).to(dtype)
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

    def forward(self, x: Tensor, heads: int | None = None) -> Tensor:
        """Multiply, with nothing rounded to less than fp32.

        Args:
            x: ``[..., rows]``; with `heads` ``[batch, heads, queries, rows]``.
            heads: The columns are those of so many heads, and each head of `x` is multiplied by its own.

        Returns:
            ``[..., columns]``; with `heads` ``[batch, heads, queries, columns / heads]``.
        """
        dtype = wide(x.dtype)
        with no_autocast(x.device):
            if accumulates_halves(x, self.values):
                return self._of_halves(x, heads)
            matrix = self.values.to(dtype) * self.scales.to(dtype)
            if heads is None:
                return x.to(dtype) @ matrix
            return torch.einsum("bhqe,ehd->bhqd", x.to(dtype), matrix.unflatten(1, (heads, -1)))

    def _of_halves(self, x: Tensor, heads: int | None) -> Tensor:
        """`forward` by tensor cores, whose products are exact and whose sums are in fp32, without a matrix in fp32."""
        if heads is None:
            return torch.mm(x.flatten(0, -2), self.values, out_dtype=torch.float32).unflatten(0, x.shape[:-1]) * (
                self.scales
            )
        batch, _, queries, _ = x.shape
        matrices = self.values.unflatten(1, (heads, -1)).transpose(0, 1)
        out = torch.bmm(x.transpose(0, 1).flatten(1, 2), matrices, out_dtype=torch.float32)
        return out.unflatten(1, (batch, queries)).transpose(0, 1) * self.scales.view(heads, 1, -1)


def accumulates_halves(x: Tensor, matrix: Tensor) -> bool:
    """Whether a product of these leaves its fp32 accumulators, without copies in fp32."""
    return x.is_cuda and x.dtype == matrix.dtype == torch.float16 and not torch.is_grad_enabled()
