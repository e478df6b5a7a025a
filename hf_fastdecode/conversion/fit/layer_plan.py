"""Plan of a layer: its smallest cache within the requested tolerance.

The error of each candidate is measured on a calibration text in the cache's dtype. Only cached elements, and the
matrices in the place of ``W_V``, are rounded. Queries, products and softmax are in fp64, so that errors of different
caches compare; kernels accumulate in fp32, which adds the same small error to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .attention import (
    AttentionInputs,
    AttentionWeights,
    attention_weights,
    key_heads,
    query_heads,
    require_linear_scores,
    weighted_values,
)
from .cached_numbers import EIGHT_BITS, position_bytes, stored_bytes
from .value_coordinates import (
    KeyStatistics,
    KeyToValue,
    cached_and_read,
    check_range,
    key_statistics,
    matrix_dtype,
    rounded,
    store_value_coordinates,
)

PlanName = Literal["k", "k+r", "x", "e", "kv"]
"""Keys; keys and r V-coordinates; the layer's inputs; the encoder's output, for cross-attention; keys and values."""


@dataclass(frozen=True)
class CacheError:
    """Size and error of one cache of one layer; `rank` counts V-coordinates beside the keys, for ``k+r``.

    Bytes per token are of this layer, with scales of 8 bits and cached positions; 0 for ``e``, of which one copy
    serves all layers, outside the cache. Errors are relative, in the Frobenius norm, of the values and of the
    attention output after ``W_O``, without its bias. The dtype of the cache is empty in reports written before this
    field existed.
    """

    plan: PlanName
    rank: int
    bytes_per_token: int
    value_error: float
    output_error: float
    dtype: str = ""


class CacheErrors:
    def __init__(self, weights: AttentionWeights, text: AttentionInputs) -> None:
        self.weights, self.text, self.rotation = weights, text, text.rotation
        self.inputs = text.key_inputs.double()
        self.query = query_heads(weights, text.inputs, text.rotation)
        self.keys, self.values = weights.keys(self.inputs), weights.values(self.inputs)
        self.output = self._output(key_heads(weights, self.keys, text.rotation), self.values)

    def ordinary(self, dtype: torch.dtype) -> CacheError:
        """Keys, after RoPE, and values in `dtype`: transformers' cache."""
        value_dim = self.values.shape[1] // self.weights.heads
        keys = rounded(key_heads(self.weights, self.keys, self.rotation), dtype, self.weights.head_dim)
        size = self._bytes(self.keys.shape[1], dtype) + stored_bytes(self.values.shape[1], dtype, value_dim)
        return self._measured("kv", 0, size, keys, rounded(self.values, dtype, value_dim), dtype)

    def value_coordinates(
        self, statistics: KeyStatistics, rank: int, dtype: torch.dtype, *, matrix_dtype: torch.dtype | None = None
    ) -> CacheError:
        """Keys, before RoPE or after it, and `rank` V-coordinates in `dtype`.

        Matrices are in `matrix_dtype`; when None in fp16 beside caches of at most two bytes an element, else in fp32.
        ValueError where elements come too near the end of the dtype's range, or `rank` is out of its bounds.
        """
        if matrix_dtype is None:
            matrix_dtype = torch.float16 if dtype.itemsize <= 2 else torch.float32
        stored = store_value_coordinates(self.weights, statistics, rank, matrix_dtype=matrix_dtype).double()
        keys = stored.cached_keys(self.weights, self.inputs)
        cached = cached_and_read(keys, dtype, self.weights.head_dim, self.text.stored_rotation)
        coordinates = self._checked("V-coordinates", stored.coordinates(self.inputs), dtype)
        size = self._bytes(cached.shape[1], dtype) + self._bytes(rank, dtype)
        if self.text.stored_rotation is not None:
            size += position_bytes(dtype)
        scored = key_heads(self.weights, cached + stored.key_offset, self.rotation)
        return self._measured("k+r" if rank else "k", rank, size, scored, stored.values(cached, coordinates), dtype)

    def of_inputs(self, dtype: torch.dtype) -> CacheError:
        """The layer's inputs in `dtype`; for cross-attention the encoder's output.

        Raises ValueError where RoPE or QK-norm stands before the scores, or inputs come too near the end of its range.
        """
        weights = self.weights
        require_linear_scores(weights, self.rotation)
        cached = self._checked("inputs", self.inputs, dtype)
        keys, values = key_heads(weights, weights.keys(cached)), weights.values(cached)
        if self.text.encoded is not None:
            return self._measured("e", 0, 0, keys, values, dtype)
        return self._measured("x", 0, self._bytes(cached.shape[1], dtype), keys, values, dtype)

    def _checked(self, name: str, cached: Tensor, dtype: torch.dtype) -> Tensor:
        check_range(name, cached, dtype)
        return rounded(cached, dtype, self.weights.head_dim)

    def _bytes(self, width: int, dtype: torch.dtype) -> int:
        return stored_bytes(width, dtype, self.weights.head_dim)

    def _output(self, keys: Tensor, values: Tensor) -> Tensor:
        causal, bias = self.text.encoded is None, self.text.score_bias
        probabilities = attention_weights(self.query, keys, self.weights.score_scale, causal=causal, score_bias=bias)
        return weighted_values(probabilities, values) @ self.weights.W_O

    def _measured(
        self, plan: PlanName, rank: int, size: int, keys: Tensor, values: Tensor, dtype: torch.dtype
    ) -> CacheError:
        errors = relative_error(values, self.values), relative_error(self._output(keys, values), self.output)
        return CacheError(plan, rank, size, *errors, dtype=dtype_name(dtype))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def relative_error(value: Tensor, oracle: Tensor) -> float:
    """``|value - oracle| / |oracle|`` in the Frobenius norm; 0 where both are all zeros."""
    norm = torch.linalg.norm(oracle)
    error = torch.linalg.norm(value - oracle)
    return (error / norm).item() if norm > 0 else error.item()


