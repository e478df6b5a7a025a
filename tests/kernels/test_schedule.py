"""The schedule of nodes: all the work once, in equal shares, and found again by the merge."""

import random

import pytest
import torch

from hf_fastdecode.kernels.forest_decode.schedule import (
    PIECE_COST,
    Capacity,
    NodeShape,
    longest_share,
    make_schedule,
    needed_capacity,
)

from ..attention.forests import random_forest


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_does_all_the_work_once_in_equal_shares(seed):
    rng = random.Random(seed)
    rows, kv_heads, queries = rng.randint(1, 40), rng.randint(1, 4), rng.randint(1, 9)
    forest = random_forest(rng, rows, rng.randint(0, 3), longest=rng.choice((3, 200)))
    nodes = [NodeShape(node.depth, node.row_start, node.row_count, node.span.length) for node in forest.nodes]
    sizes = {"kv_heads": kv_heads, "queries": queries, "block_m": 16, "block_n": rng.choice((16, 32))}
    needed = needed_capacity(nodes, kv_heads=kv_heads, queries=queries, block_m=16)
    fixed = seed % 2 == 1  # tables of a fixed size, as a captured graph has them
    room = Capacity(needed.depths + seed % 3, needed.nodes, needed.units + seed % 5) if fixed else None
    programs = rng.randint(1, 50)
    schedule = make_schedule(nodes, rows, **sizes, programs=programs, device="cpu", capacity=room)
    pieces, slots = schedule.pieces.tolist(), schedule.unit_slots.tolist()
    if fixed:
        assert len(pieces) == schedule.programs + room.units
        assert len(slots) == room.units + 1
        assert len(schedule.row_units) == room.depths

    done, costs, seen = set(), [], []
    for program in range(schedule.programs if pieces else 0):
        cost, row = 0, program if pieces[program][0] >= 0 else -1
        if fixed and row < 0:
            continue
        while row >= 0:
            node, head, query_tile, first, last, length, row_start, row_count, slot, row_next = pieces[row][:10]
            assert (length, row_start, row_count) == (nodes[node].length, *nodes[node][1:3])
            work = {(node, head, query_tile, tile) for tile in range(first, last)}
            assert work
            assert not work & done
            done |= work
            cost += len(work) + PIECE_COST
            seen.append(slot)
            row = row_next
        costs.append(cost)
    assert done == {
        (index, head, query_tile, tile)
        for index, node in enumerate(nodes)
        for head in range(kv_heads)
        for query_tile in range(-(-node.row_count * queries // 16))
        for tile in range(-(-node.length // sizes["block_n"]))
    }
    assert sorted(seen) == list(range(sum(piece[0] >= 0 for piece in pieces)))
    shares = min(programs, max(1, len(done) // 2))
    units = kv_heads * sum(-(-node.row_count * queries // 16) for node in nodes)
    assert max(costs, default=0) <= 1.06 * (len(done) + PIECE_COST * units) / shares + 2 * (1 + PIECE_COST)
    assert max(costs, default=0) == longest_share(nodes, **sizes, programs=programs)

    # Every row finds, for every node and query, the slots of exactly that work.
    of_slot = {piece[8]: tuple(piece[:3]) for piece in pieces}
    for depth, level in enumerate(forest.levels):
        inside = {row: node for node in level for row in range(node.row_start, node.row_stop)}
        for row in range(rows):
            unit = schedule.row_units[depth, row].item()
            assert (unit >= 0) == (row in inside)
            if unit < 0:
                continue
            offset = schedule.row_offsets[depth, row].item()
            for head in range(kv_heads):
                for query in range(queries):
                    own = unit + head * schedule.row_tiles[depth, row].item() + (offset + query) // 16 - offset // 16
                    expected = (forest.nodes.index(inside[row]), head, (offset + query) // 16)
                    assert {of_slot[slot] for slot in range(slots[own], slots[own + 1])} == {expected}


def test_programs_share_a_wide_node_unit_by_unit():
    """Of 16 units of 10 key tiles, 6 programs take two each, side by side; the other four are cut once."""
    node = [NodeShape(0, 0, 16, 80)]
    schedule = make_schedule(node, 16, kv_heads=1, queries=1, block_m=1, block_n=8, programs=6, device="cpu")
    pieces = schedule.pieces.tolist()
    for program in range(6):
        first = pieces[program]
        second = pieces[first[9]]
        assert [piece[2:5] for piece in (first, second)] == [[program, 0, 10], [6 + program, 0, 10]]
    assert schedule.unit_slots.diff().tolist()[:12] == [1] * 12


def test_units_of_one_length_are_cut_alike():
    """Three units of 40 key tiles for 13 programs: four pieces of ten tiles each, and no piece across two units."""
    node = [NodeShape(0, 0, 3, 320)]
    schedule = make_schedule(node, 3, kv_heads=3, queries=1, block_m=16, block_n=8, programs=13, device="cpu")
    assert schedule.programs == len(schedule.pieces) == 12
    assert [piece[3:5] for piece in schedule.pieces.tolist()] == [[0, 10], [10, 20], [20, 30], [30, 40]] * 3


def test_short_units_go_to_programs_of_their_own():
    """Two heads of a node of two key tiles and one of 128: seven programs, of which one has both short units."""
    nodes = [NodeShape(0, 0, 1, 16), NodeShape(1, 0, 1, 1024)]
    schedule = make_schedule(nodes, 1, kv_heads=2, queries=1, block_m=16, block_n=8, programs=7, device="cpu")
    pieces = schedule.pieces.tolist()
    long = [piece for piece in pieces[:6] if piece[0] == 1]
    assert sorted(piece[1:5] for piece in long) == [
        [head, 0, *tiles] for head in range(2) for tiles in ((0, 42), (42, 85), (85, 128))
    ]
    assert {piece[9] for piece in long} == {-1}
    short = pieces[6]
    assert [short[0], pieces[short[9]][0]] == [0, 0]


def test_units_that_read_the_same_keys_are_cut_side_by_side():
    """Two KV heads of eight query tiles and 30 key tiles, for 24 programs: three groups of eight, of equal cost."""
    node = [NodeShape(0, 0, 8, 240)]
    schedule = make_schedule(node, 8, kv_heads=2, queries=1, block_m=1, block_n=8, programs=24, device="cpu")
    pieces = schedule.pieces.tolist()
    firsts = [piece[1:5] for piece in pieces[:24]]
    assert firsts[:8] == [[0, tile, 0, 19] for tile in range(8)]
    assert firsts[8:16] == [[0, tile, 19, 30] for tile in range(8)]
    assert firsts[16:] == [[1, tile, 8, 30] for tile in range(8)]
    assert [pieces[piece[9]][1:5] for piece in pieces[8:16]] == [[1, tile, 0, 8] for tile in range(8)]
    assert longest_share(node, kv_heads=2, queries=1, block_m=1, block_n=8, programs=24) == 22 + PIECE_COST


def test_who_gets_many_short_units_gets_fewer_tiles():
    """A piece costs two tiles: of 64 short units and a long one, no program gets twice what another does."""
    nodes = [NodeShape(0, 0, 64, 8 * 200), *(NodeShape(1, row, 1, 8) for row in range(64))]
    schedule = make_schedule(nodes, 64, kv_heads=1, queries=1, block_m=64, block_n=8, programs=10, device="cpu")
    pieces = schedule.pieces.tolist()
    costs = []
    for row in range(10):
        cost = 0
        while row >= 0:
            cost, row = cost + pieces[row][4] - pieces[row][3] + PIECE_COST, pieces[row][9]
        costs.append(cost)
    assert max(costs) <= (200 + 64 + PIECE_COST * 65) / 10 + 2 * PIECE_COST


@pytest.mark.parametrize("programs", [0, -1])
def test_no_programs_are_refused(programs):
    node = [NodeShape(0, 0, 3, 320)]
    with pytest.raises(ValueError, match=f"programs must be at least 1, got {programs}"):
        make_schedule(node, 3, kv_heads=1, queries=1, block_m=16, block_n=8, programs=programs, device="cpu")


def test_a_schedule_says_whether_programs_are_left_to_suffixes():
    node = [NodeShape(0, 0, 3, 320)]
    sizes = {"kv_heads": 3, "queries": 1, "block_m": 16, "block_n": 8, "device": "cpu"}
    room = Capacity(1, 1, 5)
    whole = make_schedule(node, 3, **sizes, programs=13, grid=13, capacity=room)
    fewer = make_schedule(node, 3, **sizes, programs=8, grid=13, capacity=room)
    assert not whole.overlap_suffix.item()
    assert fewer.overlap_suffix.item()
    whole.copy_(fewer)
    assert whole.overlap_suffix.item()
    assert torch.equal(whole.pieces, fewer.pieces)
