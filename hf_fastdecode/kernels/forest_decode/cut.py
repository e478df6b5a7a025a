"""Stream-K cut: divides the key tiles of all units into equal shares, one per program.

The tiles, laid end to end, are cut into as many equal shares as there are programs, with three exceptions:

- A node with at least as many units as programs first hands out whole units, one per program, so that neighbours read
  the same keys at the same time, from L2.
- Units of one length are cut into the same number of pieces (split-K) when that is no slower.
- Otherwise, units of several query tiles are cut as one *bundle*, so that as many programs read the same keys side by
  side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Cost of starting and ending a piece, in key tiles: dependent loads, and writing the partial.
PIECE_COST = 2


class Work(NamedTuple):
    """Pieces, sorted by unit and key; `turn` is a piece's place in its program's order."""

    unit: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    program: np.ndarray
    turn: np.ndarray


# Most units that are cut together.
BUNDLE = 8


def common_bundle(query_tiles: np.ndarray, programs: int) -> int:
    """Units per bundle: the largest size up to `BUNDLE` that divides every node's query tiles and the programs."""
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
    """Programs that get work: all, or fewer so that each has at least two tiles."""
    return max(1, min(programs, total // 2))


def _stream(unit: np.ndarray, lengths: np.ndarray, programs: int, turn: int, bundle: int) -> Work:
    """Cut all units' tiles, laid end to end, into equal shares; a bundle's units are cut at the same tiles.

    Every unit counts `PIECE_COST` tiles more, so that a program with many short units gets fewer tiles.
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
    """Cut units of one length into equally many pieces, one per program (split-K); None where that is slower."""
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
