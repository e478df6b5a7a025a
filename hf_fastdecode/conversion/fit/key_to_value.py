"""Values from keys, ``V = K W_KV`` with ``W_KV = W_K^-1 W_V`` (Slim attention, eq. 1.4 and section 6, option 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class SingularKeysError(ValueError):
    """Keys do not determine the inputs to working precision, so no matrix gives the values back."""


@dataclass(frozen=True)
class KeyToValue:
    """The matrix from keys to values, and the spectrum that tells in which dtypes keys can be cached.

    Attributes:
        matrix: ``W_KV``, ``[e, e_v]``, fp64.
        singular_values: Singular values of ``W_K``, ``[d]``, fp64, descending.
    """

    matrix: Tensor
    singular_values: Tensor

    @property
    def condition(self) -> float:
        """Condition number of ``W_K``: how much rounding errors of keys can grow in the inputs that they determine."""
        return (self.singular_values[0] / self.singular_values[-1]).item()

    @property
    def largest(self) -> float:
        """``max |W_KV|``."""
        return self.matrix.abs().max().item()


def solve_key_to_value(W_K: Tensor, W_V: Tensor, noise: Tensor | None = None) -> KeyToValue:
    """Solve ``W_K W_KV = W_V``, so that ``X W_K W_KV = X W_V`` for every X.

    ``W_K^T`` is factorised into ``Q R`` and the triangle solved: backward stable, where ``W_K^T (W_K W_K^T)^-1``, as
    the paper writes the right inverse, squares the condition number. For e > d many matrices solve it. Of these,
    `noise` chooses the one that adds the least error when keys carry it; without, the one of least norm.

    Args:
        W_K: ``[d, e]`` with e >= d: the papers' layout, the transpose of `torch.nn.Linear`'s weight.
        W_V: ``[d, e_v]``.
        noise: ``[e]``, mean square error of each coordinate of the keys, not negative; without effect for e = d.

    Raises:
        ValueError: Weights are not finite.
        SingularKeysError: e < d, or ``W_K`` does not have full rank in fp64.
    """
    W_K, W_V = W_K.double(), W_V.double()
    if not (W_K.isfinite().all() and W_V.isfinite().all()):
        raise ValueError("weights of keys or values hold inf or nan; check the checkpoint")
    inputs, coordinates = W_K.shape
    remedy = "cache this layer's inputs, where no RoPE stands between, or its keys and values"
    if coordinates < inputs:
        raise SingularKeysError(
            f"W_K maps {inputs} inputs to {coordinates} coordinates; values follow from keys only for at least "
            f"{inputs}; {remedy}"
        )
    singular_values = torch.linalg.svdvals(W_K)
    bound = coordinates * torch.finfo(torch.float64).eps * singular_values[0]
    if not singular_values[-1] > bound:
        raise SingularKeysError(
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
