"""The trie of rows: every place gets its token, shared tokens once, stored ones not at all."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from hf_fastdecode.forward.trie import Row, Trie, build_trie


def path_of(trie: Trie, number: int) -> list[int]:
    found = []
    while number >= 0:
        found.insert(0, number)
        number = trie.tree.nodes[number].parent
    return found


def check(trie: Trie, rows: list[Row], width: int, kept: list[Row]) -> None:
    nodes, runs = trie.tree.nodes, trie.runs
    assert [node.start for node in nodes] == [sum(node.length for node in nodes[:one]) for one in range(len(nodes))]
    assert all(node.length > 0 and node.parent < number for number, node in enumerate(nodes))
    total = sum(node.length for node in nodes)
    assert total == trie.tree.kept + len(trie.places)
    assert [run.stored is None for run in runs] == sorted(run.stored is None for run in runs)
    flat = np.full((len(rows), width), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        flat[number, row.column : row.column + len(row.keys)] = row.keys
    keys, positions = np.full(total, -2, dtype=np.int64), np.full(total, -2, dtype=np.int64)
    keys[trie.tree.kept :], positions[trie.tree.kept :] = flat.reshape(-1)[trie.places], trie.positions
    stored = {int(place): int(key) for row in kept for place, key in zip(row.stored, row.keys, strict=True)}
    first = {int(row.stored[0]): row.position for row in kept if len(row.keys)}
    for node, run in zip(nodes, runs, strict=True):
        if run.stored is not None:
            keys[node.start : node.start + node.length] = [stored[int(place)] for place in run.stored]
            begins = first[int(path_stored(trie, run)[0])]
            positions[node.start : node.start + node.length] = np.arange(node.length) + begins + run.first
    new = [number for number, run in enumerate(runs) if run.stored is None]
    for number, row in enumerate(rows):
        shown = trie.index[number]
        own = shown[row.column : row.column + len(row.keys)]
        assert (np.delete(shown, range(row.column, row.column + len(row.keys))) == total).all()
        assert (keys[own] == row.keys).all()
        assert (positions[own] == row.position + np.arange(len(own))).all()
        if len(own):  # its places are the path of its last token's node
            last = max(one for one, node in enumerate(nodes) if node.start <= own[-1])
            reading = [place for one in path_of(trie, last) for place in range(nodes[one].start, sum(nodes[one][:2]))]
            assert reading == own.tolist()
    for one, after in pairwise(new):  # depth first: a node follows its parent, or one below it
        assert nodes[after].parent in {*path_of(trie, one), -1} or nodes[after].parent < min(new)


def path_stored(trie: Trie, run: object) -> np.ndarray:
    number = next(one for one, other in enumerate(trie.runs) if other is run)
    return np.concatenate([trie.runs[one].stored for one in path_of(trie, number)])


def drawn(source: random.Random, rows: int, letters: int, longest: int) -> list[np.ndarray]:
    stems = [[source.randrange(letters) for _ in range(longest)] for _ in range(2)]
    found = []
    for _ in range(rows):
        stem = source.choice(stems)[: source.randrange(longest + 1)]
        found.append(np.array(stem + [source.randrange(letters) for _ in range(source.randrange(4))], dtype=np.int64))
    return found


@pytest.mark.parametrize("seed", range(150))
def test_every_place_gets_its_token(seed):
    source = random.Random(seed)
    texts = drawn(source, source.randrange(1, 9), letters=3, longest=source.choice([3, 12, 40]))
    rows = [Row(text, source.randrange(2), source.randrange(3)) for text in texts]
    width = max(row.column + len(row.keys) for row in rows) + source.randrange(3)
    kept, stored = [], 0
    for text in drawn(source, source.randrange(4), letters=3, longest=12) if seed % 2 else []:
        if len(text):
            kept.append(Row(text, source.randrange(2), stored=np.arange(stored, stored + len(text))))
            stored += len(text)
    least, saving = source.choice([(1, 1), (2, 3), (5, 8)])
    trie = build_trie(rows, width, least=least, saving=saving, kept=kept)
    check(trie, rows, width, kept)
    if (least, saving) == (1, 1):
        paths = {(row.position, tuple(row.keys[: end + 1])) for row in rows for end in range(len(row.keys))}
        before = {(row.position, tuple(row.keys[: end + 1])) for row in kept for end in range(len(row.keys))}
        assert len(trie.places) == len(paths - before)
        assert trie.tree.kept == len(paths & before)


def test_small_sharing_is_left_out():
    rows = [Row(np.array([*range(10), *tail]), 0) for tail in ([1] * 100 + [2], [1] * 100 + [3], [4] * 100)]
    trie = build_trie(rows, 111, least=1, saving=64)
    assert [(run.length, list(run.rows)) for run in trie.runs] == [(110, [0, 1]), (1, [0]), (1, [1]), (110, [2])]
    assert trie.saved == 110
    trie = build_trie(rows, 111, least=32, saving=1)
    assert trie.saved == 110


def test_equal_rows_are_computed_once():
    rows = [Row(np.arange(50), 0, column) for column in (0, 3, 1)]
    trie = build_trie(rows, 53, least=32, saving=64)
    assert len(trie.places) == 50 and trie.index[1, :3].tolist() == [50] * 3
    assert build_trie([*rows, Row(np.arange(50), 1)], 53, least=32, saving=64).saved == 100  # at another position


def test_prefixes_of_each_other():
    rows = [Row(np.arange(1 + length), 0) for length in range(200)]
    trie = build_trie(rows, 200, least=1, saving=1)
    assert len(trie.places) == 200 and len(trie.runs) == 200
