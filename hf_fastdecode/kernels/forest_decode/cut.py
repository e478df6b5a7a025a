"""Cut of the key tiles of all units into shares of equal cost, one per program.

- A node with at least as many units as programs first hands out whole units, one per program, so that neighbours read
  the same keys at the same time, from L2.
- Other units are cut into equal pieces each, as many as it takes for the pieces to fit into equal shares, longest
  first (split-K). Then hardly a program has pieces of two long units, and short units go to programs of their own.
- Where that leaves programs idle, the tiles of all units are laid end to end and cut into equal shares (stream-K);
  units of several query tiles as one *bundle*, so that as many programs read the same keys side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Cost of starting and ending a piece, in key tiles: dependent loads, and writing the partial.
PIECE_COST = 3


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
        streamed = _stream(rest, lengths[rest], programs, waves, bundle)
        packed = _pack(rest, lengths[rest], programs, waves, most=largest_share(streamed))
        parts.append(packed or streamed)
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


def _pack(unit: np.ndarray, lengths: np.ndarray, programs: int, turn: int, *, most: int) -> Work | None:
    """Cut every unit into equal pieces, and pack these, longest first, into shares of about `most`, if they fit.

    Units of one length are cut alike. Shares may cost some more than with `_stream`, as there are fewer pieces.
    """
    length_of_kind, kind, count = np.unique(-lengths, return_inverse=True, return_counts=True)  # longest first
    length_of_kind = -length_of_kind
    if len(length_of_kind) > _MOST_KINDS:
        return None
    programs = _shares(int(lengths.sum()), programs)
    least = -(-int((lengths + PIECE_COST).sum()) // programs)
    largest = int(1.06 * most) + PIECE_COST
    for share in range(max(least, PIECE_COST + 2), largest + 1, max(1, least // 64)):
        pieces = np.maximum(1, -(-length_of_kind // (share - PIECE_COST)))  # of a unit, by kind
        found = _placed(-(-length_of_kind // pieces) + PIECE_COST, pieces * count, programs, share)
        if found is not None:
            break
    else:
        return None
    program, place = found
    of = np.argsort(kind, kind="stable")  # units by kind
    pieces = pieces[kind[of]]
    index = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    of, pieces = np.repeat(of, pieces), np.repeat(pieces, pieces)
    begin, end = index * lengths[of] // pieces, (index + 1) * lengths[of] // pieces
    return Work(unit[of], begin, end, program, turn + place)


# Different lengths of units for which packing is tried: each takes a moment.
_MOST_KINDS = 16


def _placed(costs: np.ndarray, counts: np.ndarray, programs: int, share: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Place pieces, by kind, each on the program with the least cost so far: program and turn of every piece.

    None where a program would cost more than `share`.
    """
    load, turn = np.zeros(programs, dtype=np.int64), np.zeros(programs, dtype=np.int64)
    placed = []
    for cost, count in zip(costs.tolist(), counts.tolist(), strict=True):
        room = np.maximum(0, (share - load) // cost)  # pieces that each program can take
        if room.sum() < count:
            return None
        of = np.repeat(np.arange(programs), room)
        index = np.arange(len(of)) - np.repeat(np.cumsum(room) - room, room)
        chosen = np.argsort(load[of] + index * cost, kind="stable")[:count]
        placed.append((of[chosen], turn[of[chosen]] + index[chosen]))
        taken = np.bincount(of[chosen], minlength=programs)
        load, turn = load + taken * cost, turn + taken
    program, place = zip(*placed, strict=True)
    return np.concatenate(program), np.concatenate(place)


def largest_share(work: Work) -> int:
    """Key tiles of the largest share, including `PIECE_COST` per piece."""
    return int(np.bincount(work.program, work.end - work.begin + PIECE_COST).max(initial=0))
