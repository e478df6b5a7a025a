"""Values of a slim layer's cached keys and V-coordinates: the replacement of its value projection.

Products with stored matrices run on tensor cores, which take fp16: fp32 factors are split into two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.overrides import no_autocast
from ...kernels.failures import Kernel, KernelFailedError, failure

_REMAINDER = 2.0**11
"""Factor on the remainder of rounding to fp16, which keeps it among fp16's normal values."""


class Product(NamedTuple):
    """Operands of a product with a stored matrix, ``matrix * scales``.

    The factor is ``[..., width]``, or ``[batch, heads, queries, width]`` where heads have separate columns; the matrix
    ``[width, columns]``, its scales ``[columns]`` fp32.
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

    All factors have one dtype, and with `in_range` are in fp16's range; the constant is ``[columns]`` fp32. Returns
    ``[..., columns]``; with `heads`, where each head of a factor is multiplied by the columns of that head,
    ``[batch, heads, queries, columns / heads]``.
    """
    first = products[0].factor
    with no_autocast(first.device):
        if all(takes_halves(factor, matrix) for factor, matrix, _ in products):
            factors, matrices, scales = zip(*products, strict=True)
            by_group = [_by_group(factor, heads) for factor in factors]
            # The operator takes a tenth of a millisecond that only compiled code has to spend.
            product = torch.ops.hf_fastdecode.stored_products if torch.compiler.is_compiling() else _products
            out = product(by_group, matrices, scales, constant, in_range)
            if heads is None:
                return out.view(*first.shape[:-1], out.shape[1])
            return out.view(first.shape[0], first.shape[2], heads, out.shape[1] // heads).transpose(1, 2)
        dtype, terms = wide(first.dtype), list[Tensor]()
        for factor, matrix, scale in products:
            scaled, wider = matrix.to(dtype) * scale.to(dtype), factor.to(dtype)
            if heads is None:
                terms.append(wider @ scaled)
            else:
                terms.append(torch.einsum("bhqe,ehd->bhqd", wider, scaled.unflatten(1, (heads, -1))))
        total = reduce(add, terms)  # sum() would add 0 to the first, by a kernel
        if constant is None:
            return total
        return total + (constant if heads is None else constant.unflatten(0, (heads, 1, -1)))


def takes_halves(factor: Tensor, matrix: Tensor) -> bool:
    """Whether to multiply on tensor cores, with factors split into fp16 parts, which TF32 does not round."""
    narrow = wide(factor.dtype) == torch.float32
    return factor.is_cuda and matrix.dtype == torch.float16 and narrow and not factor.requires_grad


def _by_group(factor: Tensor, heads: int | None) -> Tensor:
    """``[rows, groups, width]`` of a factor; one group without heads."""
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
    total = reduce(add, (by_halves(product, in_range=in_range) for product in products))
    return total if constant is None else total + constant


# A separate operator, because torch.compile keeps fp32 where code rounds to fp16: a factor less its rounded self
# would be 0.
_stored_products = torch.library.custom_op(
    "hf_fastdecode::stored_products",
    _products,
    mutates_args=(),
    schema="(Tensor[] factors, Tensor[] matrices, Tensor[] scales, Tensor? constant, bool in_range) -> Tensor",
)
_stored_products.register_fake(
    lambda factors, matrices, *_: factors[0].new_empty(factors[0].shape[0], matrices[0].shape[1], dtype=torch.float32)
)


def _by_kernel(products: Sequence[Product], constant: Tensor | None, in_range: bool) -> Tensor | None:
    device = products[0].factor.device
    if failure(Kernel.PRODUCT, device) is not None:
        return None
    from ...kernels.stored_product import MOST_ROWS, MOST_TERMS, Term, stored_product

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
    """Split ``[..., width]`` into parts in fp16: one for fp16 and bf16, two for fp32, which keep 22 of 24 bits.

    Returns ``[parts, ..., width]``, and the power of two that each row was divided by, ``[..., 1]`` in fp32, or None
    where rows were not scaled, as `in_range` ones, which are in fp16's range, need not be.
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
    return torch.stack([coarse, ((x - coarse.to(x.dtype)) * _REMAINDER).to(torch.float16)]), row_scale


def from_halves(products: Tensor) -> Tensor:
    """Products of elements, ``[..., columns]``, from those of their parts, ``[parts, ..., columns]``."""
    return products[0] if len(products) == 1 else torch.add(products[0], products[1], alpha=1 / _REMAINDER)


class KeepsDtype(nn.Module):
    """A module whose buffers follow the model to other devices, but keep their dtype when it is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)


