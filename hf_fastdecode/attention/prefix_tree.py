"""Prefix tree of sequences in a fixed order, from their lengths and the common prefixes of neighbours.

The common prefix of several neighbours is the shortest of those of adjacent pairs, so contents are compared only
pairwise. The tree follows in time linear in the number of sequences, by a Cartesian tree (Vuillemin, "A unifying look
at data structures", 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False, slots=True)
class Run:
    """Tokens ``start .. stop - 1`` of the sequences ``first .. last``, equal in all of them.

    Attributes:
        first: The first sequence.
        last: The last sequence.
        start: The first token.
        stop: The last token + 1.
        parent: The run that ends where this one starts; None where it starts at 0.
        depth: Number of ancestors.
    """

    first: int
    last: int
    start: int
    stop: int
    parent: Run | None
    depth: int


@dataclass(frozen=True)
class PrefixTree:
    """The runs of some sequences.

    Attributes:
        runs: By depth, then by sequence; no run is empty.
        deepest: The last run of each sequence; None for an empty one.
    """

    runs: tuple[Run, ...]
    deepest: tuple[Run | None, ...]


def prefix_tree(lengths: Sequence[int], shared: Sequence[int], *, least: int = 1) -> PrefixTree:
    """Build the prefix tree.

    Args:
        lengths: Tokens of each sequence.
        shared: Length of the common prefix of each sequence, but the last, with the next.
        least: Shortest run, at least 1, that sequences share; shorter ones stay part of each sequence's own run.
    """
    runs: list[Run] = []
    deepest: list[Run | None] = [None] * len(lengths)
    root, left, right = _cartesian_tree(shared)
    work: list[tuple[int | None, int, int, Run | None]] = [(root, 0, len(lengths) - 1, None)] if lengths else []
    while work:
        cut, first, last, above = work.pop()
        start = above.stop if above else 0
        stop = lengths[first] if cut is None else shared[cut]
        if stop - start >= (1 if cut is None else least):
            above = Run(first, last, start, stop, above, above.depth + 1 if above else 0)
            runs.append(above)
        if cut is None:
            deepest[first] = above
        else:
            work += [(left[cut], first, cut, above), (right[cut], cut + 1, last, above)]
    runs.sort(key=lambda run: (run.depth, run.first))
    return PrefixTree(tuple(runs), tuple(deepest))


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
