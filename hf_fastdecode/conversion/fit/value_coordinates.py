"""V-coordinates: what to cache beside keys, so that values follow from rounded keys (this project's own).

``V = K W_KV`` is exact, but rounding of the cached keys grows with ``W_KV``, by factors of up to the condition number
of ``W_K``. Most of that error lies along few directions of the values. Caching r coordinates of the values along
these, ``E = X W_E``, leaves a matrix M that is small where ``W_KV`` is large:

    V = K M + E B,    W_E = W_V G,    M = W_KV - (W_KV G) B,    G = B^+

It is exact for every B ``[r, e_v]`` of full rank: r = 0 is the paper's method, r = e_v an ordinary cache. With n_j the
mean square error of coordinate j of the cached keys, the error is least for the r leading right singular vectors of
``diag(sqrt(n)) W_KV`` (Eckart and Young: ``(W_KV G) B`` is the best approximation of rank r).

Keys are cached minus an offset, near their mean over a calibration text: floating-point errors are relative, so nearly
constant coordinates have nearly none. The offset's share of the values is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .key_to_value import KeyToValue
from .weights import AttentionWeights, bias_or_zero, value_constant


@dataclass(frozen=True)
class ValueCoordinates:
    """Matrices for ``values = cached M + coordinates B + constant``, in fp64.

    Attributes:
        key_offset: ``[e]``; it is subtracted from keys (with their bias) before they are cached.
        from_keys: M, ``[e, e_v]``.
        from_inputs: ``W_E``, ``[key_d, r]``.
        directions: B, ``[r, e_v]``.
        constant: ``[e_v]``, what offset and biases add to each token's values.
    """

    key_offset: Tensor
    from_keys: Tensor
    from_inputs: Tensor
    directions: Tensor
    constant: Tensor

    @property
    def rank(self) -> int:
        """Coordinates cached per token beside the keys."""
        return len(self.directions)

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
