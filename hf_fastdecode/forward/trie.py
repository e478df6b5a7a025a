"""What the rows of a batch have in common: a trie of their tokens, found on the host.

Rows are sorted, so that those which begin alike are neighbours, and the tokens that two neighbours share tell the
whole trie. A node is a run of tokens that the same rows read; sharing that saves too little is left out, since each
level of the trie adds calls of attention operators to each layer. The distinct tokens, node after node in depth-first
order, are the packed row; an index says which of them each place of the batch is. Rows of earlier passes take part,
without a place in the batch: nodes of tokens that one of them has stored are not computed again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..generation.prompts.prompt_plan import common_prefix

Numbers = NDArray[np.int64]


class Node(NamedTuple):
    """A run of tokens that lie end to end among all keys."""

    start: int  # its first token's index among the keys
    length: int  # its tokens, at least 1
    parent: int  # index of the node that it continues; -1 for none


class Tree:
    """Nodes in depth-first order, parents first, end to end: a token sees its node up to itself, and all of its
    node's ancestors.

    Args:
        nodes: All nodes.
        kept: Tokens of the first nodes, whose keys an earlier pass has stored; they have no queries.

    Attributes:
        plans: What operators derive from the nodes, kept by their keys, for all layers of the pass.
    """

    def __init__(self, nodes: tuple[Node, ...], kept: int = 0):
        self.nodes, self.kept = nodes, kept
        self.plans: dict[Hashable, Any] = {}


class Row(NamedTuple):
    """The real tokens of a row."""

    keys: Numbers  # [length]: ids, or other numbers that are equal for equal tokens
    position: int  # the first one's position; the others count on from it
    column: int = 0  # the first one's column in the batch
    # [length]: where an earlier pass has stored them, for a row of that; None if it has not.
    stored: Numbers | None = None


@dataclass(frozen=True)
class Run:
    """The tokens of a node, as the rows see them."""

    parent: int  # index of the node before it; -1 for none
    first: int  # its first token's index in its rows
    length: int  # its tokens
    rows: Sequence[int]  # the rows of the batch that read it
    repeats: bool  # whether other rows do, too, or rows of earlier passes did
    stored: Numbers | None  # where its tokens are stored; None where they are to be computed


@dataclass(frozen=True)
class Trie:
    """The distinct tokens of a batch of rows."""

    tree: Tree  # their nodes, stored ones first
    runs: tuple[Run, ...]  # the same nodes with their rows
    # [tokens]: for each token to compute, in the nodes' order, the place (row * width + column) of the batch that it
    # is taken from.
    places: Numbers
    positions: Numbers  # [tokens]: its position
    index: Numbers  # [rows, width]: for each place of the batch its token among all nodes'; their number for padding
    given: int  # real tokens of all rows
    longest: int  # tokens of the longest row

    @property
    def saved(self) -> int:
        """Tokens that are not computed, because another row, or an earlier pass, has them."""
        return self.given - len(self.places)

    @property
    def repeated(self) -> int:
        """Tokens to compute that an earlier pass has computed and not stored."""
        return sum(run.length for run in self.runs if run.repeats and len(run.rows) == 1 and run.stored is None)


class _Group(NamedTuple):
    """Neighbouring rows, of which the first `depth` tokens are in nodes, the last of them `parent`."""

    first: int
    stop: int
    depth: int
    parent: int


def build_trie(rows: Sequence[Row], width: int, *, least: int, saving: int, kept: Sequence[Row] = ()) -> Trie:
    """The trie of rows of a batch that is `width` wide.

    Args:
        least: Shortest run of tokens of several rows that becomes a node.
        saving: Tokens that a node of several rows must save.
        kept: Rows of earlier passes.
    """
    runs = _stored_first(_runs([*rows, *kept], len(rows), least, saving))
    nodes, places, positions = [], [], []
    index = np.full((len(rows), width), -1, dtype=np.int64)
    filled = tokens_kept = 0
    for run in runs:
        nodes.append(Node(filled, run.length, run.parent))
        for number in run.rows:
            start = rows[number].column + run.first
            index[number, start : start + run.length] = np.arange(filled, filled + run.length)
        if run.stored is None:
            row = rows[run.rows[0]]
            start = run.rows[0] * width + row.column + run.first
            places.append(np.arange(start, start + run.length))
            positions.append(np.arange(run.length) + row.position + run.first)
        else:
            tokens_kept += run.length
        filled += run.length
    index[index < 0] = filled
    lengths = [len(row.keys) for row in rows]
    tree = Tree(tuple(nodes), tokens_kept)
    return Trie(tree, runs, _joined(places), _joined(positions), index, sum(lengths), max(lengths, default=0))


def _runs(rows: Sequence[Row], in_batch: int, least: int, saving: int) -> list[Run]:
    """The nodes that rows of the batch read, in depth-first order; those after the first `in_batch` are earlier."""
    order = sorted(range(len(rows)), key=lambda row: _sorted_by(rows[row]))
    common = [0, *(_common(rows[one], rows[other]) for one, other in pairwise(order))]
    lengths = [len(rows[row].keys) for row in order]
    runs: list[Run] = []
    waiting = [_Group(0, len(order), 0, -1)] if order else []
    while waiting:
        group = waiting.pop()
        shared = min(common[group.first + 1 : group.stop], default=lengths[group.first])
        length, members = shared - group.depth, order[group.first : group.stop]
        reading = [row for row in members if row < in_batch]
        if not reading:
            continue
        if len(members) > 1 and (length < least or length * (len(members) - 1) < saving):
            waiting += _split(group, common, group.depth + least if length < least else shared + 1)
            continue
        parent = group.parent
        if length:
            parent = len(runs)
            found = [places for row in members if (places := rows[row].stored) is not None]
            stored = found[0][group.depth : shared] if found else None
            runs.append(Run(group.parent, group.depth, length, reading, len(members) > 1, stored))
        if len(members) > 1:
            parts = _split(group._replace(depth=shared, parent=parent), common, shared + 1)
            waiting += [part for part in parts if lengths[part.stop - 1] > shared]  # others have no further token
    return runs


def _split(group: _Group, common: Sequence[int], depth: int) -> list[_Group]:
    """Parts of a group whose neighbours share at least `depth` tokens, the last first."""
    cuts = [row for row in range(group.first + 1, group.stop) if common[row] < depth]
    bounds = pairwise([group.first, *cuts, group.stop])
    return [group._replace(first=first, stop=stop) for first, stop in bounds][::-1]


def _stored_first(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The nodes in the same order, but stored ones before others; their ancestors are stored too."""
    order = sorted(range(len(runs)), key=lambda number: runs[number].stored is None)
    new = {-1: -1} | {number: place for place, number in enumerate(order)}
    in_order = [runs[number] for number in order]
    return tuple([replace(run, parent=new[run.parent]) for run in in_order])


def _sorted_by(row: Row) -> tuple[int, bytes]:
    """Orders rows by position, then by tokens."""
    return row.position, row.keys.astype(">i8").tobytes()


def _common(one: Row, other: Row) -> int:
    """How many tokens two rows have in common from their first on."""
    return 0 if one.position != other.position else common_prefix(one.keys, other.keys)


def _joined(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
