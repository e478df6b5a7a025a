"""The forest: which rows share which runs of tokens.

A *node* is a run of tokens whose keys and values are stored once and attended to by a contiguous range of rows. The
rows of a node of depth ``d`` lie inside those of one node of depth ``d - 1``. There may be any number of levels, of
tokens and of rows (Hydragen, section 3.3). A row's own tokens are its *suffix*, which the cache stores separately.

A forest is an immutable description on the host. It says where nodes are stored (`Span`), and holds no token ids, keys
or values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class Span:
    """A run of ``length`` tokens from token ``start`` of storage segment ``segment``."""

    segment: int
    start: int
    length: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 0:
            raise ValueError(f"a span's start and length must be at least 0, got {self.start} and {self.length}")

    @property
    def stop(self) -> int:
        return self.start + self.length

    def __getitem__(self, part: slice) -> Span:
        """The sub-span ``span[i:j]``, counted from the span's own start."""
        start, stop, step = part.indices(self.length)
        if step != 1:
            raise ValueError(f"a span can only be cut with step 1, got {step}")
        return Span(self.segment, self.start + start, max(0, stop - start))


@dataclass(frozen=True, slots=True)
class Node:
    """A span attended to by rows ``row_start .. row_start + row_count - 1``, ``depth`` nodes below its root."""

    span: Span
    row_start: int
    row_count: int
    depth: int = 0

    @property
    def row_stop(self) -> int:
        return self.row_start + self.row_count


Path = tuple[Span, ...]

Begin = tuple[int, int]
"""Where a path of nodes begins: the number of its first segment, and the index in it of the first token."""

End = tuple[int, int]
"""Where a path of nodes ends: the number of its last segment, and the index in it after the last token."""


def begin_of(path: Path) -> Begin:
    """The beginning of a path, which is not empty."""
    return path[0].segment, path[0].start


def end_of(path: Path) -> End | None:
    """The end of a path; None for an empty one."""
    return (path[-1].segment, path[-1].stop) if path else None


