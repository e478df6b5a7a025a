"""Who computes which split of which queries' keys: `schedule`, on the host, for all layers of a pass.

Keys are divided into *splits* by their position in their row. Queries that share all keys of a split, such as those
of rows below one node in steps, and those of one node in passes of whole rows, are an *item*: a tile for each KV head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST_ENTRIES: Final = 1 << 14
"""Partials of a launch: 256 MiB in fp32 with 32 heads of 128 elements."""

_AT_ONCE: Final = 1024  # queries of a path that are looked at together


class Config(NamedTuple):
    """Constants of a model's attention, on which bits depend; never on rows."""

    block_m: int  # packed queries of a tile
    block_n: int  # keys of a block
    split: int  # positions of a split, a multiple of `block_n`
    stages: int  # blocks in flight, which change no bits


class Queries(NamedTuple):
    """Consecutive tokens of a row.

    Attributes:
        path: Numbers of the runs of keys from the row's first token on. The queries are in the last one, which may
            hold later tokens too.
        position: The first query's, counted from the row's first token.
        tokens: At least 1.
    """

    path: tuple[int, ...]
    position: int
    tokens: int


class Tables(NamedTuple):
    """What `kernel.attend_split` and `kernel.merge_splits` read for queries from `first` on."""

    first: int
    items: Tensor  # [items, 5] int32
    entries: Tensor  # [entries, 3] int32
    runs: Tensor  # [any, 2] int32
    slots: Tensor  # [queries, splits] int32

    def to(self, device: torch.device) -> Tables:
        return Tables(self.first, *(part.to(device) for part in self[1:]))


def schedule(
    queries: Sequence[Queries], lengths: Sequence[int], group: int, window: int | None, config: Config
) -> list[Tables]:
    """Tables of the launches, which together have all queries, in order.

    Args:
        lengths: Keys of each run.
        group: Query heads of a KV head, at most ``config.block_m``.
        window: Last tokens that a query sees, its own among them; None for all.
    """
    found: list[Tables] = []
    waiting: list[tuple[int, Queries]] = []
    first = entries = 0
    for index, part in _parts(queries, config.split):
        needed = part.tokens * _splits(part, config.split)
        if waiting and entries + needed > MOST_ENTRIES:
            found.append(_tables(first, waiting, lengths, group, window, config))
            waiting, first, entries = [], index, 0
        waiting.append((index, part))
        entries += needed
    return [*found, _tables(first, waiting, lengths, group, window, config)] if waiting else found


def _splits(one: Queries, split: int) -> int:
    return 1 + (one.position + one.tokens - 1) // split


def _parts(queries: Sequence[Queries], split: int) -> Iterator[tuple[int, Queries]]:
    """The queries in parts of some of one row, with the number of each part's first one."""
    index = 0
    for one in queries:
        some = max(1, min(_AT_ONCE, MOST_ENTRIES // _splits(one, split)))
        for done in range(0, one.tokens, some):
            yield index + done, Queries(one.path, one.position + done, min(some, one.tokens - done))
        index += one.tokens


_Read = tuple[tuple[int, int], ...]
"""Runs of keys, and the position of each one's first."""


def _rows(index: int, part: Queries, window: int | None) -> NDArray[np.int64]:
    """Rows of `Tables.entries`."""
    newest = part.position + np.arange(part.tokens)
    oldest = np.zeros_like(newest) if window is None else np.maximum(newest - window + 1, 0)
    return np.stack([index + np.arange(part.tokens), oldest, newest], 1)


def _tables(
    first: int,
    parts: Sequence[tuple[int, Queries]],
    lengths: Sequence[int],
    group: int,
    window: int | None,
    config: Config,
) -> Tables:
    sharing: dict[tuple[int, _Read], list[NDArray[np.int64]]] = {}
    together: dict[tuple[int, ...], list[tuple[int, Queries]]] = {}
    for index, part in parts:
        together.setdefault(part.path[:-1], []).append((index, part))
    for path, members in together.items():
        begins = list(accumulate((lengths[run] for run in path), initial=0))
        own = begins[-1]  # where the last runs begin, which all queries are in
        rows = [_rows(index, part, window) for index, part in members]
        alike = np.concatenate(rows)
        oldest = int(alike[:, 1].min()) // config.split

        def read(split: int, stop: int, path: tuple[int, ...] = path, begins: list[int] = begins) -> _Read:
            runs, begin = zip(path, begins, begins[1:], strict=False), split * config.split
            return tuple((run, start) for run, start, after in runs if start < stop and after > begin)

        for split in range(oldest, own // config.split):
            end = (split + 1) * config.split
            sharing.setdefault((split, read(split, end)), []).append(alike[alike[:, 1] < end])
        for (_, part), mine in zip(members, rows, strict=True):
            for split in range(max(oldest, own // config.split), int(mine[-1, 2]) // config.split + 1):
                begin, end = split * config.split, (split + 1) * config.split
                sees = mine[(mine[:, 2] >= begin) & (mine[:, 1] < end)]
                sharing.setdefault((split, (*read(split, end), (part.path[-1], own))), []).append(sees)
    count = parts[-1][0] + parts[-1][1].tokens - first
    slots = np.full((count, 1 + max(split for split, _ in sharing)), -1, dtype=np.int32)
    items: list[tuple[int, ...]] = []
    entries: list[NDArray[np.int64]] = []
    read_runs: list[tuple[int, int]] = []
    filled, at_once = 0, config.block_m // group
    for (split, runs), rows in sharing.items():
        seeing = np.concatenate(rows)
        slots[seeing[:, 0] - first, split] = filled + np.arange(len(seeing))
        for done in range(0, len(seeing), at_once):
            items.append((filled + done, min(at_once, len(seeing) - done), len(read_runs), len(runs), split))
        entries.append(seeing)
        read_runs += runs
        filled += len(seeing)
    tables = np.array(items), np.concatenate(entries), np.array(read_runs), slots
    return Tables(first, *(torch.from_numpy(part.astype(np.int32)) for part in tables))
