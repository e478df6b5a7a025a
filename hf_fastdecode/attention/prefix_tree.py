"""Prefix tree of rows in a fixed order, from their lengths and the common prefixes of adjacent rows.

The common prefix of several adjacent rows is the shortest of those of adjacent pairs, so only such pairs are compared.
A Cartesian tree of their lengths then gives the prefix tree in time linear in the number of rows (Vuillemin, "A
unifying look at data structures", 1980).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Build the prefix tree.

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