class Forest:
    """The nodes over a batch of rows.

    Args:
        rows: Number of rows (sequences being decoded).

    Raises:
        ValueError: A node is empty or outside the rows, nodes of one depth overlap, or a node below depth 0 is not
            inside exactly one node of the depth above.
    """

    def __init__(self, rows: int, nodes: Iterable[Node] = ()):
        if rows < 0:
            raise ValueError(f"a forest needs rows >= 0, got {rows}")
        self.rows = rows
        self.nodes: tuple[Node, ...] = tuple(sorted(nodes, key=lambda node: (node.depth, node.row_start)))
        self._validate()

    def _validate(self) -> None:
        for node in self.nodes:
            if node.span.length <= 0:
                raise ValueError(f"a node needs at least one token, got {node}; leave empty nodes out")
            if node.depth < 0:
                raise ValueError(f"a node's depth must be at least 0, got {node}")
            if node.row_count <= 0 or node.row_start < 0 or node.row_stop > self.rows:
                raise ValueError(f"{node} needs a non-empty range of rows inside 0..{self.rows}")
        for level in self.levels:
            for left, right in pairwise(level):
                if left.row_stop > right.row_start:
                    raise ValueError(f"nodes of one depth must not overlap, got {left} and {right}")
        for parents, children in pairwise(self.levels):
            above = iter(parents)
            parent = next(above, None)
            for child in children:
                while parent is not None and parent.row_stop <= child.row_start:
                    parent = next(above, None)
                if parent is None or not parent.row_start <= child.row_start < child.row_stop <= parent.row_stop:
                    raise ValueError(f"{child} is not inside one node of depth {child.depth - 1}")

    @cached_property
    def levels(self) -> tuple[tuple[Node, ...], ...]:
        """The nodes by depth, each level in row order."""
        levels: list[list[Node]] = [[] for _ in range(max((node.depth for node in self.nodes), default=-1) + 1)]
        for node in self.nodes:
            levels[node.depth].append(node)
        return tuple(map(tuple, levels))

    @cached_property
    def batches(self) -> tuple[tuple[tuple[Node, ...], ...], ...]:
        """Each level, divided into groups of *alike* nodes: adjacent nodes of equal length and row count that are
        evenly spaced in one segment, so that one batched call attends to all of them."""
        return tuple(tuple(_alike(level)) for level in self.levels)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """For each row, the spans it attends to, from its root down."""
        paths: list[list[Span]] = [[] for _ in range(self.rows)]
        for node in self.nodes:
            for row in range(node.row_start, node.row_stop):
                paths[row].append(node.span)
        return tuple(map(tuple, paths))

    @cached_property
    def context_lengths(self) -> tuple[int, ...]:
        """For each row, the number of tokens on its path."""
        return tuple(sum(span.length for span in path) for path in self.paths)

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """By depth, for each row, the number of tokens on its path above that depth."""
        above, starts = [0] * self.rows, []
        for level in self.levels:
            starts.append(tuple(above))
            for node in level:
                for row in range(node.row_start, node.row_stop):
                    above[row] += node.span.length
        return tuple(starts)

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Segment and first token of each node's span, ``[nodes]`` int64 each."""
        spans = np.array([(node.span.segment, node.span.start) for node in self.nodes], dtype=np.int64)
        segments, starts = spans.reshape(-1, 2).T
        return segments, starts

    @cached_property
    def node_tokens(self) -> int:
        """Tokens of all nodes, each counted once; spans of several nodes may overlap."""
        return sum(node.span.length for node in self.nodes)

    @property
    def stored_tokens(self) -> int:
        """Number of distinct stored tokens of all nodes; spans of several nodes may overlap."""
        return sum(run.length for run in self.stored_runs)

    @property
    def stored_runs(self) -> list[Span]:
        """The stored tokens of all nodes, as disjoint runs in storage order."""
        runs: list[Span] = []
        for span in sorted({node.span for node in self.nodes}, key=lambda span: begin_of((span,))):
            last = runs[-1] if runs else None
            if last is not None and last.segment == span.segment and span.start < last.stop:
                runs[-1] = Span(last.segment, last.start, max(last.stop, span.stop) - last.start)
            else:
                runs.append(span)
        return runs

    @classmethod
    def from_paths(cls, paths: Sequence[Path]) -> Forest:
        """The forest in which row ``i`` attends to the spans ``paths[i]``.

        Adjacent rows share nodes as far as their paths begin at the same positions of storage; equal tokens that are
        stored twice are not shared. Where a path ends, or two diverge, inside a span, the span is split there.
        """
        rows = [joined(path) for path in paths]
        tree = prefix_tree(
            [sum(span.length for span in path) for path in rows],
            [_shared_tokens(upper, lower) for upper, lower in pairwise(rows)],
        )
        nodes: list[Node] = []
        depth_below: dict[SharedRange | None, int] = {None: 0}  # a range of several spans becomes as many nodes
        for shared in tree.ranges:
            spans = path_slice(rows[shared.row_start], shared.start, shared.stop)
            depth, row_count = depth_below[shared.parent], shared.row_stop - shared.row_start
            nodes += [Node(span, shared.row_start, row_count, depth + index) for index, span in enumerate(spans)]
            depth_below[shared] = depth + len(spans)
        return cls(len(paths), nodes)

    def select_rows(self, rows: Sequence[int]) -> Forest:
        """The forest whose row ``i`` is this forest's row ``rows[i]``; rows may repeat, move, or be left out.

        Storage does not change. Rows of one node that are no longer neighbours get two nodes of the same span.
        """
        return Forest.from_paths([self.paths[row] for row in rows])

    def drop_last(self, tokens: Sequence[int]) -> Forest:
        """The forest without the last ``tokens[i]`` tokens of row ``i``'s path."""
        kept = []
        for path, length, count in zip(self.paths, self.context_lengths, tokens, strict=True):
            if not 0 <= count <= length:
                raise ValueError(f"a row of {length} tokens can lose 0 to {length} of them, got {count}")
            kept.append(path_slice(path, 0, length - count))
        return Forest.from_paths(kept)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forest) and (self.rows, self.nodes) == (other.rows, other.nodes)

    def __hash__(self) -> int:
        return hash((self.rows, self.nodes))

    def __repr__(self) -> str:
        levels = ", ".join(
            f"depth {depth}: {len(level)} node(s), {sum(node.span.length for node in level)} tokens"
            for depth, level in enumerate(self.levels)
        )
        return f"Forest(rows={self.rows}{', ' if levels else ''}{levels})"


def path_slice(path: Path, start: int, stop: int) -> Path:
    """The spans of tokens ``start .. stop - 1`` of a path."""
    spans: list[Span] = []
    offset = 0
    for span in path:
        if offset >= stop:
            break
        part = span[max(0, start - offset) : stop - offset]
        if part.length:
            spans.append(part)
        offset += span.length
    return tuple(spans)


