"""RoPE's tables as the slim decode kernels take them; without Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TURNS = 64
"""Positions in the table of rotations within a tile, whose largest size it is, of the kernel on clusters."""


class RotaryTables(NamedTuple):
    """RoPE of cached keys: "rotate half" over the first ``rotary_dim`` numbers of a head.

    Attributes:
        cos: ``[rows or 1, slots, rotary_dim / 2]`` fp32, contiguous.
        sin: Likewise.
        turns: ``[64, 2, rotary_dim / 2]`` fp32, contiguous: cosines and sines of the rotations within a tile, by 0
            to 63 positions; None where a row's positions may not rise by one from slot to slot.
    """

    cos: Tensor
    sin: Tensor
    turns: Tensor | None = None

    @classmethod
    def of(cls, frequencies: Tensor, positions: Tensor) -> RotaryTables:
        """Tables of consecutive positions.

        Args:
            frequencies: ``[rotary_dim / 2]``: radians per position.
            positions: ``[rows or 1, slots]``, rising by one from slot to slot.
        """
        angles = positions[..., None].double() * frequencies.double()
        turns = torch.arange(TURNS, device=frequencies.device)[:, None].double() * frequencies.double()
        return cls(angles.cos().float(), angles.sin().float(), torch.stack([turns.cos(), turns.sin()], 1).float())
