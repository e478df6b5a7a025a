"""V-coordinates, cached beside keys so that values can be computed from rounded keys (from this project).

``V = K W_KV`` with ``W_KV = W_K^-1 W_V`` is exact (Slim attention, eq. 1.4 and section 6, option 1), but rounding of
the cached keys grows with ``W_KV``, by factors of up to the condition number of ``W_K``. Most of that error lies along
few directions of the values. Caching r coordinates of the values along these, ``E = X W_E``, leaves a matrix M that is
small where ``W_KV`` is large:

    V = K M + E B,    W_E = W_V G,    M = W_KV - (W_KV G) B,    G = B^+

It is exact for every B ``[r, e_v]`` of full rank: r = 0 is the paper's method, r = e_v an ordinary cache. With n_j the
mean square error of coordinate j of the cached keys, the error is least for the r leading right singular vectors of
``diag(sqrt(n)) W_KV`` (Eckart and Young: ``(W_KV G) B`` is the best approximation of rank r).

Keys are cached minus an offset, near their mean over a calibration text: floating-point errors are relative, so nearly
constant coordinates have nearly none. The offset's share of the values is a constant.

A checkpoint holds the matrices in half precision: a scale per column, and rounding whose errors cancel on calibrated
inputs (GPTQ).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .attention import AttentionWeights, Rotation, bias_or_zero, join_heads, split_heads, value_constant
from .cached_numbers import EIGHT_BITS, load, store


@dataclass(frozen=True)
class KeyToValue:
    """The matrix from keys to values, ``W_KV`` ``[e, e_v]``, and the singular values of ``W_K``, ``[d]`` descending.

    Both are in fp64. The spectrum tells in which dtypes keys can be cached.
    """

    matrix: Tensor
    singular_values: Tensor

    @property
    def condition(self) -> float:
        """Condition number of ``W_K``: how much rounding errors of keys can grow in the inputs that they determine."""
        return (self.singular_values[0] / self.singular_values[-1]).item()

    @property
    def largest(self) -> float:
        return self.matrix.abs().max().item()


def solve_key_to_value(W_K: Tensor, W_V: Tensor, noise: Tensor | None = None) -> KeyToValue:
    """Solve ``W_K W_KV = W_V``, so that ``X W_K W_KV = X W_V`` for every X.

    ``W_K^T`` is factorised into ``Q R`` and the triangle solved: backward stable, where ``W_K^T (W_K W_K^T)^-1``, as
    the paper writes the right inverse, squares the condition number. For e > d many matrices solve it. Of these,
    `noise`, the mean square error of each coordinate of the keys, ``[e]``, chooses the one that adds the least error
    when keys carry it; without, the one of least norm. Matrices are ``[d, e]`` and ``[d, e_v]``, the papers' layout.

    Raises ValueError where e < d, or ``W_K`` does not have full rank in fp64.
    """
    W_K, W_V = W_K.double(), W_V.double()
    inputs, coordinates = W_K.shape
    remedy = "cache this layer's inputs, where no RoPE stands between, or its keys and values"
    if coordinates < inputs:
        raise ValueError(
            f"W_K maps {inputs} inputs to {coordinates} coordinates; values follow from keys only for at least "
            f"{inputs}; {remedy}"
        )
    singular_values = torch.linalg.svdvals(W_K)
    bound = coordinates * torch.finfo(torch.float64).eps * singular_values[0]
    if not singular_values[-1] > bound:
        raise ValueError(
            f"the smallest singular value of W_K is {singular_values[-1]:.3g}, and must be above {bound:.3g} to be "
            f"distinguished from 0; {remedy}"
        )
    weight = torch.ones_like(W_K[0])
    if noise is not None and coordinates > inputs:
        # A coordinate without error (always 0, say) must not get an infinite weight.
        spread = noise.double().clamp_min(1e-6 * noise.double().mean()).sqrt()
        weight = spread.mean() / spread if spread.mean() > 0 else weight
    Q, R = torch.linalg.qr((W_K * weight).mT)  # Q [e, d], R [d, d]
    matrix = Q @ torch.linalg.solve_triangular(R.mT, W_V, upper=False)
    return KeyToValue(weight[:, None] * matrix, singular_values)


@dataclass(frozen=True)
class ValueCoordinates:
    """Matrices for ``values = cached M + coordinates B + constant``, in fp64.

    M is `from_keys`, ``[e, e_v]``, ``W_E`` `from_inputs`, ``[key_d, r]``, and B `directions`, ``[r, e_v]``. The offset
    ``[e]`` is subtracted from keys (with their bias) before they are cached; the constant is what offset and biases
    add to each token's values, ``[e_v]``.
    """

    key_offset: Tensor
    from_keys: Tensor
    from_inputs: Tensor
    directions: Tensor
    constant: Tensor

    def cached_keys(self, weights: AttentionWeights, inputs: Tensor) -> Tensor:
        """Cached keys of inputs ``[tokens, key_d]``: ``[tokens, e]``, fp64, before any rounding."""
        return weights.keys(inputs) - self.key_offset

    def coordinates(self, inputs: Tensor) -> Tensor:
        """V-coordinates of inputs ``[tokens, key_d]``: ``[tokens, r]``, fp64, before any rounding."""
        return inputs.double() @ self.from_inputs

    def values(self, cached_keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values with their bias, ``[tokens, e_v]``, of keys ``[tokens, e]`` and coordinates ``[tokens, r]``."""
        return cached_keys.double() @ self.from_keys + coordinates.double() @ self.directions + self.constant