def joined(path: Iterable[Span]) -> Path:
    """The path without empty spans, and with adjacent spans of one segment merged."""
    spans: list[Span] = []
    for span in path:
        last = spans[-1] if spans else None
        if last is not None and (last.segment, last.stop) == (span.segment, span.start):
            spans[-1] = Span(last.segment, last.start, last.length + span.length)
        elif span.length:
            spans.append(span)
    return tuple(spans)


def _alike(level: tuple[Node, ...]) -> Iterator[tuple[Node, ...]]:
    run: list[Node] = []
    for node in level:
        if run and not _continues(run, node):
            yield tuple(run)
            run = []
        run.append(node)
    if run:
        yield tuple(run)


def _continues(run: list[Node], node: Node) -> bool:
    last = run[-1]
    spacing = node.span.start - last.span.start
    return (
        (node.span.segment, node.span.length, node.row_count, node.row_start)
        == (last.span.segment, last.span.length, last.row_count, last.row_stop)
        and spacing >= node.span.length
        and (len(run) == 1 or spacing == run[1].span.start - run[0].span.start)
    )


def _shared_tokens(upper: Path, lower: Path) -> int:
    """Length of the common prefix of two joined paths."""
    tokens = 0
    for left, right in zip(upper, lower, strict=False):
        if (left.segment, left.start) != (right.segment, right.start):
            break
        tokens += min(left.length, right.length)
        if left.length != right.length:
            break
    return tokens


@dataclass(frozen=True, eq=False, slots=True)
class SharedRange:
    """Tokens ``start .. stop - 1``, which rows ``row_start .. row_stop - 1`` (one at least) have in common.

    Attributes:
        parent: The range that ends where this one starts; None where it starts at 0.
        depth: Number of ancestors.
    """

    row_start: int
    row_stop: int
    start: int
    stop: int
    parent: SharedRange | None
    depth: int


@dataclass(frozen=True)
class PrefixTree:
    """The ranges that a batch of rows consists of.

    Attributes:
        ranges: By depth, then by row; none is empty.
        deepest: For each row, the range that it ends in; None for an empty row.
    """

    ranges: tuple[SharedRange, ...]
    deepest: tuple[SharedRange | None, ...]


def prefix_tree(lengths: Sequence[int], shared: Sequence[int], *, least: int = 1) -> PrefixTree:
    """Build the prefix tree of rows in a fixed order.

    The common prefix of several adjacent rows is the shortest of those of adjacent pairs, so only such pairs are
    compared. A Cartesian tree of their lengths then gives the prefix tree in time linear in the number of rows
    (Vuillemin, "A unifying look at data structures", 1980).

    Args:
        lengths: Tokens of each row.
        shared: Length of the common prefix of rows ``i`` and ``i + 1``, for every ``i`` but the last row.
        least: Minimum length, at least 1, of a range of several rows. Where fewer tokens are common, each row's own
            range includes them.
    """
    ranges: list[SharedRange] = []
    deepest: list[SharedRange | None] = [None] * len(lengths)
    root, left, right = _cartesian_tree(shared)
    work: list[tuple[int | None, int, int, SharedRange | None]] = [(root, 0, len(lengths), None)] if lengths else []
    while work:
        cut, row_start, row_stop, above = work.pop()  # rows up to `cut` and those after it have least in common
        start = above.stop if above else 0
        stop = lengths[row_start] if cut is None else shared[cut]
        if stop - start >= (1 if cut is None else least):
            above = SharedRange(row_start, row_stop, start, stop, above, above.depth + 1 if above else 0)
            ranges.append(above)
        if cut is None:
            deepest[row_start] = above
        else:
            work += [(left[cut], row_start, cut + 1, above), (right[cut], cut + 1, row_stop, above)]
    ranges.sort(key=lambda found: (found.depth, found.row_start))
    return PrefixTree(tuple(ranges), tuple(deepest))


def _cartesian_tree(values: Sequence[int]) -> tuple[int | None, list[int | None], list[int | None]]:
    """Cartesian tree: index of the minimum, and for each index its left and right child."""
    left: list[int | None] = [None] * len(values)
    right: list[int | None] = [None] * len(values)
    spine: list[int] = []  # right spine: from the minimum so far to the last value
    for index, value in enumerate(values):
        while spine and values[spine[-1]] > value:
            left[index] = spine.pop()
        if spine:
            right[spine[-1]] = index
        spine.append(index)
    return spine[0] if spine else None, left, right
