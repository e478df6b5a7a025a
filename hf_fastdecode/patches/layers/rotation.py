"""Positions of cached keys, and their RoPE: keys are rotated when they are read, or when they are cached.

transformers' caches hold no positions. The attention mask, which every forward pass gets as a whole, says which tokens
are padding, and the positions of the others rise by 1. Scores depend on differences of positions only, so cached
tokens are counted back from the first new one, whatever its position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...attention.interface import register_without_effect
from ...cache.captured import CapturedCache
from ...cache.shared import SharedContextCache, require_next
from ...conversion.fit.attention import Tables
from ...kernels.slim_decode.inputs import TURNS, RotaryTables

ROTATION: Final = "slim_rotation"
"""Keyword argument of all attention layers, slim or not: a `Rotation`."""

register_without_effect(ROTATION)

OF_SLOTS: Final = "rotary tables of slots"
"""Name of a captured step's constant: `RotaryTables` of all slots that suffixes may have."""


class Rotation(NamedTuple):
    """Positions of a pass's tokens, ``[rows or 1, tokens]``, and tables.

    Attributes:
        keys: Tables of all keys that layers read in this pass; None where positions are cached with the keys.
        own_tokens: Tables of this pass's tokens counted from their suffixes' first tokens, in a shared-context cache.
        kernel: `keys` for `slim_decode`, in eager steps where it may run.
    """

    positions: Tensor
    tokens: Tables
    keys: Tables | None
    own_tokens: Tables | None = None
    kernel: RotaryTables | None = None


def forest_rotation(
    tables: Callable[[Tensor], Tables], cache: SharedContextCache, position_ids: Tensor, *, unrotates: bool
) -> Rotation:
    """Tables for a pass over a shared-context cache, by `tables` of positions ``[rows or 1, tokens]``.

    Prefill rotates the keys of its tokens, a step those of suffixes. Scores depend on differences of positions only:
    counted from a suffix's first token, one table serves the keys of all rows. Suffixes whose keys are cached after
    RoPE (`unrotates`) hold their positions; otherwise ValueError, in a pass outside generation, for positions that do
    not continue those of each row.
    """
    tokens = tables(position_ids)
    if cache.state.current.items:
        return Rotation(position_ids, tokens, tokens)
    if unrotates:
        return Rotation(position_ids, tokens, None, tokens)
    if cache.checks_masks:
        require_next(cache, position_ids)
    before, (_, count), device = cache.state.suffixes.lengths, position_ids.shape, position_ids.device
    first = before.longest if before.per_row is None else before.per_row.to(device)[:, None]
    positions = (first + torch.arange(count, device=device)).view(-1, count)
    slots = cache.state.division.suffix_shard.stored_tokens(0, before.longest + count).to(device)[None]
    if not takes_kernels(cache.state.backend, device):
        return Rotation(position_ids, tokens, tables(slots), tables(positions))
    keys, kernel = _of_slots(tables, slots)
    return Rotation(position_ids, tokens, keys, tables(positions), kernel)


def cache_rotation(
    tables: Callable[[Tensor], Tables], query_positions: Tensor, key_positions: Tensor | None
) -> Rotation:
    """Tables for a pass over one of transformers' caches, or none; `key_positions` is None where they are cached."""
    tokens = tables(query_positions)
    if key_positions is None:
        return Rotation(query_positions, tokens, None)
    is_step = query_positions.shape[1] == 1 and takes_kernels("auto", query_positions.device)
    if not is_step or torch.compiler.is_compiling():
        return Rotation(query_positions, tokens, tables(key_positions))
    keys, kernel = _of_slots(tables, key_positions)
    return Rotation(query_positions, tokens, keys, kernel=kernel)


def captured_rotation(tables: Callable[[Tensor], Tables], cache: CapturedCache, position_ids: Tensor) -> Rotation:
    """Tables for a captured step; those of slots are made once, as the constant `OF_SLOTS`."""

    def of_slots() -> RotaryTables:
        slots = cache.division.suffix_shard.positions(cache.capacity)
        return _of_slots(tables, slots.to(position_ids.device)[None])[1]

    cache.constant(OF_SLOTS, of_slots)
    return Rotation(position_ids, tables(position_ids), None, tables(cache.new.positions[:, None]))


def takes_kernels(backend: str, device: torch.device) -> bool:
    """Whether a backend attends by kernels on a device, if they take the layer."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


def _of_slots(tables: Callable[[Tensor], Tables], slots: Tensor) -> tuple[Tables, RotaryTables]:
    """Tables of slots' positions ``[rows or 1, slots]``, for PyTorch's operators and for `slim_decode`."""
    turns = torch.arange(TURNS, device=slots.device).expand(len(slots), -1)
    cos, sin = tables(torch.cat([slots, turns], 1))
    keys = cos[:, : slots.shape[1]], sin[:, : slots.shape[1]]
    half = cos.shape[-1] // 2  # for the kernel: "rotate half" has every number twice, and other pairs do not use it
    cos_of_turns, sin_of_turns = (table[0, slots.shape[1] :, :half] for table in (cos, sin))
    factor = cos_of_turns[:1]  # of position 0, by which YaRN multiplies tables
    kernel = torch.stack([cos_of_turns / factor, sin_of_turns / factor], 1).contiguous()
    return keys, RotaryTables(keys[0][..., :half].contiguous(), keys[1][..., :half].contiguous(), kernel)


def key_positions(position_ids: Tensor, visible: Tensor | None, cached: int | Tensor, slots: int) -> Tensor:
    """Positions of all keys that a layer reads, the cached ones and those of this pass: ``[rows or 1, slots]``, int64.

    They are arbitrary for padding and unused slots. `position_ids` are ``[rows or 1, tokens]``, of this pass,
    `visible` is from `visible_slots`, `cached` the slots in use before (a tensor for static caches), and `slots` those
    that the layer reads, at least ``cached + tokens``.
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
        first = (attended * is_new).argmax(-1, keepdim=True)  # first new token that is not padding
        anchor = position_ids.gather(1, (first - cached).clamp(0, tokens - 1))
        counted = anchor + count - count.gather(1, first)
    given = position_ids.gather(1, index.clamp(0, tokens - 1).expand(len(position_ids), -1))
    return torch.where(is_new, given, counted)


def visible_slots(mask: Tensor | dict[str, Tensor | None] | None, dropped: int = 0) -> Tensor | None:
    """Mask of slots that are not padding, ``[rows, slots]``, from any mask that a forward pass takes.

    The mask is ``[rows, all tokens]``; transformers' form for static caches, ``[rows, 1, tokens, slots]``, bool or to
    be added to scores, also in a dictionary with one kind of layers; or None; else a ValueError. `dropped` is the
    number of oldest tokens that a cache no longer has a slot for.
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
    return seen.any(1)  # of all tokens, as the last one may see less than those before it through a window


def require_counted(position_ids: Tensor, visible: Tensor | None) -> None:
    """Raise ValueError for positions that later passes could not count back from the attention mask.

    They are ``[rows or 1, tokens]``, of several tokens; `visible` is ``[rows, tokens]``, False for padding, or None.
    """
    skips = position_ids.diff(dim=-1) != 1
    if visible is not None:
        skips = skips & visible[:, 1:] & visible[:, :-1]
    if bool(skips.any()):
        raise ValueError(
            "a slim model counts the positions of cached tokens from the attention mask, so position_ids must rise by "
            "1 from token to token, and these do not; pass sequences as separate rows, or use_cache=False"
        )