def noisiest_directions(matrix: Tensor, noise: Tensor) -> Tensor:
    """Directions of the values by the error that the keys' noise makes along them, largest first.

    Of ``W_KV``, ``[e, e_v]``, and the mean square error of each coordinate of the cached keys, ``[e]``. Returns
    ``[e_v, e_v]``, fp64, orthonormal rows, of which the first r are P^T.
    """
    # The SVD, because eigenvectors of the Gram matrix lose directions below the root of the precision.
    _, _, right = torch.linalg.svd(noise.double().sqrt()[:, None] * matrix.double())
    return right


def value_coordinates(
    weights: AttentionWeights, key_to_value: KeyToValue, directions: Tensor, key_offset: Tensor | None = None
) -> ValueCoordinates:
    """The exact map from keys and V-coordinates to values along the given directions.

    The directions B, ``[r, e_v]``, are of full rank, not necessarily orthonormal: rounded ones serve as they are. The
    offset ``[e]`` is the bias of the keys when None, so that ``X W_K`` is cached.
    """
    matrix, B = key_to_value.matrix, directions.double()
    Q, R = torch.linalg.qr(B.mT)
    G = torch.linalg.solve_triangular(R.mT, Q, upper=False, left=False)  # B^+, [e_v, r]
    ordinary = len(B) == B.shape[1]  # then M is exactly 0, without the rounding errors of the difference
    from_keys = torch.zeros_like(matrix) if ordinary else matrix - (matrix @ G) @ B
    bias = bias_or_zero(weights.key_bias, weights.W_K)
    offset = bias if key_offset is None else key_offset.double()
    constant = value_constant(from_keys, offset, bias, bias_or_zero(weights.value_bias, weights.W_V))
    return ValueCoordinates(offset, from_keys, weights.W_V @ G, B, constant)


_BLOCK: Final = 128
"""Rows whose corrections are applied to the remaining ones at once, as a matrix product."""


def matrix_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of a slim layer's matrices: fp16 for models in half precision (bf16 would spoil the values)."""
    return torch.float16 if model_dtype.itemsize == 2 else torch.float32


@dataclass(frozen=True)
class RoundingFeedback:
    """Order ``[rows]`` of rounding, and factor by which later rows compensate the rounding errors of earlier ones.

    The factor is ``[rows, rows]``, fp64, upper triangular, in that order: ``factor^T factor`` is the inverse of the
    Gram matrix that errors are measured by.
    """

    order: Tensor
    factor: Tensor


def rounding_feedback(gram: Tensor) -> RoundingFeedback:
    """The feedback that keeps ``trace(error^T gram error)`` small.

    `gram`, ``[rows, rows]``, is the mean of ``x^T x`` over the matrix's inputs x; ValueError unless it is positive
    definite.
    """
    gram = gram.double()
    order = gram.diagonal().argsort(descending=True)  # the strongest first: the most rows remain to compensate
    lower, failed = torch.linalg.cholesky_ex(gram[order][:, order])
    if failed.any():
        raise ValueError("the Gram matrix is not positive definite; add a multiple of the identity")
    return RoundingFeedback(order, torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True))


