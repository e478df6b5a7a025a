"""Positions and checks of a forward pass that a user runs over a shared-context cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .shared import SharedContextCache


def next_positions(cache: SharedContextCache, queries: int) -> Tensor:
    """Positions of the next tokens of every row: ``[rows, queries]`` int64, on the CPU."""
    first = torch.tensor(cache.forest.context_lengths, dtype=torch.long, device="cpu") + cache.suffix_length
    return first[:, None] + torch.arange(queries, device="cpu")


def check_mask(cache: SharedContextCache, mask: Any, queries: int) -> None:
    """Refuse a mask that hides tokens: rows see all of their own.

    Args:
        cache: The cache.
        mask: ``attention_mask`` of a forward pass, ``[rows, tokens]``, nonzero for what is seen; or anything else,
            which attention itself refuses.
        queries: Tokens that the pass appends to every row.

    Raises:
        ValueError: It hides more than the padding in front of a row.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()):
        return
    hidden = (mask == 0).cpu()
    own = torch.tensor(cache.forest.context_lengths, device="cpu") + cache.suffix_length + queries
    in_front = hidden.long().cumprod(1).sum(1)
    if len(own) != len(hidden) or bool((hidden.sum(1) > in_front).any() or (in_front > mask.shape[1] - own).any()):
        raise ValueError(
            "attention_mask hides tokens of the cache, of which every row sees its own; leave the mask out, or "
            "hide nothing but padding on the left"
        )
