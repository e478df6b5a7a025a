"""Batches of two processes whose rows share other numbers of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 3
SHARED = ((40, 3), (56, 5))
"""Tokens and rows that share them, by rank; the last step of rank 0 has one row, which has nothing to share."""


def batch(rank: int, step: int) -> dict[str, Tensor]:
    """Rows of one prompt, padded on the right."""
    shared, rows = SHARED[rank]
    rows = 1 if (rank, step) == (0, STEPS - 1) else rows
    generator = torch.Generator().manual_seed(10 * rank + step)
    prompt, width = torch.randint(3, 97, (shared,), generator=generator), shared + 3 * rows
    ids, mask = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    for row in range(rows):
        own = torch.randint(3, 97, (3 * row + 2,), generator=generator)
        ids[row, : shared + len(own)] = torch.cat([prompt, own])
        mask[row, : shared + len(own)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
