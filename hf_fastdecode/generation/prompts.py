"""From a batch of prompts to a forest: which runs of tokens are shared, which are stored already, which to prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..attention.forest import Forest, Path, Span
from ..cache.layer import PrefillItem
from ..cache.shared import SharedContextCache


@dataclass(frozen=True)
class PromptGroup:
    """Neighbouring rows with one prompt.

    Attributes:
        tokens: ``[length]`` int64 on the CPU, without padding.
        count: Number of rows.
    """

    tokens: Tensor
    count: int


@dataclass(frozen=True)
class PromptPlan:
    """What to store and who attends to it.

    Attributes:
        forest: Rows over spans, stored and new.
        items: New runs of tokens in the order to prefill them: parents come first.
        new_tokens: ``[length]`` ids of the new runs end to end: the contents of the new segment.
        known_lengths: For each group of rows, how many of its tokens the cache held.
        ends: For each group of rows, where among the new tokens its last one is; None when it is not new.
    """

    forest: Forest
    items: tuple[PrefillItem, ...]
    new_tokens: Tensor
    known_lengths: tuple[int, ...]
    ends: tuple[int | None, ...]


def group_prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[PromptGroup]:
    """Group neighbouring rows with equal prompts and drop the padding.

    Args:
        input_ids: ``[rows, length]``.
        attention_mask: ``[rows, length]``, nonzero for real tokens; None when all are.
    """
    same = (input_ids[1:] == input_ids[:-1]).all(1)
    if attention_mask is not None:
        attention_mask = attention_mask.bool()
        same &= (attention_mask[1:] == attention_mask[:-1]).all(1)
    starts = [0, *((~same).nonzero().flatten() + 1).tolist()]
    ids = input_ids[starts].cpu()
    mask = attention_mask[starts].cpu() if attention_mask is not None else torch.ones_like(ids, dtype=torch.bool)
    stops = [*starts[1:], len(input_ids)]
    return [
        PromptGroup(ids[index][mask[index]], stop - start)
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def plan_prompts(groups: Sequence[PromptGroup], cache: SharedContextCache, *, min_shared_tokens: int) -> PromptPlan:
    """Find what the prompts share with each other and with what the cache holds.

    Neighbouring prompts that begin with the same `min_shared_tokens` or more share nodes, recursively (Hydragen,
    section 3.3). Tokens that a row of the cache holds already are taken from it.

    Args:
        groups: The prompts in row order.
        cache: Its next segment will hold the new tokens.
        min_shared_tokens: Shortest common run, at any depth, that is worth a node of its own.
    """
    prompts = [group.tokens for group in groups]
    known = known_prefixes(groups, stored_paths(cache))
    segment = len(cache.segment_tokens)
    paths: list[list[Span]] = [[] for _ in prompts]
    items: list[PrefillItem] = []
    new_tokens: list[Tensor] = []
    ends: list[int | None] = [None] * len(prompts)
    stored = 0
    for run in sorted(_common_runs(prompts, min_shared_tokens), key=lambda run: (run.depth, run.first)):
        known_path, known_length = known[run.first]
        cached = min(max(known_length - run.start, 0), run.stop - run.start)
        spans = list(_path_slice(known_path, run.start, run.start + cached))
        if fresh := run.stop - run.start - cached:
            span = Span(segment, stored, fresh)
            items.append(PrefillItem(span, context=(*paths[run.first], *spans)))
            new_tokens.append(prompts[run.first][run.stop - fresh : run.stop])
            spans.append(span)
            stored += fresh
        for index in range(run.first, run.last + 1):
            paths[index].extend(spans)
            if fresh and run.stop == len(prompts[index]):
                ends[index] = stored - 1
    row_paths = [tuple(path) for path, group in zip(paths, groups, strict=True) for _ in range(group.count)]
    tokens = torch.cat(new_tokens) if new_tokens else torch.empty(0, dtype=torch.long, device="cpu")
    return PromptPlan(
        forest=Forest.from_paths(row_paths),
        items=tuple(items),
        new_tokens=tokens,
        known_lengths=tuple(length for _, length in known),
        ends=tuple(ends),
    )


@dataclass(frozen=True)
class _Run:
    """Tokens ``start .. stop - 1`` of the prompts ``first .. last``, equal in all of them."""

    first: int
    last: int
    start: int
    stop: int
    depth: int


def _common_runs(prompts: Sequence[Tensor], min_shared: int) -> list[_Run]:
    """The nodes of the prompts' prefix tree, over neighbouring prompts."""
    # What three prompts share is the least of what neighbours share, so neighbours are compared, once.
    shared = [_common_prefix(left, right) for left, right in pairwise(prompts)]
    runs: list[_Run] = []
    work = [(0, len(prompts) - 1, 0, 0)] if prompts else []
    while work:
        first, last, start, depth = work.pop()
        while first <= last:
            stop_at = first
            while stop_at < last and shared[stop_at] - start >= min_shared:
                stop_at += 1
            alone = stop_at == first
            stop = len(prompts[first]) if alone else min(shared[first:stop_at])
            if stop > start:
                runs.append(_Run(first, stop_at, start, stop, depth))
            if not alone:
                work.append((first, stop_at, stop, depth + 1))
            first = stop_at + 1
    return runs


def _common_prefix(left: Tensor, right: Tensor) -> int:
    length = min(len(left), len(right))
    different = (left[:length] != right[:length]).nonzero()
    return int(different[0]) if len(different) else length


StoredPath = tuple[Path, Tensor]
"""A path of a cache, and the ids of its tokens: ``[length]`` int64 on the CPU."""


def stored_paths(cache: SharedContextCache) -> list[StoredPath]:
    """The distinct paths of a cache's rows."""
    return [(path, cache.path_tokens(path)) for path in dict.fromkeys(cache.forest.paths)]


def known_prefixes(groups: Sequence[PromptGroup], stored: Sequence[StoredPath]) -> list[tuple[Path, int]]:
    """For each group of rows, the stored path that begins with most of its tokens, and with how many."""
    return [_longest_known(group.tokens, stored) for group in groups]


def _longest_known(tokens: Tensor, stored_rows: Sequence[StoredPath]) -> tuple[Path, int]:
    """Of rows of a cache, paths with their tokens, the one that begins with the most of these: its path, how many."""
    best: tuple[Path, int] = ((), 0)
    for path, known in stored_rows:
        length = _common_prefix(tokens, known)
        if length > best[1]:
            best = path, length
    return best


def _path_slice(path: Path, start: int, stop: int) -> Path:
    """The spans of tokens ``start .. stop - 1`` of a path."""
    spans: list[Span] = []
    offset = 0
    for span in path:
        part = span[max(0, start - offset) : max(0, stop - offset)]
        if part.length:
            spans.append(part)
        offset += span.length
    return tuple(spans)
