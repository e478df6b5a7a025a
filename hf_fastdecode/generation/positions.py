"""Positions as models take them: one number per token, or several planes, such as time, height and width (M-RoPE)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Positions(NamedTuple):
    """Positions of a batch of prompts.

    Attributes:
        ids: ``[rows or 1, width]``, or ``[planes, rows or 1, width]`` where planes differ; None for those of the mask.
        planes: Number of planes that the model takes; 0 for positions without planes.
    """

    ids: Tensor | None
    planes: int = 0

    @property
    def shape(self) -> list[int]:
        """Shape of the positions as the model takes them."""
        reduced_to_one = self.planes and not self.differ
        return [] if self.ids is None else [*([self.planes] if reduced_to_one else []), *self.ids.shape]

    @property
    def differ(self) -> bool:
        """Whether planes differ, so that tokens have no single position."""
        return self.ids is not None and self.ids.dim() == 3


def reduced(position_ids: Tensor | None, attention_mask: Tensor | None) -> Positions:
    """Reduce planes to one where all are equal, as for prompts of text alone.

    Args:
        position_ids: ``[rows or 1, width]`` or ``[planes, rows or 1, width]``, or None.
        attention_mask: ``[rows, width]``, or None; what padding has is left aside.
    """
    if position_ids is None or position_ids.dim() != 3:
        return Positions(position_ids)
    first = position_ids[0]
    equal = position_ids == first
    if attention_mask is not None and attention_mask.shape[-1] == position_ids.shape[-1]:
        equal = equal | (attention_mask == 0)
    return Positions(first if bool(equal.all()) else position_ids, len(position_ids))
