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

    def forward(self, x: Tensor, heads: int | None = None, *, in_range: bool = False) -> Tensor:
        """Multiply in fp32; on tensor cores fp32 factors keep 22 of their 24 bits, see `in_halves`.

        Args:
            x: ``[..., rows]``; with `heads` ``[batch, heads, queries, rows]``.
            heads: The columns are those of so many heads, and each head of `x` is multiplied by its own.
            in_range: All of `x` is in fp16's range.

        Returns:
            ``[..., columns]``; with `heads` ``[batch, heads, queries, columns / heads]``.
        """
        dtype = wide(x.dtype)
        with no_autocast(x.device):
            if takes_halves(x, self.values):
                return self._by_halves(x, heads, in_range)
            matrix = self.values.to(dtype) * self.scales.to(dtype)
            if heads is None:
                return x.to(dtype) @ matrix
            return torch.einsum("bhqe,ehd->bhqd", x.to(dtype), matrix.unflatten(1, (heads, -1)))

    def _by_halves(self, x: Tensor, heads: int | None, in_range: bool) -> Tensor:
        """`forward` on tensor cores: products of fp16 are exact, sums are in fp32, and the matrix is not copied."""
        parts, factor = in_halves(x, in_range=in_range)
        if heads is None:
            products, scales = torch.mm(parts.flatten(0, -2), self.values, out_dtype=torch.float32), self.scales
            products = products.unflatten(0, parts.shape[:-1])
        else:
            count, batch, _, queries, _ = parts.shape
            matrices = self.values.unflatten(1, (heads, -1)).transpose(0, 1)
            by_head = torch.bmm(parts.permute(2, 0, 1, 3, 4).flatten(1, 3), matrices, out_dtype=torch.float32)
            products = by_head.unflatten(1, (count, batch, queries)).permute(1, 2, 0, 3, 4)
            scales = self.scales.view(heads, 1, -1)
        out = of_halves(products) * scales
        return out if factor is None else out * factor


_REST = 2.0**11
"""Factor on the remainder of rounding to fp16, which keeps it among fp16's normal numbers."""


def takes_halves(x: Tensor, matrix: Tensor) -> bool:
    """Whether to multiply on tensor cores, with `x` split into fp16 parts, which TF32 cannot round either."""
    return x.is_cuda and matrix.dtype == torch.float16 and wide(x.dtype) == torch.float32 and not x.requires_grad


def in_halves(x: Tensor, *, in_range: bool = False) -> tuple[Tensor, Tensor | None]:
    """Split numbers into parts in fp16: one for fp16 and bf16, two for fp32, which keep 22 of 24 bits.

    Args:
        x: ``[..., width]``.
        in_range: All of it is in fp16's range, so that no row needs scaling.

    Returns:
        ``[parts, ..., width]`` in fp16, and the power of two that each row was divided by, ``[..., 1]`` in fp32; None
        where that was not needed.
    """
    if x.dtype == torch.float16:
        return x[None], None
    factor = None
    if not in_range:
        largest = x.abs().amax(-1, keepdim=True).float().clamp_min(2.0**-100)
        factor = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
        x = x / factor.to(x.dtype)
    coarse = x.to(torch.float16)
    if x.dtype == torch.bfloat16:
        return coarse[None], factor
    return torch.stack([coarse, ((x - coarse.to(x.dtype)) * _REST).to(torch.float16)]), factor


def of_halves(products: Tensor) -> Tensor:
    """Products of numbers, ``[..., columns]``, from those of their parts, ``[parts, ..., columns]``."""
    return products[0] if len(products) == 1 else torch.add(products[0], products[1], alpha=1 / _REST)
