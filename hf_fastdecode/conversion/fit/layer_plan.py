"""Plan of a layer: its smallest cache within the requested tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor

from .cache_errors import CacheError, CacheErrors, PlanName, dtype_name
from .cached_numbers import EIGHT_BITS
from .key_to_value import KeyToValue
from .rope import Rotation
from .rounding import matrix_dtype
from .stored_coordinates import KeyStatistics, key_statistics
from .weights import AttentionWeights, require_multi_head

RANK_SHARES: Final = (*(Fraction(1, part) for part in (32, 16, 8, 4)), Fraction(3, 8), Fraction(1, 2))
"""Ranks of V-coordinates that are tried, as shares of the width of the values."""


def share_name(share: Fraction) -> str:
    """Name of a share of the width d, such as ``3d/8``."""
    return f"{'' if share.numerator == 1 else share.numerator}d/{share.denominator}"


@dataclass(frozen=True)
class LayerPlan:
    """Chosen cache of one layer, and the candidates it was chosen from.

    Attributes:
        chosen: The smallest cache that `accepts` takes.
        ordinary: Keys and values in the model's dtype.
        candidates: All caches that were measured, smallest first.
        refused: Why caches could not be measured, by plan.
        tolerance: Largest acceptable output error, as a multiple of the `baseline`'s.
        cache_dtype: Dtype of keys and V-coordinates that are not in 8 bits, such as ``float16``; inputs, and keys with
            values, are in `model_dtype`.
        model_dtype: Dtype of the model.
        condition: Condition number of ``W_K``; None where keys do not determine values.
        largest_key_to_value: ``max |W_KV|``, or None.
        singular_values: Singular values of ``W_K``, descending; empty where keys do not determine values.
        ordinary_int8: Keys and values in int8, the baseline of caches in 8 bits; None without these. Not a candidate:
            keys with few V-coordinates in fp16 need as many bytes and have a much smaller error.
    """

    chosen: CacheError
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        plain = asdict(self)
        return plain | {"candidates": list(plain["candidates"]), "singular_values": list(self.singular_values)}


def in_eight_bits(cache: CacheError) -> bool:
    """Whether a cache is in 8 bits."""
    return cache.dtype in map(dtype_name, EIGHT_BITS)


def fit_layer(
    weights: AttentionWeights,
    inputs: Tensor,
    key_inputs: Tensor | None = None,
    *,
    rotation: Rotation | None = None,
    causal: bool = True,
    score_bias: Tensor | None = None,
    model_dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    tolerance: float = 2.0,
    rank_shares: Sequence[Fraction] = RANK_SHARES,
    ranks: Sequence[int] = (),
    eight_bits: torch.dtype | None = None,
    unrotate: bool = False,
) -> tuple[LayerPlan, dict[str, KeyStatistics]]:
    """Measure the caches that a layer may have, and choose the smallest that is accurate enough.

    Offsets, noise and the rounding of matrices are taken from the first half of the text, errors from the second, so
    that a plan is not judged on the text that it was fitted to. Inputs, rotation, `causal`, `score_bias` and
    `unrotate` are as of `CacheErrors`.

    Args:
        model_dtype: Dtype of the model that made the inputs (else rounding them to it counts as an error of a cache of
            inputs), of the ordinary cache and of a cache of inputs.
        cache_dtype: Dtype of keys and V-coordinates; when None fp16 for models in bf16 (three more bits in the same
            bytes), else the model's.
        tolerance: Largest acceptable output error, as a multiple of that of an ordinary cache.
        rank_shares, ranks: Ranks to try, as shares of the width of the values, and further ones.
        eight_bits: int8 or float8_e4m3fn, to try keys and V-coordinates, and inputs, in this dtype too.

    Returns:
        The plan, with ``kv`` always among the candidates, and statistics for `store_value_coordinates` by the cache's
        dtype; empty where keys do not determine values.

    Raises:
        ValueError: The text has fewer than two tokens to cache; inputs, or outputs with an ordinary cache, are not
            finite; `tolerance` is below 1; cross-attention has RoPE.
    """
    if key_inputs is not None and rotation is not None:
        raise ValueError("RoPE in cross-attention is not supported: queries and keys have positions of their own")
    cached_tokens = len(inputs if key_inputs is None else key_inputs)
    if cached_tokens < 2:
        raise ValueError(f"a calibration text needs 2 tokens, half to fit and half to judge, got {cached_tokens}")
    is_narrow = torch.finfo(model_dtype).max < torch.finfo(torch.bfloat16).max  # bf16 has the range of fp32
    if not (inputs.isfinite().all() and (key_inputs is None or key_inputs.isfinite().all())):
        reason = "; repair the weights of the layers before, or the calibration input"
        if is_narrow:
            reason = (
                f", whose largest number is {torch.finfo(model_dtype).max:.5g}; convert the model in a dtype of wider "
                "range, such as bfloat16"
            )
        raise ValueError(f"the layer's inputs on the calibration text hold inf or nan in {model_dtype}{reason}")
    if not tolerance >= 1:
        raise ValueError(f"tolerance must be at least 1 (the error of keys and values themselves), got {tolerance}")
    if cache_dtype is None:
        cache_dtype = torch.float16 if model_dtype == torch.bfloat16 else model_dtype
    half = cached_tokens // 2
    stored = rotation.tokens(slice(half)) if rotation is not None and unrotate else None
    if key_inputs is None:
        fitted = inputs[:half]
        judged = slice(half, None)
        part = None if rotation is None else rotation.tokens(judged)
        bias = None if score_bias is None else score_bias[:, judged, judged]
        errors = CacheErrors(weights, inputs[judged], rotation=part, causal=causal, score_bias=bias, unrotate=unrotate)
    else:
        fitted = key_inputs[:half]
        errors = CacheErrors(weights, inputs, key_inputs[half:], rotation=rotation, causal=causal)

    ordinary = errors.ordinary(model_dtype)
    if not math.isfinite(ordinary.output_error):
        raise ValueError(
            "on the calibration text the layer gives inf or nan with an ordinary cache in "
            f"{dtype_name(model_dtype)}: its weights hold some, or its keys and values do not fit; "
            f"repair the weights{', or convert in a wider dtype' if is_narrow else ''}"
        )
    candidates = [ordinary]
    refused: dict[PlanName, str] = {}
    statistics: dict[str, KeyStatistics] = {}
    solved: KeyToValue | None = None
    try:
        candidates.append(errors.of_inputs(model_dtype))
        if eight_bits is not None and key_inputs is None:  # the encoder's output is not cached
            candidates.append(errors.of_inputs(eight_bits))
    except ValueError as reason:
        refused["x" if key_inputs is None else "e"] = str(reason)
    for dtype in (cache_dtype,) if eight_bits is None else (cache_dtype, eight_bits):
        try:
            require_multi_head(weights)
            fit = statistics[dtype_name(dtype)] = key_statistics(weights, fitted, dtype, stored)
        except ValueError as reason:
            refused["k"] = refused["k+r"] = str(reason)
            continue
        solved = fit.key_to_value
        width = solved.matrix.shape[1]
        for rank in sorted({int(width * share) for share in rank_shares} | {0, *ranks}):
            try:
                candidates.append(errors.value_coordinates(fit, rank, dtype, matrix_dtype=matrix_dtype(model_dtype)))
            except ValueError as reason:
                refused["k+r" if rank else "k"] = str(reason)
    candidates.sort(key=lambda candidate: (candidate.bytes_per_token, candidate.output_error))
    plan = LayerPlan(
        chosen=ordinary,
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
    return replace(plan, chosen=next(filter(plan.accepts, candidates))), statistics
