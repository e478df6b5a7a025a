"""The prefix tree of sequences in a fixed order, from their lengths and what each has in common with the next.

What several neighbouring sequences have in common is the least of what each has in common with the next one, so the
contents are compared once, neighbour with neighbour. The tree follows from those numbers in time linear in the number
of sequences (by their Cartesian tree: Vuillemin, "A unifying look at data structures", 1980).
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
        depth: Runs on the way to this one.
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
        deepest: For each sequence, the run that it ends with; None for an empty one.
    """

    runs: tuple[Run, ...]
    deepest: tuple[Run | None, ...]


def prefix_tree(lengths: Sequence[int], shared: Sequence[int], *, least: int = 1) -> PrefixTree:
    """Build the tree.

    Args:
        lengths: Of each sequence, the number of tokens.
        shared: Of each sequence but the last, the tokens that the next one begins with too.
        least: Shortest run, at least 1, that several sequences share; shorter ones each gets for itself.
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
    """The index of the least value, and for each index that of the least one in its part to the left and right."""
    left: list[int | None] = [None] * len(values)
    right: list[int | None] = [None] * len(values)
    spine: list[int] = []  # from the least value so far down to the last one
    for index, value in enumerate(values):
        while spine and values[spine[-1]] > value:
            left[index] = spine.pop()
        if spine:
            right[spine[-1]] = index
        spine.append(index)
    return spine[0] if spine else None, left, right
