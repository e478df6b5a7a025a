"""Keys that are rounded so that the values which follow from them change little (this project's own).

A cache holds keys on a grid, and values follow from them through M, which amplifies errors in few directions. Nearest
grid points leave the errors in all directions alike. Rounding coordinates one after another, later ones making up for
what M makes of earlier errors, moves the error into directions that M ignores: keys move by a little more than with
rounding to nearest, values by far less. What reads the cache need not know.

It costs the writer half a product of keys with an e-by-e matrix, in e / `AT_ONCE` dependent steps; for many tokens at
a time, as in prefill, these are matrix products. M must be stored in fp32: in fp16 its own error can be the larger.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .feedback_rounding import RoundingFeedback, round_with_feedback, rounding_feedback, shrunk_gram

AT_ONCE: Final = 8
"""Coordinates rounded per step; on trained layers errors are up to a sixth above 1 at a time; with 32, twice."""

KEY_SHARE: Final = 0.03
"""Weight of the keys' own error, which scores see, as a share of the mean of what M makes of it."""


def compensated_key_feedback(from_keys: Tensor) -> RoundingFeedback:
    """The feedback for keys that are multiplied by `from_keys`, M of ``[e, e_v]``, as it is stored."""
    matrix = from_keys.double()
    return rounding_feedback(shrunk_gram(matrix @ matrix.mT, KEY_SHARE))


def compensated_keys(keys: Tensor, feedback: RoundingFeedback, dtype: torch.dtype) -> Tensor:
    """Round keys.

    Args:
        keys: ``[tokens, e]``, what is to be cached; tokens are independent of each other.
        feedback: For them.
        dtype: Of the cache.

    Returns:
        ``[tokens, e]`` in `dtype`.
    """
    rounded = round_with_feedback(keys.mT, feedback, lambda rows, _: rows.to(dtype).double(), at_once=AT_ONCE)
    return rounded.mT.to(dtype)
