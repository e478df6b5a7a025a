"""How units' key tiles become shares of programs.

Laid end to end, the tiles are cut into as many equal shares as there are programs. Three things are cut otherwise:

- Of a node with more units than programs, programs take whole units side by side while each still gets one: neighbours
  then read the same keys at the same time, from L2.
- Units of one length are cut into the same number of pieces each when this costs no more than their beginning and
  ending everywhere in a share.
- Where shares do begin and end inside units, those of several query tiles are cut as one *bundle*, so that as many
  programs go through the same keys side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# What beginning and ending a piece costs a program, in key tiles: loads that wait for each other, and the partial.
PIECE_COST = 2


class Work(NamedTuple):
    """Pieces in the order of units, then of keys; `turn` is a piece's place among those of its program."""

    unit: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    program: np.ndarray
    turn: np.ndarray


# Most programs that go through the same keys side by side where their shares begin and end inside units.
BUNDLE = 8


def common_bundle(query_tiles: np.ndarray, programs: int) -> int:
    """Units that are cut together: as many of a node as divide its query tiles, every other node's, and programs."""
    common = int(np.gcd.reduce(query_tiles, initial=programs))
    return next(size for size in range(BUNDLE, 0, -1) if common % size == 0)


def cut(lengths: np.ndarray, units_of_node: np.ndarray, programs: int, *, bundle: int) -> Work:
    """Cut units of these lengths, in key tiles, into pieces for programs; `bundle` divides `units_of_node`."""
    unit = np.arange(len(lengths))
    whole = np.zeros(len(lengths), dtype=bool)
    program, turn = np.zeros_like(unit), np.zeros_like(unit)
    waves = 0
    first_unit = np.cumsum(units_of_node) - units_of_node
    for node in np.flatnonzero(units_of_node >= programs):
        full = units_of_node[node] // programs
        taken = slice(first_unit[node], first_unit[node] + full * programs)
        whole[taken] = True
        program[taken] = np.arange(full * programs) % programs
        turn[taken] = waves + np.arange(full * programs) // programs
        waves += full
    parts = [Work(unit[whole], np.zeros_like(unit[whole]), lengths[whole], program[whole], turn[whole])]
    rest = unit[~whole]
    if len(rest):
        alike = _cut_alike(rest, lengths[rest], programs, waves)
        parts.append(alike or _stream(rest, lengths[rest], programs, waves, bundle))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return Work(*(column[order] for column in columns))


def _shares(total: int, programs: int) -> int:
    """Programs that get work: fewer when it would leave them under two tiles each."""
    return max(1, min(programs, total // 2))


def _stream(unit: np.ndarray, lengths: np.ndarray, programs: int, turn: int, bundle: int) -> Work:
    """Cut all units' tiles, laid end to end, into equal shares; units of a bundle lie side by side.

    A unit counts as so many tiles more as a piece costs: who gets many short units gets fewer tiles.
    """
    lengths = lengths[::bundle]
    unit_start = np.concatenate([[0], np.cumsum(lengths)])
    with_cost = np.concatenate([[0], np.cumsum(lengths + PIECE_COST)])
    shares = _shares(int(unit_start[-1]), programs // bundle)
    share_start = np.arange(shares) * with_cost[-1] // shares
    of = np.searchsorted(with_cost, share_start, side="right") - 1
    share_start = unit_start[of] + np.maximum(0, share_start - with_cost[of] - PIECE_COST)
    cuts = np.union1d(unit_start, share_start)
    begin, end = cuts[:-1], cuts[1:]
    of = np.searchsorted(unit_start, begin, side="right") - 1
    share = np.unique(np.searchsorted(share_start, begin, side="right"), return_inverse=True)[1]
    columns = (of, begin - unit_start[of], end - unit_start[of], share, np.arange(len(of)))
    of, begin, end, share, place = (np.repeat(column, bundle) for column in columns)
    side = np.tile(np.arange(bundle), len(columns[0]))
    return Work(unit[of * bundle + side], begin, end, share * bundle + side, turn + place)


def _cut_alike(unit: np.ndarray, lengths: np.ndarray, programs: int, turn: int) -> Work | None:
    """Cut units of one length into the same number of pieces, one for each program; None where that is slower."""
    length, count = int(lengths[0]), len(unit)
    if length == 0 or (lengths != length).any() or count > programs:
        return None
    shares = _shares(length * count, programs)
    longest = -(-length // max(1, shares // count))
    if longest > 1.06 * (length * count / shares) + PIECE_COST:
        return None
    pieces = -(-length // longest)
    cuts = np.arange(pieces + 1) * length // pieces
    place = np.arange(count * pieces)
    of, piece = np.divmod(place, pieces)
    return Work(unit[of], cuts[piece], cuts[piece + 1], place, np.full_like(place, turn))
