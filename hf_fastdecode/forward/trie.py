"""What the rows of a batch have in common: a trie of their tokens, found on the host.

Rows are sorted, so that those which begin alike are neighbours, and the tokens that two neighbours share tell the whole
trie. A node is a run of tokens that the same rows read; sharing that saves too little is left out, since each level of
the trie adds a call of an attention operator to each layer. The distinct tokens, node after node in depth-first order,
are the packed row; an index says which of them each place of the batch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .nodes import Node, Tree

Numbers = NDArray[np.int64]


class Row(NamedTuple):
    """The real tokens of a row of the batch.

    Attributes:
        keys: ``[length]``: ids, or other numbers that are equal for equal tokens.
        column: The first one's column in the batch.
        position: The first one's position; the others count on from it.
    """

    keys: Numbers
    column: int
    position: int


@dataclass(frozen=True)
class Trie:
    """The distinct tokens of a batch of rows.

    Attributes:
        tree: Their nodes.
        places: ``[tokens]``: for each distinct token, in the nodes' order, the place (``row * width + column``) of the
            batch that it is taken from.
        positions: ``[tokens]``: its position.
        index: ``[rows, width]``: the distinct token of each place; ``len(places)`` for padding.
        given: Real tokens of all rows.
        longest: Tokens of the longest row.
    """

    tree: Tree
    places: Numbers
    positions: Numbers
    index: Numbers
    given: int
    longest: int

    @property
    def saved(self) -> int:
        """Tokens that need not be computed, because another row has them."""
        return self.given - len(self.places)


class _Group(NamedTuple):
    """Neighbouring rows, of which the first `depth` tokens are in nodes, the last of them `parent`."""

    first: int
    stop: int
    depth: int
    parent: int


def build_trie(rows: Sequence[Row], width: int, *, least: int, saving: int) -> Trie:
    """The trie of rows of a batch that is `width` wide.

    Args:
        least: Shortest run of tokens of several rows that becomes a node.
        saving: Tokens that a node of several rows must save.
    """
    order = sorted(range(len(rows)), key=lambda row: _sorted_by(rows[row]))
    common = [0, *(_common(rows[one], rows[other]) for one, other in zip(order, order[1:], strict=False))]
    lengths = [len(rows[row].keys) for row in order]
    nodes: list[Node] = []
    places, positions = [], []
    index = np.full((len(rows), width), -1, dtype=np.int64)
    filled = 0
    waiting = [_Group(0, len(order), 0, -1)] if order else []
    while waiting:
        group = waiting.pop()
        shared = min(common[group.first + 1 : group.stop], default=lengths[group.first])
        run = shared - group.depth
        members = order[group.first : group.stop]
        if len(members) > 1 and (run < least or run * (len(members) - 1) < saving):
            waiting += _split(group, common, group.depth + least if run < least else shared + 1)
            continue
        parent = group.parent
        if run:
            row, parent = members[0], len(nodes)
            start = rows[row].column + group.depth
            nodes.append(Node(filled, run, group.parent))
            places.append(row * width + np.arange(start, start + run))
            positions.append(np.arange(run) + rows[row].position + group.depth)
            for member in members:
                start = rows[member].column + group.depth
                index[member, start : start + run] = np.arange(filled, filled + run)
            filled += run
        if len(members) > 1:
            waiting += _split(group._replace(depth=shared, parent=parent), common, shared + 1, ends=lengths)
    index[index < 0] = filled
    return Trie(Tree(tuple(nodes)), _joined(places), _joined(positions), index, sum(lengths), max(lengths, default=0))


def _split(group: _Group, common: Sequence[int], depth: int, ends: Sequence[int] = ()) -> list[_Group]:
    """Parts of a group whose neighbours share at least `depth` tokens, the last first.

    Rows of `ends`, their lengths, that have no further token are left out.
    """
    cuts = [row for row in range(group.first + 1, group.stop) if common[row] < depth]
    bounds = [group.first, *cuts, group.stop]
    parts = [group._replace(first=first, stop=stop) for first, stop in zip(bounds, bounds[1:], strict=False)]
    if ends:
        parts = [part for part in parts if ends[part.stop - 1] > part.depth]
    return parts[::-1]


def _sorted_by(row: Row) -> tuple[int, bytes]:
    """Orders rows by position, then by tokens."""
    return row.position, row.keys.astype(">i8").tobytes()


def _common(one: Row, other: Row) -> int:
    """How many tokens two rows have in common from their first on."""
    if one.position != other.position:
        return 0
    length = min(len(one.keys), len(other.keys))
    differ = one.keys[:length] != other.keys[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def _joined(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
