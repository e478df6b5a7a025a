"""How many rows may decode at once, by the memory that is free before their suffixes are allocated.

A row takes what its layers store of each new token, and some numbers per entry of the vocabulary for its logits. Rows
are counted with room for as many tokens as they may draw, but no more than `_EXPECTED`: most end before a large
`max_length`. Rows that draw more are counted again whenever suffixes grow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...cache.shared import SharedContextCache
from ..steps.graph_capture import free_memory

_EXPECTED = 1024
"""New tokens of a row that its room is counted with, if it may draw more."""

_USED_SHARE = 0.9
"""Share of free memory that rows may take; the rest is for the passes' activations, captures, and small pieces."""

_LOGIT_BYTES = 16
"""Bytes per row and entry of the vocabulary: logits of the prompt and of a step, and processed ones in fp32."""

_UNCOUNTED_SHARE = 64
"""Rows that need less than this fraction of a device's memory are not counted, which would ask the driver."""


class Logits(NamedTuple):
    """Where logits are, and their number per row."""

    device: torch.device
    vocabulary: int


def usable_memory(device: torch.device) -> int | None:
    """Free bytes that rows may take on a device; None where they are not known, as on a CPU."""
    return int(_USED_SHARE * free_memory(device)) if device.type == "cuda" else None


def rows_that_fit(cache: SharedContextCache, rows: int, logits: Logits, new_tokens: int, *, beside: int = 0) -> int:
    """Of so many rows over the nodes of a cache, how many fit in memory at once; at least 1.

    Args:
        new_tokens: Most tokens that a row draws.
        beside: Further bytes on the device of the logits, however many rows decode.
    """
    per_row, held = dict[torch.device, int](), dict[torch.device, int]()
    room = cache.state.suffix_room(min(new_tokens, _EXPECTED))
    for layer in cache.attention_layers:
        device, storage = layer.device, layer.storage
        per_row[device] = per_row.get(device, 0) + room * storage.suffix_bytes_per_token
        held[device] = held.get(device, 0) + storage.suffix_bytes  # which are given up, should rows not fit
    for states in cache.state_layers:
        per_row[states.device] = per_row.get(states.device, 0) + states.row_bytes
    per_row[logits.device] = per_row.get(logits.device, 0) + _LOGIT_BYTES * logits.vocabulary
    fit = rows
    for device, needed in per_row.items():
        taken = beside if device == logits.device else 0
        usable = usable_memory(device) if _counts(device, rows * needed + taken) else None
        if usable is not None:
            fit = min(fit, max(1, (usable + held.get(device, 0) - taken) // needed))
    return fit


def suffixes_may_grow(cache: SharedContextCache, tokens: int) -> bool:
    """Whether memory suffices to make room for `tokens` tokens in each suffix."""
    more, largest = dict[torch.device, int](), dict[torch.device, int]()
    room = cache.state.suffix_room(tokens)
    most = None if cache.state.max_suffix is None else cache.state.suffix_room(cache.state.max_suffix)
    for layer in cache.attention_layers:
        storage, device = layer.storage, layer.device
        per_token = cache.rows * storage.suffix_bytes_per_token
        tokens_more = storage.grown_capacity(room, most) - storage.capacity
        more[device] = more.get(device, 0) + per_token * tokens_more
        largest[device] = max(largest.get(device, 0), per_token * storage.capacity)  # freed once it is copied
    for device, grown in more.items():
        needed = grown + largest[device]
        usable = usable_memory(device) if _counts(device, needed) else None
        if usable is not None and needed > usable:
            return False
    return True


def _counts(device: torch.device, needed: int) -> bool:
    """Whether so many bytes are worth to ask the device for its free memory."""
    whole = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return needed * _UNCOUNTED_SHARE >= whole
