"""The unbiased estimator of pass@k."""

from __future__ import annotations

import math


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k samples passes, estimated from n samples of which c passed.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1:
    ``1 - C(n - c, k) / C(n, k)``, in the numerically stable product form of its figure 3,
    ``1 - prod_{i = n - c + 1}^{n} (1 - k / i)``.

    Args:
        n: samples drawn, at least k.
        c: samples that passed, between 0 and n.
        k: samples a user would look at, at least 1.

    Raises:
        ValueError: an argument is out of these bounds.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}; pass@k counts the samples that are looked at")
    if n < k:
        raise ValueError(f"n must be at least k, got n = {n} < k = {k}; draw more samples or lower k")
    if not 0 <= c <= n:
        raise ValueError(f"c must be between 0 and n = {n}, got {c}; c counts the passing samples among the n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))
