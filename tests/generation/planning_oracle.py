"""Planning by comparing everything with everything: the specification that `generation.prompts` is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Node, Path, Span
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.cache.state import PrefillItem
from hf_fastdecode.generation.prompts.prompt_plan import PromptPlan

Tokens = tuple[int, ...]
Address = tuple[int, int]
"""Segment of a stored token, and its place there."""


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def group_prompts(input_ids: Tensor, mask: Tensor | None) -> list[tuple[Tokens, int]]:
    groups: list[tuple[object, Tokens, int]] = []
    for index, row in enumerate(input_ids.tolist()):
        kept = [1] * len(row) if mask is None else mask[index].tolist()
        prompt = tuple(token for token, keep in zip(row, kept, strict=True) if keep)
        if groups and groups[-1][0] == (row, kept):
            groups[-1] = groups[-1][0], prompt, groups[-1][2] + 1
        else:
            groups.append(((row, kept), prompt, 1))
    return [(prompt, count) for _, prompt, count in groups]


def plan_prompts(
    groups: Sequence[tuple[Tokens, int]], cache: SharedContextCache, *, min_shared: int
) -> tuple[PromptPlan, tuple[int, ...]]:
    """The plan, and how many tokens of each prompt the cache holds."""
    prompts = [prompt for prompt, _ in groups]
    stored = [(path, tuple(cache.path_tokens(path).tolist())) for path in cache.forest.paths]
    known = [_longest_known(prompt, stored) for prompt in prompts]
    runs = sorted(_common_runs(prompts, 0, 0, 0, min_shared), key=lambda run: (run[4], run[0]))
    paths: list[list[Span]] = [[] for _ in prompts]
    ends: list[int | None] = [None] * len(prompts)
    items: list[PrefillItem] = []
    new_tokens: list[int] = []
    firsts: list[int] = []
    for first, last, start, stop, _ in runs:
        known_path, known_length = known[first]
        cached = min(max(known_length - start, 0), stop - start)
        spans = _spans(_addresses(known_path)[start : start + cached], known_path)
        if fresh := stop - start - cached:
            span = Span(len(cache.segment_tokens), len(new_tokens), fresh)
            items.append(PrefillItem(span, (*paths[first], *spans)))
            firsts.append(first)
            new_tokens += prompts[first][stop - fresh : stop]
            spans.append(span)
        for index in range(first, last + 1):
            paths[index] += spans
            if fresh and stop == len(prompts[index]):
                ends[index] = len(new_tokens) - 1
    rows = [path for path, (_, count) in zip(paths, groups, strict=True) for _ in range(count)]
    plan = PromptPlan(
        forest=forest_of(rows),
        items=tuple(items),
        new_tokens=torch.tensor(new_tokens, dtype=torch.long),
        ends=tuple(ends),
        groups=tuple(firsts),
    )
    return plan, tuple(length for _, length in known)


def _longest_known(prompt: Tokens, stored: Sequence[tuple[Path, Tokens]]) -> tuple[Path, int]:
    best: tuple[Path, int] = ((), 0)
    for path, tokens in stored:
        length = common_prefix(prompt, tokens)
        if length > best[1]:
            best = path, length
    return best


def _common_runs(
    prompts: Sequence[Tokens], offset: int, start: int, depth: int, least: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs ``(first, last, start, stop, depth)`` of neighbours that share `least` tokens or more from `start` on."""
    first = 0
    while first < len(prompts):
        last = first
        while last + 1 < len(prompts) and common_prefix(prompts[last], prompts[last + 1]) - start >= least:
            last += 1
        group = prompts[first : last + 1]
        stop = len(group[0]) if len(group) == 1 else min(common_prefix(group[0], other) for other in group[1:])
        if stop > start:
            yield offset + first, offset + last, start, stop, depth
        if last > first:
            yield from _common_runs(group, offset + first, stop, depth + 1, least)
        first = last + 1


def _addresses(path: Sequence[Span]) -> list[Address]:
    return [(span.segment, place) for span in path for place in range(span.start, span.stop)]


def _spans(addresses: Sequence[Address], path: Path) -> list[Span]:
    """Some addresses of a path as spans, cut where the path's are."""
    cuts = {(span.segment, span.start) for span in path}
    spans: list[Span] = []
    for segment, place in addresses:
        last = spans[-1] if spans else None
        if last is not None and (last.segment, last.stop) == (segment, place) and (segment, place) not in cuts:
            spans[-1] = Span(segment, last.start, last.length + 1)
        else:
            spans.append(Span(segment, place, 1))
    return spans


def forest_of(paths: Sequence[Sequence[Span]]) -> Forest:
    """`Forest.from_paths`, level by level and token by token."""
    return Forest(len(paths), _nodes([_addresses(path) for path in paths], 0, 0))


def _nodes(rows: Sequence[Sequence[Address]], row_start: int, depth: int) -> Iterator[Node]:
    first = 0
    while first < len(rows):
        last = first
        while last + 1 < len(rows) and rows[first][:1] == rows[last + 1][:1]:
            last += 1
        group = rows[first : last + 1]
        if group[0]:
            segment, start = group[0][0]
            run = [(segment, start + offset) for offset in range(len(group[0]))]
            length = min(common_prefix(run, row) for row in group)
            yield Node(Span(segment, start, length), row_start + first, len(group), depth)
            yield from _nodes([row[length:] for row in group], row_start + first, depth + 1)
        first = last + 1


def passes(items: Sequence[PrefillItem], max_tokens: int) -> list[list[PrefillItem]]:
    """Items packed one after the other, each context compared with all spans that wait."""
    parts = [
        PrefillItem(item.span[at : at + max_tokens], (*item.context, *((item.span[:at],) if at else ())))
        for item in items
        for at in range(0, item.span.length, max_tokens)
    ]
    batches: list[list[PrefillItem]] = []
    for item in parts:
        waiting = {address for other in (batches[-1] if batches else []) for address in _addresses([other.span])}
        if not batches or len(waiting) + item.span.length > max_tokens or waiting & set(_addresses(item.context)):
            batches.append([])
        batches[-1].append(item)
    return batches