RANK_SHARES: Final = (*(Fraction(1, part) for part in (32, 16, 8, 4)), Fraction(3, 8), Fraction(1, 2))
"""Ranks of V-coordinates that are tried, as shares of the width of the values."""


def share_name(share: Fraction) -> str:
    """Name of a share of the width d, such as ``3d/8``."""
    return f"{'' if share.numerator == 1 else share.numerator}d/{share.denominator}"


@dataclass(frozen=True)
class LayerPlan:
    """The caches that one layer may have.

    Attributes:
        ordinary: Keys and values in the model's dtype.
        candidates: All caches that were measured, smallest first.
        refused: Why caches could not be measured, by plan.
        tolerance: Largest acceptable output error, as a multiple of the `baseline`'s.
        cache_dtype: Dtype of keys and V-coordinates that are not in 8 bits, such as ``float16``; inputs, and keys with
            values, are in `model_dtype`.
        condition, largest_key_to_value: Condition number of ``W_K`` and ``max |W_KV|``, or None.
        singular_values: Those of ``W_K``, descending; all three only where keys determine values.
        ordinary_int8: Keys and values in int8, the baseline of caches in 8 bits; None without these. Not a candidate:
            keys with few V-coordinates in fp16 need as many bytes and have a much smaller error.
    """

    ordinary: CacheError
    candidates: tuple[CacheError, ...]
    refused: dict[PlanName, str]
    tolerance: float
    cache_dtype: str
    model_dtype: str
    condition: float | None = None
    largest_key_to_value: float | None = None
    singular_values: tuple[float, ...] = ()
    ordinary_int8: CacheError | None = None

    def baseline(self, candidate: CacheError) -> CacheError:
        """Cache that a candidate's error is compared with: keys and values, in int8 for candidates in 8 bits."""
        return self.ordinary_int8 if self.ordinary_int8 and in_eight_bits(candidate) else self.ordinary

    def accepts(self, candidate: CacheError) -> bool:
        """Whether a cache's output error is at most `tolerance` times that of its `baseline`."""
        return candidate.output_error <= self.tolerance * self.baseline(candidate).output_error

    @property
    def chosen(self) -> CacheError:
        """The smallest cache that `accepts` takes."""
        return next(filter(self.accepts, self.candidates))

    def to_dict(self) -> dict[str, Any]:
        plain = {"chosen": asdict(self.chosen), **asdict(self)}
        return plain | {"candidates": list(plain["candidates"]), "singular_values": list(self.singular_values)}


def in_eight_bits(cache: CacheError) -> bool:
    return cache.dtype in map(dtype_name, EIGHT_BITS)