def round_with_feedback(
    rows: Tensor, feedback: RoundingFeedback, rounding: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Round rows one after another, each with the corrections for those before (GPTQ's algorithm), in fp64.

    Columns are independent of each other. `rounding` makes the rounded row of a row ``[1, columns]`` and its index;
    any grid will do.
    """
    left, factor = rows.double()[feedback.order], feedback.factor
    rounded = torch.empty_like(left)
    for start in range(0, len(left), _BLOCK):
        stop = min(start + _BLOCK, len(left))
        corrections = torch.empty_like(left[start:stop])
        for row in range(start, stop):
            rounded[row : row + 1] = rounding(left[row : row + 1], feedback.order[row : row + 1])
            correction = (left[row] - rounded[row]) / factor[row, row]
            left[row + 1 : stop] -= factor[row, row + 1 : stop, None] * correction
            corrections[row - start] = correction
        left[stop:] -= factor[start:stop, stop:].mT @ corrections
    return rounded[feedback.order.argsort()]


def shrunk_gram(gram: Tensor, share: float) -> Tensor:
    """A Gram matrix with a share of its mean diagonal, or 1 for a zero matrix, added to the diagonal."""
    mean = gram.diagonal().mean()
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return gram + (share * mean if mean > 0 else 1.0) * identity


@dataclass(frozen=True)
class ScaledColumns:
    """A matrix as ``values * scales``: ``[rows, columns]`` in the dtype of storage, and ``[columns]`` in fp32.

    Scales are powers of two that bring the largest entry of each column into [1, 2): multiplying by them rounds
    nothing, no entry leaves the range, and columns of small entries keep their bits.
    """

    values: Tensor
    scales: Tensor

    def double(self) -> Tensor:
        return self.values.double() * self.scales.double()


def round_columns(matrix: Tensor, feedback: RoundingFeedback | None = None, *, dtype: torch.dtype) -> ScaledColumns:
    """Round a finite matrix ``[rows, columns]``.

    With the feedback of its inputs, products with typical inputs change little; without, each entry is rounded to the
    nearest. Rows of a matrix from keys to values multiply strongly correlated coordinates, so that errors of one row
    can be made up for in others.
    """
    largest = matrix.double().abs().amax(0)
    exponent = torch.where(largest > 0, largest, 1.0).log2().floor()
    scales = torch.exp2(exponent.clamp(-126, 127)).float()  # normal numbers of fp32
    values = matrix.double() / scales.double()
    if feedback is not None:
        values = round_with_feedback(values, feedback, lambda row, _: row.to(dtype).double())
    return ScaledColumns(values.to(dtype), scales)


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
    directions: ScaledColumns
    constant: Tensor

    @property
    def rank(self) -> int:
        return len(self.directions.values)

    def double(self) -> ValueCoordinates:
        parts = self.key_offset, self.from_keys, self.from_inputs, self.directions, self.constant
        return ValueCoordinates(*(part.double() for part in parts))


@dataclass(frozen=True)
class KeyStatistics:
    """Statistics of a layer's keys on a calibration text, for V-coordinates of any rank. All fp64.

    `key_offset`, ``[e]``, is the mean of the keys (with their bias), exact in the cache's dtype, or in fp32 for 8
    bits; `noise`, ``[e]``, the mean square error of the cache in each coordinate of the keys minus the offset;
    `directions`, ``[e_v, e_v]``, are from `noisiest_directions`; the feedback is for rounding matrices that multiply
    keys minus the offset, and inputs.
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

    With `stored_rotation`, the RoPE of these tokens, keys are cached after it. Raises ValueError where keys do not
    determine the inputs, or come too near the end of the range of `cache_dtype`.
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
        ScaledColumns(directions, torch.ones(width)),
        exact.constant.float(),
    )


def rounded(x: Tensor, cache_dtype: torch.dtype, head_dim: int) -> Tensor:
    """``[..., width]`` as a cache returns it, fp64; in 8 bits, `head_dim` elements share a scale."""
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
    """Raise a ValueError where elements come so near the dtype's largest value that other texts may exceed it."""
    largest = cached.abs().max().item() if cached.numel() else 0.0
    widest = torch.bfloat16 if cache_dtype in EIGHT_BITS else cache_dtype  # 8 bits have scales of its range
    bound = torch.finfo(widest).max / RANGE_HEADROOM
    if not largest <= bound:
        raise ValueError(
            f"{name} reach {largest:.3g} on the calibration text, and must stay below {bound:.3g} ({cache_dtype} with "
            f"headroom of {RANGE_HEADROOM:g}); cache keys and values of this layer in the model's dtype"
        )
