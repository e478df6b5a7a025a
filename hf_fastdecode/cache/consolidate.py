"""Consolidation of caches reused across calls: merges chains of nodes and frees unused storage.

Every turn of a conversation appends nodes to each row's path; without merging, a step in turn ``t`` attends to
``O(t)`` nodes. Chains are merged by the logarithmic method (Bentley and Saxe, "Decomposable searching problems I",
1980): every node stays more than twice as long as the next one, and over all turns a token is copied ``O(log length)``
times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from ..attention.forest import Forest, Node, Span
from .shared import SharedContextCache


def consolidate(cache: SharedContextCache, copying: AbstractContextManager[object] | None = None) -> None:
    """Merge chains of nodes with the same rows, and free stored tokens that no row attends to.

    A segment that is less than half used is replaced by a copy of the used part. Tokens used by several nodes are not
    merged into one of them, which would store them twice. Protected segments are never copied. Nothing is copied
    without a gain, or where nodes are divided between processes.

    Args:
        cache: A cache whose forest is set, with empty suffixes.
        copying: Context in which copies are allocated, before the cache changes.

    Raises:
        torch.OutOfMemoryError: Not enough memory for the copies; the cache is unchanged.
    """
    if cache.state.parallel is not None:  # other places would be on other processes
        return
    used = _UsedTokens(cache.forest)
    moved = [span for merge in _merges(cache, used) for span in merge]
    moved += _sparse(cache, used, set(moved))
    numbers = {old: new for new, old in enumerate(sorted({run.segment for run in set(used.runs) - set(moved)}))}
    if not moved and len(numbers) == len(cache.segment_tokens):
        return
    places: dict[Span, Span] = {}
    length = 0
    for run in moved:
        places[run] = Span(len(numbers), length, run.length)
        length += run.length

    def place(span: Span) -> Span:
        run = used.run_of(span)
        if run not in places:
            return Span(numbers[span.segment], span.start, span.length)
        return places[run][span.start - run.start : span.stop - run.start]

    forest = Forest.from_paths([tuple(map(place, path)) for path in cache.forest.paths])
    tokens = [cache.segment_tokens[old] for old in numbers]
    storage = [{new: layer.storage.segments[old] for old, new in numbers.items()} for layer in cache.attention_layers]
    if moved:
        tokens.append(cache.path_tokens(tuple(moved)))
        with copying or nullcontext():
            for segments, layer in zip(storage, cache.attention_layers, strict=True):
                segments[len(numbers)] = layer.storage.copied(moved)
    cache.replace_storage(forest, tokens, storage, protected=sum(old < cache.protected_segments for old in numbers))


class _UsedTokens:
    """The stored tokens that nodes use.

    Attributes:
        runs: Disjoint spans in storage order; each node's span lies within one of them.
        nodes: Number of nodes with tokens in each run.
    """

    def __init__(self, forest: Forest):
        self.runs: list[Span] = []
        for span in sorted({node.span for node in forest.nodes}, key=_start):
            last = self.runs[-1] if self.runs else None
            if last is not None and last.segment == span.segment and span.start < last.stop:
                self.runs[-1] = Span(last.segment, last.start, max(last.stop, span.stop) - last.start)
            else:
                self.runs.append(span)
        self._starts = [_start(run) for run in self.runs]
        self.nodes = Counter(self.run_of(node.span) for node in forest.nodes)

    def run_of(self, span: Span) -> Span:
        """The run that contains a node's span."""
        return self.runs[bisect_right(self._starts, _start(span)) - 1]


def _start(span: Span) -> tuple[int, int]:
    return span.segment, span.start


def _merges(cache: SharedContextCache, used: _UsedTokens) -> Iterator[list[Span]]:
    """Groups of consecutive spans on a path to merge into one node."""
    for chain in _chains(cache.forest):
        groups: list[list[Span]] = []
        for node in chain:
            if node.span.segment < cache.protected_segments or used.nodes[used.run_of(node.span)] > 1:
                yield from (group for group in groups if len(group) > 1)
                groups = []
                continue
            groups.append([node.span])
            while len(groups) > 1 and _length(groups[-2]) <= 2 * _length(groups[-1]):
                groups[-2:] = [groups[-2] + groups[-1]]
        yield from (group for group in groups if len(group) > 1)


def _length(spans: list[Span]) -> int:
    return sum(span.length for span in spans)


def _chains(forest: Forest) -> list[list[Node]]:
    """The forest's maximal single-child chains; all nodes of a chain have the same rows."""
    chains: list[list[Node]] = []
    ends: dict[tuple[int, int], list[Node]] = {}
    for level in forest.levels:
        above, ends = ends, {}
        for node in level:
            rows = node.row_start, node.row_count
            if rows not in above:
                chains.append([])
            ends[rows] = above.get(rows, chains[-1])
            ends[rows].append(node)
    return chains


def _sparse(cache: SharedContextCache, used: _UsedTokens, merged: set[Span]) -> list[Span]:
    """Used spans of segments that are less than half used."""
    left = [run for run in used.runs if run not in merged and run.segment >= cache.protected_segments]
    tokens = Counter[int]()
    for run in left:
        tokens[run.segment] += run.length
    return [run for run in left if 2 * tokens[run.segment] < cache.state.segment_lengths[run.segment]]
