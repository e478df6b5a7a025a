"""What the delta rule is given beside queries, keys and values, in kernel and reference alike."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Gates(NamedTuple):
    """How decays and betas are made of a layer's projections: ``-exp(rate) * softplus(x + bias)`` and ``sigmoid(x)``.

    Attributes:
        rates: ``[heads]``, contiguous: logarithms.
        biases: Likewise.
    """

    rates: Tensor
    biases: Tensor


L2_EPS = 1e-6
"""Added to sums of squares of queries and keys."""
