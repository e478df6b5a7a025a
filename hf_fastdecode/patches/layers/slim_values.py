"""Values of a slim layer's cached keys and V-coordinates: the replacement of its value projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .stored_products import Product, sum_of_products, wide


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
        """``[..., rows]`` to ``[..., columns]`` in fp32, see `sum_of_products`."""
        return sum_of_products([self.product(x)])

    def product(self, x: Tensor) -> Product:
        """The operands of a product of `x` with this matrix."""
        return Product(x, self.values, self.scales)


class SlimValues(KeepsDtype):
    """Values from cached keys K and V-coordinates E: ``V = K M + E B + constant``.

    Caches hold one vector per token for all heads, since values of each head need the keys of all of them: keys less
    an offset, ``[rows, 1, tokens, e]``, and V-coordinates, ``[rows, 1, tokens, r]``, of width 0 for r = 0.

    Args:
        inputs: Width d of the layer's inputs.
        keys: Width e of the keys of all heads.
        values: Width e_v of the values of all heads.
        rank: Number r of V-coordinates.
        matrix_dtype: Dtype of M, of B, and of the projection to V-coordinates.
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
        """Keys and V-coordinates of tokens to be cached, before any rounding.

        Args:
            inputs: ``[rows, tokens, d]``.
            keys: ``[rows, tokens, e]`` as projected, in fp32.

        Returns:
            Keys and V-coordinates, as the class describes them, in fp32.
        """
        cached = keys - self.key_offset
        coordinates = cached[..., :0] if self.from_inputs is None else self.from_inputs(inputs)
        return cached[:, None], coordinates[:, None]

    def per_token(self, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values, ``[rows, tokens, e_v]`` in fp32, of cached keys and V-coordinates."""
        return self._values(keys[:, 0], coordinates[:, 0])

    def averaged(self, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values averaged per head, without making those of each token (Slim attention, eq. 2.1, option 2).

        Averages of the keys are as sensitive to rounding as the keys are, and stay in fp32 up to their product with M.

        Args:
            probabilities: ``[rows, heads, queries, tokens]``, in fp32; each row of them sums to 1.
            keys: Cached keys.
            coordinates: Cached V-coordinates.

        Returns:
            ``[rows, heads, queries, e_v / heads]``, fp32.
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

    def rotatable(self, keys: Tensor) -> Tensor:
        """Keys ``[rows, tokens, e]`` as they were before the offset, in fp32, for RoPE and scores."""
        return keys[:, 0].to(wide(keys.dtype)) + self.key_offset
