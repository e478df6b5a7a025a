"""Arguments, position ids and mask checks for a user's own forward pass over a shared-context cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .shared import SharedContextCache


def named_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward pass by name; raises TypeError if one is given twice, or too many are given."""
    if len(args) > len(names):
        raise TypeError(f"forward() takes {len(names)} positional arguments but {len(args)} were given")
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"forward() got multiple values for argument {min(twice)!r}")
    return given | kwargs


def next_positions(cache: SharedContextCache, queries: int) -> Tensor:
    """Position ids of each row's next tokens: ``[rows, queries]`` int64, on the device that knows suffix lengths.

    Raises ValueError behind images whose tokens have positions in planes.
    """
    if not cache.state.counts_tokens:
        raise ValueError(
            "positions behind the images of this cache are not those of counted tokens; pass position_ids, or the "
            "whole prompt with its images to generate"
        )
    lengths = cache.state.suffixes.lengths
    own = torch.tensor(lengths.longest, device="cpu") if lengths.per_row is None else lengths.per_row
    width = cache.state.padded_width
    before = cache.forest.context_lengths if width is None else [width] * cache.rows
    contexts = torch.tensor(before, dtype=torch.long, device="cpu").to(own.device)
    return (contexts + own)[:, None] + torch.arange(queries, device=own.device)


def check_mask(cache: SharedContextCache, mask: Any, queries: int) -> None:
    """Reject masks that hide anything but left padding: each row attends to all of its own tokens.

    Args:
        mask: ``attention_mask`` of the pass, ``[rows, tokens]``, nonzero for visible tokens. Other types and masks of
            four dimensions are left to the attention function, which rejects them.
        queries: Tokens the pass appends to each row.

    Raises:
        ValueError: The mask hides more than left padding, or any tokens of an empty cache, or is not of its shape.
    """
    if not isinstance(mask, Tensor) or mask.dim() == 4 or (mask.dim() == 2 and bool(mask.all())):
        return
    if mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [rows, tokens], got shape {list(mask.shape)}; omit it for no padding"
        )
    if not cache.rows:
        raise ValueError(
            "an empty SharedContextCache takes no padded prompts; make it with hf_fastdecode.prefill(model, ...)"
        )
    hidden = (mask == 0).cpu()
    own = torch.tensor(cache.forest.context_lengths, device="cpu") + cache.suffix_lengths + queries
    in_front = hidden.long().cumprod(1).sum(1)
    if len(own) != len(hidden) or bool((hidden.sum(1) > in_front).any() or (in_front > mask.shape[1] - own).any()):
        raise ValueError(
            "attention_mask hides tokens of the cache, but every row attends to all of its own; omit the mask, or "
            "mask only left padding"
        )


def require_next(cache: SharedContextCache, position_ids: Tensor) -> None:
    """Raise ValueError for positions ``[rows or 1, queries]`` other than `next_positions`.

    It is for layers that rotate suffixes by their places in them.
    """
    rows, queries = position_ids.shape
    if cache.rows not in (0, 1, rows) and rows != 1:
        return  # whose number of rows the cache refuses
    expected = next_positions(cache, queries) if cache.rows else torch.arange(queries, device="cpu")
    if bool((position_ids != expected.to(position_ids.device)).any()):
        raise ValueError(
            "this model counts the positions of cached tokens, so position_ids must follow each row's tokens and "
            "rise by 1, and these do not; omit them, or run the ordinary model"
        )