class StoredMatrix(KeepsDtype):
    """A matrix ``[rows, columns]`` as ``values * scales``, with a scale per column, as conversion rounded it."""

    values: Tensor
    scales: Tensor

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(rows, columns, dtype=dtype))
        self.register_buffer("scales", torch.ones(columns, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return sum_of_products([self.product(x)])

    def product(self, x: Tensor) -> Product:
        return Product(x, self.values, self.scales)


class SlimValues(KeepsDtype):
    """Values from cached keys K and V-coordinates E: ``V = K M + E B + constant``.

    Caches hold one vector per token for all heads, since values of each head need the keys of all of them: keys less
    an offset, ``[rows, 1, tokens, e]``, and V-coordinates, ``[rows, 1, tokens, r]``, of width 0 for r = 0. `inputs` is
    the width d of the layer's inputs, `keys` e, `values` e_v and `rank` r; M, B and the projection to V-coordinates
    are in `matrix_dtype`.
    """

    key_offset: Tensor
    constant: Tensor

    def __init__(self, inputs: int, keys: int, values: int, rank: int, matrix_dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("key_offset", torch.zeros(keys, dtype=torch.float32))
        self.register_buffer("constant", torch.zeros(values, dtype=torch.float32))
        self.from_keys = StoredMatrix(keys, values, matrix_dtype)
        self.from_inputs = StoredMatrix(inputs, rank, matrix_dtype) if rank else None
        self.directions = StoredMatrix(rank, values, matrix_dtype) if rank else None

    def to_cache(self, inputs: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and V-coordinates of tokens to be cached, in fp32 before any rounding.

        Of inputs ``[rows, tokens, d]``, and of their keys as projected, ``[rows, tokens, e]`` in fp32.
        """
        cached = keys - self.key_offset
        coordinates = cached[..., :0] if self.from_inputs is None else self.from_inputs(inputs)
        return cached[:, None], coordinates[:, None]

    def per_token(self, keys: Tensor, coordinates: Tensor) -> Tensor:
        return self._values(keys[:, 0], coordinates[:, 0])

    def averaged(self, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values averaged per head, ``[rows, heads, queries, e_v / heads]``, without making those of each token (eq.
        2.1).

        The weights, ``[rows, heads, queries, tokens]`` in fp32, sum to 1. Averages of the keys are as sensitive to
        rounding as the keys are, and stay in fp32 up to their product with M.
        """
        heads = probabilities.shape[1]
        flat = probabilities.flatten(1, 2)  # [rows, heads * queries, tokens]: all heads average the keys of all heads
        of_keys, of_coordinates = (
            (flat @ part[:, 0].to(flat.dtype)).unflatten(1, (heads, -1)) for part in (keys, coordinates)
        )
        return self.of_averages(of_keys, of_coordinates, keys.dtype)

    def of_averages(self, keys: Tensor, coordinates: Tensor, stored: torch.dtype) -> Tensor:
        """Averaged values ``[rows, heads, queries, e_v / heads]`` of averaged keys and V-coordinates, all in fp32.

        `stored` is the dtype of the cached keys: averages of fp16 are in fp16's range.
        """
        return self._values(keys, coordinates, keys.shape[1], in_range=stored == torch.float16)

    def _values(
        self, keys: Tensor, coordinates: Tensor, heads: int | None = None, *, in_range: bool = False
    ) -> Tensor:
        products = [self.from_keys.product(keys)]
        if self.directions is not None:
            products.append(self.directions.product(coordinates))
        return sum_of_products(products, self.constant, heads, in_range=in_range)
