"""Error of each candidate cache of a layer, measured on a calibration text in the cache's dtype.

Only cached numbers, and the matrices in the place of ``W_V``, are rounded. Queries, products and softmax are in fp64,
so that errors of different caches compare; kernels accumulate in fp32, which adds the same small error to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .cached_numbers import position_bytes, stored_bytes
from .reference_attention import attention_weights, key_heads, query_heads, weighted_values
from .rope import Rotation
from .stored_coordinates import KeyStatistics, cached_and_read, check_range, rounded, store_value_coordinates
from .value_coordinates import ValueCoordinates
from .weights import AttentionWeights, require_linear_scores, score_offset

PlanName = Literal["k", "k+r", "x", "e", "kv"]
"""Keys; keys and r V-coordinates; the layer's inputs; the encoder's output, for cross-attention; keys and values."""


@dataclass(frozen=True)
class CacheError:
    """Size and error of one cache of one layer.

    Attributes:
        plan, rank: What is cached, and V-coordinates beside the keys; 0 except for ``k+r``.
        bytes_per_token: Bytes per token in this layer, including scales of 8 bits and cached positions; 0 for ``e``,
            of which one copy serves all layers, outside the cache.
        value_error: Relative error of the values in the Frobenius norm.
        output_error: Relative error of the attention output behind ``W_O``, without its bias.
        dtype: Dtype of the cache, such as ``int8``; empty in reports written before this field existed.
    """

    plan: PlanName
    rank: int
    bytes_per_token: int
    value_error: float
    output_error: float
    dtype: str = ""


class CacheErrors:
    """Measures caches of one layer on one text: ``[tokens, d]``, the inputs of its projections.

    Cross-attention has `key_inputs` too, ``[keys, key_d]``. `rotation` is the RoPE of these tokens, or None; for
    `causal` and `score_bias` see `attention_weights`; with `unrotate`, keys with V-coordinates are cached after RoPE,
    beside their positions.
    """

    def __init__(
        self,
        weights: AttentionWeights,
        inputs: Tensor,
        key_inputs: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        causal: bool = True,
        score_bias: Tensor | None = None,
        unrotate: bool = False,
    ) -> None:
        self.weights, self.rotation, self.causal, self.score_bias = weights, rotation, causal, score_bias
        self.stored_rotation = rotation if unrotate else None
        self.cross = key_inputs is not None
        self.inputs = (inputs if key_inputs is None else key_inputs).double()
        self.query = query_heads(weights, inputs, rotation)
        self.keys, self.values = weights.keys(self.inputs), weights.values(self.inputs)
        self.output = self._output(key_heads(weights, self.keys, rotation), self.values)

    def ordinary(self, dtype: torch.dtype) -> CacheError:
        """Keys, after RoPE, and values in `dtype`: transformers' own cache."""
        value_dim = self.values.shape[1] // self.weights.kv_heads
        keys = rounded(key_heads(self.weights, self.keys, self.rotation), dtype, self.weights.head_dim)
        size = self._bytes(self.keys.shape[1], dtype) + stored_bytes(self.values.shape[1], dtype, value_dim)
        return self._measured("kv", 0, size, keys, rounded(self.values, dtype, value_dim), dtype)

    def value_coordinates(
        self,
        statistics: KeyStatistics,
        rank: int,
        dtype: torch.dtype,
        *,
        matrix_dtype: torch.dtype | None = None,
    ) -> CacheError:
        """Keys, before RoPE or after it, and `rank` V-coordinates in `dtype`.

        Matrices are in `matrix_dtype`; when None in fp16 beside caches of at most two bytes a number, else in fp32.

        Raises:
            ValueError: Cached numbers come too near the end of the dtype's range, or `rank` is out of its bounds.
        """
        if matrix_dtype is None:
            matrix_dtype = torch.float16 if dtype.itemsize <= 2 else torch.float32
        stored = store_value_coordinates(self.weights, statistics, rank, matrix_dtype=matrix_dtype).double()
        keys = stored.cached_keys(self.weights, self.inputs)
        cached = cached_and_read(keys, dtype, self.weights.head_dim, self.stored_rotation)
        coordinates = self._checked("V-coordinates", stored.coordinates(self.inputs), dtype)
        size = self._bytes(cached.shape[1], dtype) + self._bytes(rank, dtype)
        if self.stored_rotation is not None:
            size += position_bytes(dtype)
        plan: PlanName = "k+r" if rank else "k"
        values = stored.values(cached, coordinates)
        return self._measured(plan, rank, size, self._scored(stored, cached), values, dtype)

    def of_inputs(self, dtype: torch.dtype) -> CacheError:
        """The layer's inputs in `dtype`; for cross-attention the encoder's output.

        Raises ValueError where RoPE or QK-norm stands before the scores, or inputs come too near the end of its range.
        """
        weights = self.weights
        require_linear_scores(weights, self.rotation)
        cached = self._checked("inputs", self.inputs, dtype)
        plan: PlanName = "e" if self.cross else "x"
        size = 0 if self.cross else self._bytes(cached.shape[1], dtype)
        keys = key_heads(weights, weights.keys(cached))
        return self._measured(plan, 0, size, keys, weights.values(cached), dtype)

    def _scored(self, stored: ValueCoordinates, cached: Tensor) -> Tensor:
        offset = score_offset(self.weights, stored.key_offset, self.rotation)
        return key_heads(self.weights, cached if offset is None else cached + offset, self.rotation)

    def _checked(self, name: str, cached: Tensor, dtype: torch.dtype) -> Tensor:
        check_range(name, cached, dtype)
        return rounded(cached, dtype, self.weights.head_dim)

    def _bytes(self, width: int, dtype: torch.dtype) -> int:
        return stored_bytes(width, dtype, self.weights.head_dim)

    def _output(self, keys: Tensor, values: Tensor) -> Tensor:
        probabilities = attention_weights(
            self.query, keys, self.weights.score_scale, causal=self.causal, score_bias=self.score_bias
        )
        return weighted_values(probabilities, values, self.weights.kv_heads) @ self.weights.W_O

    def _measured(
        self, plan: PlanName, rank: int, size: int, keys: Tensor, values: Tensor, dtype: torch.dtype
    ) -> CacheError:
        errors = relative_error(values, self.values), relative_error(self._output(keys, values), self.output)
        return CacheError(plan, rank, size, *errors, dtype=dtype_name(dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype, such as ``int8``."""
    return str(dtype).removeprefix("torch.")


def relative_error(value: Tensor, oracle: Tensor) -> float:
    """``|value - oracle| / |oracle|`` in the Frobenius norm; 0 where both are all zeros."""
    norm = torch.linalg.norm(oracle)
    error = torch.linalg.norm(value - oracle)
    return (error / norm).item() if norm > 0 else error.item()
