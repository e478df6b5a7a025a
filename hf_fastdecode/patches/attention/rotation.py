"""RoPE of slim layers: of keys when they are read, or when they are cached, and back when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...attention.interface import register_without_effect
from ...cache.captured import CapturedCache
from ...cache.direct_pass import require_next
from ...cache.shared import SharedContextCache
from ...kernels.slim_decode.tables import TURNS, RotaryTables

ROTATION: Final = "slim_rotation"
"""Argument of the attention layers: a `Rotation`; those that keep keys and values get it too."""

register_without_effect(ROTATION)

OF_SLOTS: Final = "rotary tables of slots"
"""Constant of a captured step: `RotaryTables` of all slots that suffixes captured in place may have."""

Tables = tuple[Tensor, Tensor]
"""cos and sin of tokens, each ``[rows or 1, tokens, rotated coordinates]`` in fp32."""


class Rotation(NamedTuple):
    """Tables of one forward pass.

    Attributes:
        positions: Of this pass's tokens, ``[rows or 1, tokens]``.
        tokens: Tables of these positions.
        keys: Of all keys that layers read in this pass; None where positions are cached with the keys.
        own_tokens: For suffixes of a shared-context cache: of this pass's tokens, at the positions that suffixes
            count from.
        kernel: The tables of ``keys`` for `slim_decode`, in eager steps over a shared-context cache where it may run.
    """

    positions: Tensor
    tokens: Tables
    keys: Tables | None
    own_tokens: Tables | None = None
    kernel: RotaryTables | None = None


def forest_rotation(
    tables: Callable[[Tensor], Tables], cache: SharedContextCache, position_ids: Tensor, *, unrotates: bool
) -> Rotation:
    """Tables for a pass over a shared-context cache.

    Prefill rotates the keys of its own tokens. A step rotates those of suffixes, and scores depend on differences of
    positions: counted from a suffix's first token, one table serves the keys of all rows. Suffixes whose keys are
    cached after RoPE hold their positions.

    Args:
        tables: Makes those of positions ``[rows or 1, tokens]``.
        cache: The cache.
        position_ids: ``[rows or 1, tokens]``, of this pass.
        unrotates: Whether keys are cached after RoPE.

    Raises:
        ValueError: In a user's own pass, positions that do not follow those of each row's tokens, unless they are
            cached.
    """
    tokens = tables(position_ids)
    if cache.state.packed:
        return Rotation(position_ids, tokens, tokens)
    if unrotates:
        return Rotation(position_ids, tokens, None, tokens)
    if cache.checks_masks:
        require_next(cache, position_ids)
    before, (_, count), device = cache.state.suffixes.lengths, position_ids.shape, position_ids.device
    first = before.longest if before.per_row is None else before.per_row.to(device)[:, None]
    places = (first + torch.arange(count, device=device)).view(-1, count)
    slots = torch.arange(before.longest + count, device=device)[None]
    if not takes_kernels(cache.state.backend, device):
        return Rotation(position_ids, tokens, tables(slots), tables(places))
    keys, kernel = _of_slots(tables, slots)
    return Rotation(position_ids, tokens, keys, tables(places), kernel)


def captured_rotation(tables: Callable[[Tensor], Tables], cache: CapturedCache, position_ids: Tensor) -> Rotation:
    """Tables for a captured step, see `forest_rotation`; those of slots are made once, as the constant `OF_SLOTS`.

    Args:
        tables: Makes those of positions ``[rows or 1, tokens]``.
        cache: The cache.
        position_ids: ``[rows, 1]``, of this step.
    """

    def of_slots() -> RotaryTables:
        return _of_slots(tables, torch.arange(cache.capacity, device=position_ids.device)[None])[1]

    cache.constant(OF_SLOTS, of_slots)
    return Rotation(position_ids, tables(position_ids), None, tables(cache.before[:, None]))


def takes_kernels(backend: str, device: torch.device) -> bool:
    """Whether kernels attend to what is cached on a device, where they can."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


def _of_slots(tables: Callable[[Tensor], Tables], slots: Tensor) -> tuple[Tables, RotaryTables]:
    """Tables of slots ``[1, slots]``, for PyTorch's operators and for `slim_decode`."""
    turns = torch.arange(TURNS, device=slots.device)[None]
    cos, sin = tables(torch.cat([slots, turns], 1))
    keys = cos[:, : slots.shape[1]], sin[:, : slots.shape[1]]
    return keys, _for_kernel(keys, (cos[0, slots.shape[1] :], sin[0, slots.shape[1] :]))


def _for_kernel(keys: Tables, turned: Tables) -> RotaryTables:
    """Tables of half the width, since "rotate half" has every number twice; layers with other pairs do not use this.

    Args:
        keys: Of the slots.
        turned: Of the turns, of which the first cosine is the factor by which YaRN multiplies tables.
    """
    half = keys[0].shape[-1] // 2
    cos, sin = (table[:, :half] for table in turned)
    turns = torch.stack([cos / cos[:1], sin / cos[:1]], 1)
    return RotaryTables(keys[0][..., :half].contiguous(), keys[1][..., :half].contiguous(), turns.contiguous())


def rotate(x: Tensor, tables: Tables, *, interleaved: bool) -> Tensor:
    """RoPE of the first coordinates.

    Args:
        x: ``[rows, heads, tokens, head_dim]``; one row or token is rotated to all positions.
        tables: Of as many coordinates as are rotated; the others pass.
        interleaved: Pair coordinates 2 i and 2 i + 1 (GPT-J, Cohere), not i and i + n of 2 n (Llama).
    """
    cos, sin = (table[:, None] for table in tables)
    rotated = cos.shape[-1]
    first = x[..., :rotated]
    # Each pair of coordinates, turned by a right angle.
    if interleaved:
        turned = torch.stack([-first[..., 1::2], first[..., ::2]], -1).flatten(-2)
    else:
        low, high = first.chunk(2, -1)
        turned = torch.cat([-high, low], -1)
    first = first * cos + turned * sin
    if rotated == x.shape[-1]:
        return first
    return torch.cat([first, x[..., rotated:].expand(*first.shape[:-1], -1)], -1)


def unrotate(x: Tensor, tables: Tables, *, interleaved: bool) -> Tensor:
    """Inverse of `rotate`, with its arguments; division undoes attention factors in the tables, as YaRN's."""
    cos, sin = (table.to(x.dtype) for table in tables)
    norm = cos.square() + sin.square()
    return rotate(x, (cos / norm, -sin / norm), interleaved=interleaved)
