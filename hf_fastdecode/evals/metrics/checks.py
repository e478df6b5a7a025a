"""Checks of what the metrics are given."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized


def check_pool(passed: Sized, keys: Sized) -> None:
    """Refuse an empty pool, and one whose columns differ in length.

    Raises:
        ValueError: It is.
    """
    if not len(passed):
        raise ValueError("a pool must hold at least one sample, got none; leave the task out")
    if len(keys) != len(passed):
        raise ValueError(f"there must be one key a sample, got {len(keys)} keys for {len(passed)} samples")


def checked_scores(scores: Sequence[float | None], samples: int) -> list[float]:
    """The scores, one a sample, all known.

    Raises:
        ValueError: Their number is not that of the samples, or one is missing or not a number.
    """
    if len(scores) != samples:
        raise ValueError(f"there must be one score a sample, got {len(scores)} scores for {samples} samples")
    known = [score for score in scores if score is not None and not math.isnan(score)]
    if len(known) < samples:
        raise ValueError(
            f"every sample needs a log-probability to be ranked by, got none for {samples - len(known)} of {samples} "
            "samples; score the samples with the model again, or rank without log-probabilities"
        )
    return known


def check_m(m: int) -> None:
    """Refuse a number of candidates below 1.

    Raises:
        ValueError: It is.
    """
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}; it counts the candidates that are run")
