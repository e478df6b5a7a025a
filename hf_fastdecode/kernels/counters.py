"""Arrival counters of products whose width is cut into parts: the last program of a tile to arrive adds them up."""

from __future__ import annotations

import torch
from torch import Tensor

MOST_COUNTERS = 1024
"""Tiles whose width is cut into parts; more tiles keep every multiprocessor busy whole."""


def counters(device: torch.device) -> Tensor:
    """Arrival counters of tiles or of programs' parts, ``[MOST_COUNTERS]`` int32 zeros.

    Successive launches on a stream may use the same.
    """
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
