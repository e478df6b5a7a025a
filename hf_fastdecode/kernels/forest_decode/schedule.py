"""Stream-K schedule of the node kernel: key tiles of a forest in equal shares (LeanAttention, section 4.2).

A *unit* is a query tile of a node for one KV head: packed queries that read the same keys. The key tiles of all units
are cut into equal shares, one per program, whatever the nodes' lengths. A share consists of *pieces* of units; a
unit's pieces are merged in order.

- A node with at least as many units as programs first hands out whole units, one per program, so that neighbours read
  the same keys at the same time, from L2.
- Other units are cut into equal pieces each, as many as it takes for the pieces to fit into equal shares, longest
  first (split-K). Then hardly a program has pieces of two long units, and short units go to separate programs.
- Where that leaves programs idle, the tiles of all units are laid end to end and cut into equal shares (stream-K);
  units of several query tiles as one *bundle*, so that as many programs read the same keys side by side.

Nodes do not change while their rows decode, so a schedule serves all steps and all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class NodeShape(NamedTuple):
    """Depth, rows and length of a node, which decide the schedule."""

    depth: int
    row_start: int
    row_count: int
    length: int
    # When the node is read in a chain with nodes above it: index in the address tables and tokens of each, from the
    # top; their tokens are `length`. Else it has the index that it has among the nodes.
    links: tuple[tuple[int, int], ...] = ()


PIECE = (
    "node",  # or its chain
    "kv_head",
    "query_tile",
    "first_key_tile",
    "last_key_tile",  # exclusive
    "length",  # tokens of the node
    "row_start",
    "row_count",
    "slot",  # of the partial in the workspace
    "next",  # the program's next piece, or -1
    "position",  # tokens above the node on its rows' path
)
"""Columns of `Schedule.pieces`; a row is padded to 16 elements, one 64-byte line."""


class Capacity(NamedTuple):
    """Minimum sizes of a schedule's tables, so that other schedules fit in a captured graph."""

    depths: int = 0  # levels of nodes
    nodes: int = 0  # nodes in the address tables
    units: int = 0  # query tiles of nodes, over all KV heads

    def holds(self, other: Capacity) -> bool:
        """Whether tables of this capacity hold a schedule that needs `other`."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


_TABLES = ("pieces", "unit_slots", "row_units", "row_offsets", "row_tiles", "chains", "contexts", "overlap_suffix")


@dataclass(frozen=True)
class Schedule:
    """Tables that the kernels read, int32 on one device.

    Attributes:
        pieces: ``[pieces, 16]``, columns `PIECE`: program ``i`` starts at row ``i`` and follows ``next``; node -1 is a
            program without work.
        unit_slots: ``[units + 1]``: unit ``i`` has its partials in slots ``unit_slots[i] .. unit_slots[i + 1] - 1``.
        row_units: ``[depths, rows]``: unit of the row's first packed query for KV head 0; -1 without a node.
        row_offsets: ``[depths, rows]``: index of the row's first query among its node's packed queries.
        row_tiles: ``[depths, rows]``: query tiles of the row's node.
        chains: ``[nodes, links, 2]``: index in the address tables and first token of each link of a node's chain.
        contexts: ``[rows]``: tokens of the row's nodes.
        overlap_suffix: ``[1]``: 1 when nodes get fewer programs than the grid, and suffixes run beside them.
        scratch: Bytes for the descriptors of one launch; kept here because following kernels start before it ends.
        block_m: Packed queries per query tile.
        block_n: Keys per key tile.
        programs: Programs to launch.
    """

    pieces: Tensor
    unit_slots: Tensor
    row_units: Tensor
    row_offsets: Tensor
    row_tiles: Tensor
    chains: Tensor
    contexts: Tensor
    overlap_suffix: Tensor
    scratch: Tensor
    block_m: int
    block_n: int
    programs: int

    @property
    def piece_count(self) -> int:
        return self.pieces.shape[0]

    def copy_(self, other: Schedule) -> None:
        """Copy the tables of a schedule of the same capacity, rows, queries, block sizes and grid in place."""
        for name in _TABLES:
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)


def make_schedule(
    nodes: Sequence[NodeShape],
    rows: int,
    *,
    kv_heads: int,
    queries: int,
    block_m: int,
    block_n: int,
    programs: int,
    device: torch.device | str,
    capacity: Capacity | None = None,
    grid: int | None = None,
    chain: int = 1,
) -> Schedule:
    """Build the schedule of some nodes.

    Args:
        nodes: Sorted by depth, then rows. Nodes that are read in other nodes' chains only are left out.
        queries: Packed queries of one row per KV head: query heads of the group times new tokens.
        block_m: Packed queries per query tile.
        block_n: Keys per key tile.
        programs: Most programs that get work; fewer when they would have under two tiles each.
        capacity: When given, the tables' sizes depend on it and not on the nodes, and `grid` programs are launched.
        grid: Programs that the device runs at once; `programs` when None.
        chain: Most links of a chain.

    Raises:
        ValueError: There are no programs, or the units do not fit the capacity.
    """
    if programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs}")
    depths = max(depths_of(nodes), capacity.depths if capacity else 0)
    query_tiles = _query_tiles(nodes, queries, block_m)
    units_of_node = kv_heads * query_tiles
    unit_base = np.concatenate([[0], np.cumsum(units_of_node)]).astype(np.int64)
    unit_node = np.repeat(np.arange(len(nodes)), units_of_node)
    unit_in_node = np.arange(unit_base[-1]) - unit_base[unit_node]
    contexts = np.zeros(rows, dtype=np.int64)
    position = np.zeros(len(nodes), dtype=np.int64)
    for index, shape in enumerate(nodes):
        position[index] = contexts[shape.row_start]
        contexts[shape.row_start : shape.row_start + shape.row_count] += shape.length

    work = _divide(nodes, kv_heads, queries, block_m, block_n, programs)
    count, total = len(work.unit), len(unit_node)
    launched, piece_capacity, unit_capacity = int(work.program.max(initial=-1)) + 1, count, total + 1
    if capacity is not None:
        launched = programs if grid is None else grid
        piece_capacity, unit_capacity = launched + capacity.units, capacity.units + 1
        if capacity.units < total:
            raise ValueError(f"{total} units do not fit a capacity of {capacity.units}")
    # Slots are in the order of units; rows are permuted so that program i finds its first piece at row i.
    run = np.lexsort((work.turn, work.program))
    starts = np.diff(work.program[run], prepend=-1) > 0
    row_of_slot = np.empty(count, dtype=np.int64)
    row_of_slot[run] = np.where(starts, work.program[run], launched + np.cumsum(~starts) - 1)
    following = np.full(count, -1, dtype=np.int64)
    following[run[:-1]] = np.where(starts[1:], -1, row_of_slot[run[1:]])
    pieces = np.full((max(piece_capacity, launched), 16), -1, dtype=np.int64)
    if count:
        node = unit_node[work.unit]
        tiles = query_tiles[node]
        shapes = np.array([(shape.length, shape.row_start, shape.row_count) for shape in nodes], dtype=np.int64)
        head, tile = np.divmod(unit_in_node[work.unit], tiles)
        columns = [node, head, tile, work.begin, work.end, shapes[node], np.arange(count), following, position[node]]
        pieces[row_of_slot, : len(PIECE)] = np.column_stack(columns)

    row_units = np.full((depths, rows), -1, dtype=np.int64)
    row_offsets = np.zeros((depths, rows), dtype=np.int64)
    row_tiles = np.zeros((depths, rows), dtype=np.int64)
    for index, shape in enumerate(nodes):
        of_node = slice(shape.row_start, shape.row_start + shape.row_count)
        offsets = np.arange(shape.row_count) * queries
        row_offsets[shape.depth, of_node] = offsets
        row_units[shape.depth, of_node] = unit_base[index] + offsets // block_m
        row_tiles[shape.depth, of_node] = query_tiles[index]

    chains = np.full((max(len(nodes), capacity.nodes if capacity else 0), chain, 2), (0, _NO_TOKEN), dtype=np.int64)
    for index, shape in enumerate(nodes):
        links = shape.links or ((index, shape.length),)
        chains[index, : len(links), 0] = [node for node, _ in links]
        chains[index, : len(links), 1] = np.cumsum([0, *(tokens for _, tokens in links[:-1])])

    unit_slots = np.zeros(unit_capacity, dtype=np.int64)
    unit_slots[: total + 1] = np.searchsorted(work.unit, np.arange(total + 1))

    def table(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

    return Schedule(
        pieces=table(pieces),
        unit_slots=table(unit_slots),
        row_units=table(row_units),
        row_offsets=table(row_offsets),
        row_tiles=table(row_tiles),
        chains=table(chains),
        contexts=table(contexts),
        overlap_suffix=table(np.array([grid is not None and programs < grid])),
        scratch=torch.empty(launched * _DESCRIPTORS, dtype=torch.int8, device=device),
        block_m=block_m,
        block_n=block_n,
        programs=launched,
    )


_NO_TOKEN = 2**31 - 1  # where a link begins that a chain does not have

_DESCRIPTORS = 512  # bytes per program: two descriptors of 128, and Triton's alignment


def longest_share(
    nodes: Sequence[NodeShape], *, kv_heads: int, queries: int, block_m: int, block_n: int, programs: int
) -> int:
    """Key tiles of the longest share, including `PIECE_COST` per piece; arguments as for `make_schedule`."""
    return largest_share(_divide(nodes, kv_heads, queries, block_m, block_n, programs))


def _query_tiles(nodes: Sequence[NodeShape], queries: int, block_m: int) -> np.ndarray:
    return np.array([-(-node.row_count * queries // block_m) for node in nodes], dtype=np.int64)


def _divide(
    nodes: Sequence[NodeShape], kv_heads: int, queries: int, block_m: int, block_n: int, programs: int
) -> Work:
    """Cut the units of all nodes; arguments as for `make_schedule`."""
    query_tiles = _query_tiles(nodes, queries, block_m)
    key_tiles = np.array([-(-node.length // block_n) for node in nodes], dtype=np.int64)
    units = kv_heads * query_tiles
    return cut(np.repeat(key_tiles, units), units, programs, bundle=common_bundle(query_tiles, programs))


def depths_of(nodes: Sequence[NodeShape]) -> int:
    return max((node.depth for node in nodes), default=-1) + 1


def needed_capacity(nodes: Sequence[NodeShape], *, kv_heads: int, queries: int, block_m: int) -> Capacity:
    """The capacity that these nodes need; arguments as for `make_schedule`."""
    units = sum(kv_heads * -(-node.row_count * queries // block_m) for node in nodes)
    return Capacity(depths_of(nodes), len(nodes), units)


# Cost of starting and ending a piece, in key tiles: dependent loads, and writing the partial.
PIECE_COST = 3


class Work(NamedTuple):
    """Pieces, sorted by unit and key; `turn` is a piece's position in its program's order."""

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
    remaining = unit[~whole]
    if len(remaining):
        streamed = _stream(remaining, lengths[remaining], programs, waves, bundle)
        packed = _pack(remaining, lengths[remaining], programs, waves, most=largest_share(streamed))
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
    of, begin, end, share, slot = (np.repeat(column, bundle) for column in columns)
    side = np.tile(np.arange(bundle), len(columns[0]))
    return Work(unit[of * bundle + side], begin, end, share * bundle + side, turn + slot)


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
    program, slot = found
    of = np.argsort(kind, kind="stable")  # units by kind
    pieces = pieces[kind[of]]
    index = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    of, pieces = np.repeat(of, pieces), np.repeat(pieces, pieces)
    begin, end = index * lengths[of] // pieces, (index + 1) * lengths[of] // pieces
    return Work(unit[of], begin, end, program, turn + slot)


# Different lengths of units for which packing is tried: each takes a moment.
_MOST_KINDS = 16


def _placed(costs: np.ndarray, counts: np.ndarray, programs: int, share: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Place pieces, by kind, each on the program with the least cost so far: program and turn of every piece.

    None where a program would cost more than `share`.
    """
    load, turn = np.zeros(programs, dtype=np.int64), np.zeros(programs, dtype=np.int64)
    placed = []
    for cost, count in zip(costs.tolist(), counts.tolist(), strict=True):
        fitting = np.maximum(0, (share - load) // cost)  # pieces that each program can take
        if fitting.sum() < count:
            return None
        of = np.repeat(np.arange(programs), fitting)
        index = np.arange(len(of)) - np.repeat(np.cumsum(fitting) - fitting, fitting)
        chosen = np.argsort(load[of] + index * cost, kind="stable")[:count]
        placed.append((of[chosen], turn[of[chosen]] + index[chosen]))
        taken = np.bincount(of[chosen], minlength=programs)
        load, turn = load + taken * cost, turn + taken
    program, slot = zip(*placed, strict=True)
    return np.concatenate(program), np.concatenate(slot)


def largest_share(work: Work) -> int:
    """Key tiles of the largest share, including `PIECE_COST` per piece."""
    return int(np.bincount(work.program, work.end - work.begin + PIECE_COST).max(initial=0))
