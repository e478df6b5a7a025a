"""Products with stored matrices on tensor cores, which take fp16: fp32 factors are split into two parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.active_passes import no_autocast
from ...kernels.failures import Kernel, KernelFailedError, failure

_REST = 2.0**11
"""Factor on the remainder of rounding to fp16, which keeps it among fp16's normal numbers."""


class Product(NamedTuple):
    """Operands of a product with a stored matrix.

    Attributes:
        factor: ``[..., width]``; ``[batch, heads, queries, width]`` where heads have their own columns.
        matrix: ``[width, columns]``.
        scales: ``[columns]`` fp32: the matrix is ``matrix * scales``.
    """

    factor: Tensor
    matrix: Tensor
    scales: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products of `dtype` accumulate in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def sum_of_products(
    products: Sequence[Product], constant: Tensor | None = None, heads: int | None = None, *, in_range: bool = False
) -> Tensor:
    """Multiply and add up in fp32, or in fp64 for fp64; on tensor cores fp32 factors keep 22 of their 24 bits.

    Args:
        products: One or more, with factors of one dtype.
        constant: ``[columns]`` fp32, to be added.
        heads: Number of heads that the columns belong to, if each head of a factor is multiplied by its own columns.
        in_range: Whether all factors are in fp16's range.

    Returns:
        ``[..., columns]``; with `heads` ``[batch, heads, queries, columns / heads]``.
    """
    first = products[0].factor
    dtype = wide(first.dtype)
    with no_autocast(first.device):
        if all(takes_halves(factor, matrix) for factor, matrix, _ in products):
            factors, matrices, scales = zip(*products, strict=True)
            by_group = [_by_group(factor, heads) for factor in factors]
            # The operator takes a tenth of a millisecond that only compiled code has to spend.
            product = torch.ops.hf_fastdecode.stored_products if torch.compiler.is_compiling() else _products
            out = product(by_group, matrices, scales, constant, in_range)
            columns = out.shape[1]
            if heads is None:
                return out.view(*first.shape[:-1], columns)
            return out.view(first.shape[0], first.shape[2], heads, columns // heads).transpose(1, 2)
        total: Tensor | None = None
        for factor, matrix, scale in products:
            scaled = matrix.to(dtype) * scale.to(dtype)
            if heads is None:
                one = factor.to(dtype) @ scaled
            else:
                one = torch.einsum("bhqe,ehd->bhqd", factor.to(dtype), scaled.unflatten(1, (heads, -1)))
            total = one if total is None else total + one
        assert total is not None
        if constant is None:
            return total
        return total + (constant if heads is None else constant.unflatten(0, (heads, 1, -1)))


def takes_halves(factor: Tensor, matrix: Tensor) -> bool:
    """Whether to multiply on tensor cores, with factors split into fp16 parts, which TF32 does not round."""
    narrow = wide(factor.dtype) == torch.float32
    return factor.is_cuda and matrix.dtype == torch.float16 and narrow and not factor.requires_grad


def _by_group(factor: Tensor, heads: int | None) -> Tensor:
    """``[rows, groups, width]`` of a factor; there is one group without heads."""
    if heads is None:
        return factor.reshape(-1, 1, factor.shape[-1])
    return factor.transpose(1, 2).reshape(-1, heads, factor.shape[-1])


def _products(
    factors: Sequence[Tensor],
    matrices: Sequence[Tensor],
    scales: Sequence[Tensor],
    constant: Tensor | None,
    in_range: bool,
) -> Tensor:
    """``[rows, columns]`` fp32 of factors ``[rows, groups, width]``: by a kernel for few rows, else by PyTorch's."""
    if factors[0].numel() == 0:
        return factors[0].new_empty(0, matrices[0].shape[1], dtype=torch.float32)
    products = [Product(*given) for given in zip(factors, matrices, scales, strict=True)]
    if (found := _by_kernel(products, constant, in_range)) is not None:
        return found
    total = sum(by_halves(product, in_range=in_range) for product in products)
    assert isinstance(total, Tensor)
    return total if constant is None else total + constant


# An operator of its own, because torch.compile keeps fp32 where code rounds to fp16: a factor less its rounded self
# would be 0.
_stored_products = torch.library.custom_op(
    "hf_fastdecode::stored_products",
    _products,
    mutates_args=(),
    schema="(Tensor[] factors, Tensor[] matrices, Tensor[] scales, Tensor? constant, bool in_range) -> Tensor",
)


@_stored_products.register_fake
def _traced_stored_products(
    factors: Sequence[Tensor],
    matrices: Sequence[Tensor],
    scales: Sequence[Tensor],
    constant: Tensor | None,
    in_range: bool,
) -> Tensor:
    return factors[0].new_empty(factors[0].shape[0], matrices[0].shape[1], dtype=torch.float32)


def _by_kernel(products: Sequence[Product], constant: Tensor | None, in_range: bool) -> Tensor | None:
    device = products[0].factor.device
    if failure(Kernel.PRODUCT, device) is not None:
        return None
    from ...kernels.stored_product.api import MOST_ROWS, MOST_TERMS, Term, stored_product

    if len(products[0].factor) > MOST_ROWS or len(products) > MOST_TERMS:
        return None
    try:
        return stored_product([Term(*product) for product in products], constant, in_range=in_range)
    except KernelFailedError:  # from now on a reason
        return None


def by_halves(product: Product, *, in_range: bool) -> Tensor:
    """``[rows, columns]`` fp32 of a factor ``[rows, groups, width]``, whose parts are multiplied without error."""
    parts, row_scale = in_halves(product.factor, in_range=in_range)
    count, rows, groups, _ = parts.shape
    by_group = parts.permute(2, 0, 1, 3).flatten(1, 2)  # [groups, parts * rows, width]
    if groups == 1:
        found = torch.mm(by_group[0], product.matrix, out_dtype=torch.float32)[None]
    else:
        matrices = product.matrix.unflatten(1, (groups, -1)).transpose(0, 1)
        found = torch.bmm(by_group, matrices, out_dtype=torch.float32)
    out = from_halves(found.unflatten(1, (count, rows)).permute(1, 2, 0, 3))  # [rows, groups, columns / groups]
    return ((out if row_scale is None else out * row_scale).flatten(1)) * product.scales


def in_halves(x: Tensor, *, in_range: bool = False) -> tuple[Tensor, Tensor | None]:
    """Split numbers into parts in fp16: one for fp16 and bf16, two for fp32, which keep 22 of 24 bits.

    Args:
        x: ``[..., width]``.
        in_range: Whether all of it is in fp16's range, so that no row needs scaling.

    Returns:
        ``[parts, ..., width]`` in fp16, and the power of two that each row was divided by, ``[..., 1]`` in fp32, or
        None where rows were not scaled.
    """
    if x.dtype == torch.float16:
        return x[None], None
    row_scale = None
    if not in_range:
        largest = x.abs().amax(-1, keepdim=True).float().clamp_min(2.0**-100)
        row_scale = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)  # the exponent alone
        x = x / row_scale.to(x.dtype)
    coarse = x.to(torch.float16)
    if x.dtype == torch.bfloat16:
        return coarse[None], row_scale
    return torch.stack([coarse, ((x - coarse.to(x.dtype)) * _REST).to(torch.float16)]), row_scale


def from_halves(products: Tensor) -> Tensor:
    """Products of numbers, ``[..., columns]``, from those of their parts, ``[parts, ..., columns]``."""
    return products[0] if len(products) == 1 else torch.add(products[0], products[1], alpha=1 / _REST)
