"""The error of the paper's own method, keys alone, beside those of the caches that conversion chooses from."""

from __future__ import annotations

import torch

from hf_fastdecode.conversion.fit.attention import bias_or_zero, key_heads, value_constant
from hf_fastdecode.conversion.fit.layer_plan import CacheError, CacheErrors
from hf_fastdecode.conversion.fit.value_coordinates import solve_key_to_value


class ErrorsOfPaper(CacheErrors):
    """Measures caches of one layer on one text, and keys as the paper caches them."""

    def unfitted_keys(self, dtype: torch.dtype) -> CacheError:
        """Keys before RoPE in `dtype`, and values ``K W_K^-1 W_V`` (Slim attention, equation 1.4), for comparison.

        Plan ``k`` is `value_coordinates` of rank 0 instead: keys minus their mean, and a matrix whose rounding is
        fitted to a text. Here the matrix is in fp64, so that only rounded keys make an error.

        Raises:
            ValueError: Keys do not determine the values, or come too near the end of the dtype's range.
        """
        weights = self.weights
        matrix = solve_key_to_value(weights.W_K, weights.W_V).matrix
        key_bias = bias_or_zero(weights.key_bias, weights.W_K)
        value_bias = bias_or_zero(weights.value_bias, weights.W_V)
        constant = value_constant(matrix, torch.zeros_like(key_bias), key_bias, value_bias)
        cached = self._checked("keys", self.keys, dtype)
        keys = key_heads(weights, cached, self.rotation)
        return self._measured("k", 0, self._bytes(cached.shape[1], dtype), keys, cached @ matrix + constant, dtype)
