"""Positions of cached tokens, for keys that are cached before RoPE in caches that keep no positions.

transformers' caches hold keys alone. Which of their tokens are padding is in the attention mask, which every forward
pass gets as a whole, and tokens that are no padding follow each other. Scores depend on differences of positions only,
so that cached tokens are counted back from the first new one, whatever number its position has.
"""

from __future__ import annotations

import torch
from torch import Tensor


def key_positions(position_ids: Tensor, visible: Tensor | None, cached: int | Tensor, slots: int) -> Tensor:
    """Positions of all keys that a layer reads: the cached ones, and those of this pass.

    Args:
        position_ids: ``[rows or 1, tokens]``, of this pass.
        visible: From `visible_slots`.
        cached: Slots in use before this pass; a tensor for static caches.
        slots: That the layer reads, at least ``cached + tokens``.

    Returns:
        ``[rows or 1, slots]``, int64; any numbers for padding and for unused slots.
    """
    tokens = position_ids.shape[1]
    index = torch.arange(slots, device=position_ids.device) - cached  # among the tokens of this pass
    is_new = (index >= 0) & (index < tokens)
    if visible is None:
        counted = position_ids[:, :1] + index
    else:
        attended = torch.nn.functional.pad(visible[:, :slots].long(), (0, max(0, slots - visible.shape[1])))
        position_ids = position_ids.expand(len(attended), -1)
        count = attended.cumsum(-1)
        first = (attended * is_new).argmax(-1, keepdim=True)  # new and no padding
        anchor = position_ids.gather(1, (first - cached).clamp(0, tokens - 1))
        counted = anchor + count - count.gather(1, first)
    given = position_ids.gather(1, index.clamp(0, tokens - 1).expand(len(position_ids), -1))
    return torch.where(is_new, given, counted)


def visible_slots(mask: Tensor | dict[str, Tensor | None] | None, dropped: int = 0) -> Tensor | None:
    """Mask of slots that are not padding, ``[rows, slots]``, from any mask that a forward pass takes.

    Args:
        mask: ``[rows, all tokens]``; what transformers makes of it for a static cache, ``[rows, 1, tokens, slots]`` of
            bool or as numbers to add to scores, or a dictionary with this for the one kind of layers; or None.
        dropped: Oldest tokens that a cache no longer has a slot for.

    Raises:
        ValueError: A mask of another shape.
    """
    if isinstance(mask, dict):
        (mask,) = mask.values()
    if mask is None or mask.dim() == 2:
        return None if mask is None else mask[:, dropped:] != 0
    if mask.dim() != 4:
        raise ValueError(
            f"a slim model takes positions from attention masks of 2 or 4 dimensions, got {mask.dim()}; pass a mask "
            "[rows, tokens] of 0 and 1"
        )
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    return seen.any(1)  # not the last token's alone, which may see less than those before it through a window


def require_counted(position_ids: Tensor, visible: Tensor | None) -> None:
    """Refuse positions that later passes could not count back.

    Args:
        position_ids: ``[rows or 1, tokens]``, of a pass over several tokens.
        visible: ``[rows, tokens]``, which of these are no padding; None for all.

    Raises:
        ValueError: The tokens that are no padding do not follow each other.
    """
    skips = position_ids.diff(dim=-1) != 1
    if visible is not None:
        skips = skips & visible[:, 1:] & visible[:, :-1]
    if bool(skips.any()):
        raise ValueError(
            "a slim model counts the positions of cached tokens from the attention mask, so position_ids must rise by "
            "1 from token to token, and these do not; pass sequences as rows of their own, or use_cache=False"
        )