def fit_layer(
    weights: AttentionWeights,
    text: AttentionInputs,
    *,
    model_dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    tolerance: float = 2.0,
    rank_shares: Sequence[Fraction] = RANK_SHARES,
    ranks: Sequence[int] = (),
) -> tuple[LayerPlan, dict[str, KeyStatistics]]:
    """Measure the caches that a layer may have; `LayerPlan.chosen` is the smallest that is accurate enough.

    Offsets, noise and the rounding of matrices are taken from the first half of the text's keys, errors from the
    second, so that a plan is not judged on the text that it was fitted to.

    Args:
        model_dtype: Dtype of the model that made the inputs (else rounding them to it counts as an error of a cache of
            inputs), of the ordinary cache and of a cache of inputs.
        cache_dtype: Dtype of keys and V-coordinates; when None fp16 for models in bf16 (three more bits in the same
            bytes), else the model's. One of `EIGHT_BITS` is tried beside that, also for inputs.
        tolerance: Largest acceptable output error, as a multiple of that of an ordinary cache.
        rank_shares, ranks: Ranks to try, as shares of the width of the values, and further ones.

    Returns:
        The plan, with ``kv`` always among the candidates, and statistics for `store_value_coordinates` by the cache's
        dtype; empty where keys do not determine values.

    Raises:
        ValueError: Inputs, or outputs with an ordinary cache, are not finite.
    """
    _check_text(text, model_dtype)
    eight_bits = cache_dtype if cache_dtype in EIGHT_BITS else None
    if cache_dtype is None or eight_bits is not None:
        cache_dtype = torch.float16 if model_dtype == torch.bfloat16 else model_dtype
    half = len(text.key_inputs) // 2
    fitted, errors = text.part(slice(half)), CacheErrors(weights, text.part(slice(half, None)))
    ordinary = errors.ordinary(model_dtype)
    if not math.isfinite(ordinary.output_error):
        raise ValueError(
            "on the calibration text the layer gives inf or nan with an ordinary cache in "
            f"{dtype_name(model_dtype)}: its weights hold some, or its keys and values do not fit; "
            f"repair the weights{', or convert in a wider dtype' if _is_narrow(model_dtype) else ''}"
        )
    candidates, refused, statistics = [ordinary], dict[PlanName, str](), dict[str, KeyStatistics]()
    try:
        candidates.append(errors.of_inputs(model_dtype))
        if eight_bits is not None and text.encoded is None:  # the encoder's output is not cached
            candidates.append(errors.of_inputs(eight_bits))
    except ValueError as reason:
        refused["x" if text.encoded is None else "e"] = str(reason)
    solved: KeyToValue | None = None
    for dtype in filter(None, (cache_dtype, eight_bits)):
        try:
            fit = key_statistics(weights, fitted.key_inputs, dtype, fitted.stored_rotation)
            statistics[dtype_name(dtype)] = fit
        except ValueError as reason:
            refused["k"] = refused["k+r"] = str(reason)
            continue
        solved = fit.key_to_value
        for rank in sorted({int(len(fit.directions) * share) for share in rank_shares} | {0, *ranks}):
            try:
                found = errors.value_coordinates(fit, rank, dtype, matrix_dtype=matrix_dtype(model_dtype))
                candidates.append(found)
            except ValueError as reason:
                refused["k+r" if rank else "k"] = str(reason)
    candidates.sort(key=lambda candidate: (candidate.bytes_per_token, candidate.output_error))
    plan = LayerPlan(
        ordinary=ordinary,
        candidates=tuple(candidates),
        refused=refused,
        tolerance=tolerance,
        cache_dtype=dtype_name(cache_dtype),
        model_dtype=dtype_name(model_dtype),
        condition=solved.condition if solved else None,
        largest_key_to_value=solved.largest if solved else None,
        singular_values=tuple(solved.singular_values.tolist()) if solved else (),
        ordinary_int8=None if eight_bits is None else errors.ordinary(torch.int8),
    )
    return plan, statistics


def _check_text(text: AttentionInputs, model_dtype: torch.dtype) -> None:
    if not (text.inputs.isfinite().all() and text.key_inputs.isfinite().all()):
        reason = "; repair the weights of the layers before, or the calibration input"
        if _is_narrow(model_dtype):
            reason = (
                f", whose largest number is {torch.finfo(model_dtype).max:.5g}; convert the model in a dtype of wider "
                "range, such as bfloat16"
            )
        raise ValueError(f"the layer's inputs on the calibration text hold inf or nan in {model_dtype}{reason}")


def _is_narrow(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).max < torch.finfo(torch.bfloat16).max  # bf16 has the range of fp32
