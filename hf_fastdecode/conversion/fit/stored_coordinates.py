"""V-coordinates as a checkpoint holds them: fitted to a calibration text, and rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .cached_numbers import EIGHT_BITS, load, store
from .key_to_value import KeyToValue, solve_key_to_value
from .reference_attention import join_heads, split_heads
from .rope import Rotation
from .rounding import RoundingFeedback, ScaledColumns, round_columns, rounding_feedback, shrunk_gram
from .value_coordinates import ValueCoordinates, noisiest_directions, value_coordinates
from .weights import AttentionWeights

RANGE_HEADROOM: Final = 4.0
"""Factor between the largest cached number of the calibration text and the bound of the dtype."""

SHRINKAGE: Final = 0.1
"""Share of the identity in the covariance of inputs, so that directions missing in a short text count as well."""


@dataclass(frozen=True)
class StoredValueCoordinates:
    """`ValueCoordinates` as a checkpoint holds them: the offset in the cache's dtype, the constant in fp32."""

    key_offset: Tensor
    from_keys: ScaledColumns
    from_inputs: ScaledColumns
    directions: Tensor
    constant: Tensor

    def double(self) -> ValueCoordinates:
        """The same numbers in fp64."""
        return ValueCoordinates(
            self.key_offset.double(),
            self.from_keys.double(),
            self.from_inputs.double(),
            self.directions.double(),
            self.constant.double(),
        )


@dataclass(frozen=True)
class KeyStatistics:
    """Statistics of a layer's keys on a calibration text, for V-coordinates of any rank. All fp64.

    Attributes:
        key_to_value: ``W_KV`` and the singular values of ``W_K``.
        key_offset: ``[e]``, the mean of the keys (with their bias), exact in the cache's dtype, or in fp32 for 8 bits.
        noise: ``[e]``, mean square error of the cache in each coordinate of the keys minus the offset.
        directions: ``[e_v, e_v]``, from `noisiest_directions`.
        key_feedback: For rounding matrices that multiply keys minus the offset.
        input_feedback: For rounding matrices that multiply inputs.
    """

    key_to_value: KeyToValue
    key_offset: Tensor
    noise: Tensor
    directions: Tensor
    key_feedback: RoundingFeedback
    input_feedback: RoundingFeedback


def key_statistics(
    weights: AttentionWeights, inputs: Tensor, cache_dtype: torch.dtype, stored_rotation: Rotation | None = None
) -> KeyStatistics:
    """Measure a multi-head layer's keys on a calibration text: inputs of its projections, ``[tokens, key_d]``.

    With `stored_rotation`, the RoPE of these tokens, keys are cached after it. Raises SingularKeysError where keys do
    not determine the inputs, ValueError where they come too near the end of the range of `cache_dtype`.
    """
    X, W_K = inputs.double(), weights.W_K
    keys = weights.keys(X)
    key_offset = keys.mean(0).to(torch.float32 if cache_dtype in EIGHT_BITS else cache_dtype).double()
    cached = keys - key_offset
    noise = (cached_and_read(cached, cache_dtype, weights.head_dim, stored_rotation) - cached).square().mean(0)
    solved = solve_key_to_value(W_K, weights.W_V, noise)
    deviation = X - X.mean(0)
    key_gram = W_K.mT @ shrunk_gram(deviation.mT @ deviation / len(X), SHRINKAGE) @ W_K + noise.diag()
    # For e > d the keys span only d coordinates; the rounding noise in the others is at least this.
    key_gram.diagonal().add_(torch.finfo(torch.float64).eps * key_gram.diagonal().mean() * len(key_gram))
    return KeyStatistics(
        solved,
        key_offset,
        noise,
        noisiest_directions(solved.matrix, noise),
        rounding_feedback(key_gram),
        rounding_feedback(shrunk_gram(X.mT @ X / len(X), SHRINKAGE)),
    )


def store_value_coordinates(
    weights: AttentionWeights, statistics: KeyStatistics, rank: int, *, matrix_dtype: torch.dtype = torch.float16
) -> StoredValueCoordinates:
    """Round V-coordinates with little effect on the values; M, ``W_E`` and B are in `matrix_dtype`.

    Directions are rounded first; ``W_E`` and M are then solved for the rounded ones, so that their rounding costs
    nothing. Those two are rounded so that errors cancel on typical inputs (`round_columns` with feedback): M rounded
    to nearest makes as large an error as rounding the keys, and averaging over tokens does not reduce it. The rank r
    is between 0 (keys alone) and e_v (an ordinary cache), else ValueError.
    """
    width = len(statistics.directions)
    if not 0 <= rank <= width:
        raise ValueError(f"rank must be between 0 and {width}, the coordinates of the values, got {rank}")
    basis = torch.eye(width, dtype=torch.float64, device=statistics.directions.device)
    chosen = basis if rank == width else statistics.directions[:rank]
    directions = chosen.to(matrix_dtype)
    exact = value_coordinates(weights, statistics.key_to_value, directions, statistics.key_offset)
    return StoredValueCoordinates(
        statistics.key_offset,
        round_columns(exact.from_keys, statistics.key_feedback, dtype=matrix_dtype),
        round_columns(exact.from_inputs, statistics.input_feedback, dtype=matrix_dtype),
        directions,
        exact.constant.float(),
    )


def rounded(x: Tensor, cache_dtype: torch.dtype, head_dim: int) -> Tensor:
    """``[..., width]`` as a cache returns it, fp64; in 8 bits, `head_dim` numbers share a scale."""
    return load(store(x, cache_dtype, head_dim), cache_dtype, head_dim).double()


def cached_and_read(
    keys: Tensor, cache_dtype: torch.dtype, head_dim: int, stored_rotation: Rotation | None = None
) -> Tensor:
    """Keys ``[tokens, e]`` before RoPE, minus their offset, as a cache returns them, fp64; errors as `check_range`.

    With `stored_rotation`, RoPE of these tokens, keys are cached, and so rounded, after it.
    """
    if stored_rotation is not None:
        keys = join_heads(stored_rotation.rotate(split_heads(keys, keys.shape[1] // head_dim)))
    check_range("keys", keys, cache_dtype)
    read = rounded(keys, cache_dtype, head_dim)
    if stored_rotation is None:
        return read
    return join_heads(stored_rotation.unrotate(split_heads(read, read.shape[1] // head_dim)))


def check_range(name: str, cached: Tensor, cache_dtype: torch.dtype) -> None:
    """Refuse, by a ValueError, a dtype to whose end numbers come so near that other texts may exceed it."""
    largest = cached.abs().max().item() if cached.numel() else 0.0
    widest = torch.bfloat16 if cache_dtype in EIGHT_BITS else cache_dtype  # 8 bits have scales of its range
    bound = torch.finfo(widest).max / RANGE_HEADROOM
    if not largest <= bound:
        raise ValueError(
            f"{name} reach {largest:.3g} on the calibration text, and must stay below {bound:.3g} ({cache_dtype} with "
            f"headroom of {RANGE_HEADROOM:g}); cache keys and values of this layer in the model's dtype"
        )
