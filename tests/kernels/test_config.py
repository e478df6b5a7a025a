"""Launch parameters of the decode kernels, and their schedules."""

from __future__ import annotations

import random
from dataclasses import astuple, replace
from itertools import pairwise, product

import pytest
import torch

from hf_fastdecode.kernels.device import power_of_two
from hf_fastdecode.kernels.forest_decode.schedule import (
    PIECE_COST,
    Capacity,
    NodeShape,
    longest_share,
    make_schedule,
    needed_capacity,
)

from ..attention.forests import random_forest

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.config import choose_config, choose_merge_config, choose_suffix_config

HEAD_DIMS = (64, 128, 192, 256)
PROGRAMS = (8, 64, 128, 256, 512, 1024, 4096)
SCRATCH = 16  # KiB that a program of suffixes may take beside its tiles


def scheduled(nodes, rows, programs, *, kv_heads=1, queries=1, block_m=1, **options):
    sizes = {"kv_heads": kv_heads, "queries": queries, "block_m": block_m, "block_n": 8}
    return make_schedule(nodes, rows, **sizes, programs=programs, device="cpu", **options)


def suffixes(programs, queries_per_kv_head, *, kv_heads=8, head_dim=128, queries=1, overlap_suffix=False, memory=227):
    sizes = (programs // kv_heads, kv_heads, queries_per_kv_head // queries, queries, head_dim)
    return choose_suffix_config(*sizes, overlap_suffix=overlap_suffix, shared_memory=memory * 1024)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("queries_per_kv_head", [1, 3, 8, 16, 48, 256])
def test_what_a_thread_holds_is_bounded(queries_per_kv_head, head_dim):
    """Of suffixes, and of those that merge."""
    width = power_of_two(head_dim)
    for programs, kv_heads, overlap_suffix in product(PROGRAMS, (1, 8), (False, True)):
        config = suffixes(
            programs, queries_per_kv_head, kv_heads=kv_heads, head_dim=head_dim, overlap_suffix=overlap_suffix
        )
        held = power_of_two(queries_per_kv_head) * width / (32 * config.warps)  # numbers of the sum
        assert config.warps in (1, 2, 4, 8)
        assert held <= 64 or config.warps == 8
        assert config.merge == 1 or 1 < config.merge <= 128 / held
        if queries_per_kv_head == 1:  # its keys are multiplied without matrix units
            assert config.block_n * width <= 128 * 32 * config.warps
    rows, warps, merge = choose_merge_config(queries_per_kv_head, head_dim)
    packed = rows * power_of_two(queries_per_kv_head)
    held = packed * power_of_two(head_dim) / (32 * warps)
    assert packed == max(16, power_of_two(queries_per_kv_head))
    assert warps in (4, 8)
    assert held <= 64 or warps == 8
    assert merge == 1 or 1 < merge <= 64 / held


@pytest.mark.parametrize(
    ("queries_per_kv_head", "head_dim", "expected"),
    [(1, 128, (16, 4, 4)), (4, 128, (4, 4, 4)), (16, 64, (1, 4, 4)), (16, 256, (1, 4, 2)), (128, 128, (1, 8, 1))],
)
def test_launch_parameters_of_merging(queries_per_kv_head, head_dim, expected):
    assert choose_merge_config(queries_per_kv_head, head_dim) == expected


@pytest.mark.parametrize("queries_per_kv_head", [1, 8, 16, 64, 112, 256])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_of_suffixes_are_the_largest_that_a_device_holds(queries_per_kv_head, head_dim):
    numbers = 2 * power_of_two(queries_per_kv_head) + 4 * 16  # bytes: queries in 16 bits, 16 of them in fp32
    scratch = max(SCRATCH, power_of_two(head_dim) * numbers / 1024)
    for programs, kv_heads in product(PROGRAMS, (1, 8)):
        whole = suffixes(programs, queries_per_kv_head, kv_heads=kv_heads, head_dim=head_dim, memory=1024)
        for memory in (227, 163, 99, 48):
            config = suffixes(programs, queries_per_kv_head, kv_heads=kv_heads, head_dim=head_dim, memory=memory)
            tiles = 4 * power_of_two(head_dim) * config.block_n * config.stages / 1024  # KiB of keys and values
            assert replace(config, block_n=whole.block_n, stages=whole.stages) == whole
            assert config.stages == whole.stages or config.block_n == 16
            least = (config.block_n, config.stages) == (16, 1)  # of wide heads, more than small devices hold
            assert tiles + scratch <= memory or (least and (memory == 48 or scratch > memory - 16))
            assert config == whole or tiles * 2 + scratch > memory
            assert config.block_n >= 16  # matrix units take no fewer


@pytest.mark.parametrize("queries_per_kv_head", [1, 4, 16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_fewer_programs_the_more_each_loads_at_once(queries_per_kv_head, head_dim):
    chosen = [suffixes(programs, queries_per_kv_head, head_dim=head_dim) for programs in PROGRAMS]
    for fewer, more in pairwise(chosen):
        assert fewer.block_n * fewer.stages >= more.block_n * more.stages
        assert fewer.warps >= more.warps
        assert fewer.merge >= more.merge
    assert chosen[0].block_n > chosen[-1].block_n


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "expected"),
    [
        (2, 32, 32, 128, (128, 8, 2, 8)),
        (2, 32, 32, 256, (64, 8, 2, 8)),
        (8, 32, 32, 64, (32, 1, 3, 8)),
        (8, 32, 32, 128, (32, 1, 3, 8)),
        (8, 32, 32, 256, (16, 1, 3, 8)),
        (32, 32, 32, 128, (32, 1, 2, 8)),
        (64, 32, 32, 128, (16, 1, 2, 4)),
        (8, 32, 8, 128, (128, 4, 3, 8)),
        (9, 32, 8, 128, (64, 4, 3, 8)),
        (16, 32, 8, 128, (64, 4, 3, 8)),
        (32, 32, 8, 128, (32, 2, 3, 8)),
        (64, 32, 8, 128, (32, 2, 2, 8)),
        (65, 32, 8, 128, (16, 1, 3, 8)),
        (65, 128, 8, 256, (16, 2, 3, 2)),
        (128, 8, 1, 128, (64, 4, 3, 8)),
    ],
)
def test_launch_parameters_of_suffixes_on_an_h200(rows, heads, kv_heads, head_dim, expected):
    queries_per_kv_head = heads // kv_heads
    assert astuple(choose_suffix_config(rows, kv_heads, queries_per_kv_head, 1, head_dim)) == expected
    if queries_per_kv_head % 4 == 0:  # as many packed queries, of several tokens
        assert astuple(choose_suffix_config(rows, kv_heads, queries_per_kv_head // 4, 4, head_dim)) == expected


@pytest.mark.parametrize(("queries_per_kv_head", "merge"), [(1, 32), (4, 32), (8, 16), (16, 8)])
def test_few_rows_of_one_kv_head_merge_more_at_once(queries_per_kv_head, merge):
    """There, every program of the nodes leaves a partial of the same queries."""
    alone = suffixes(64, queries_per_kv_head, kv_heads=1)
    assert alone.merge == merge
    assert replace(alone, merge=8) == suffixes(64, queries_per_kv_head, kv_heads=2)
    assert suffixes(66, queries_per_kv_head, kv_heads=1) == suffixes(66, queries_per_kv_head, kv_heads=2)


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("queries_per_kv_head", [1, 4, 16])
def test_beside_nodes_suffixes_take_what_many_programs_would(kv_heads, queries_per_kv_head):
    """On the few multiprocessors that nodes leave, any number of programs is many."""
    for programs in PROGRAMS:
        chosen = suffixes(programs, queries_per_kv_head, kv_heads=kv_heads, overlap_suffix=True)
        assert chosen == suffixes(max(programs, 520), queries_per_kv_head, kv_heads=kv_heads)


@pytest.mark.parametrize("packed", [1, 8, 32, 64, 65, 1000])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_of_nodes_fit_threads_and_devices(packed, head_dim):
    width = power_of_two(head_dim)
    for kv_heads, keys, memory in product((1, 32), (0, 4000), (227, 163, 99)):
        options = {"kv_heads": kv_heads, "keys": keys, "shared_memory": memory * 1024}
        config = choose_config(packed, head_dim, overlap=False, **options)
        assert config.block_m * width <= 64 * 32 * config.warps  # numbers of the sum that a thread holds
        assert 2 * width * (config.block_m + 2 * config.stages * config.block_n) <= memory * 1024
        assert config.block_m >= 16  # matrix units take no fewer
        assert config.block_n >= 32
        assert config.stages >= 2
        biased = choose_config(packed, head_dim, overlap=False, windowed=True, biased=True, **options)
        biases = 4 * (biased.stages - 1) * biased.block_m * biased.block_n
        assert 2 * width * (biased.block_m + 2 * biased.stages * biased.block_n) + biases <= memory * 1024
        assert biased.block_m == config.block_m or (head_dim > 128 and memory == 99)


@pytest.mark.parametrize(
    ("packed", "head_dim", "memory", "expected"),
    [
        (64, 128, 227, (64, 128, 3, 4)),
        (64, 128, 163, (64, 64, 3, 4)),
        (65, 128, 163, (128, 64, 3, 8)),
        (32, 256, 99, (32, 32, 2, 4)),
        (64, 256, 99, (64, 32, 2, 8)),
        (64, 256, 227, (64, 64, 3, 8)),
        (65, 256, 227, (64, 64, 3, 8)),  # tiles hold no more queries, and are the same
        (128, 256, 163, (64, 64, 2, 8)),
    ],
)
def test_launch_parameters_of_nodes(packed, head_dim, memory, expected):
    config = choose_config(packed, head_dim, overlap=False, shared_memory=memory * 1024)
    assert (config.block_m, config.block_n, config.stages, config.warps) == expected


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
    schedule = scheduled(node, 16, 6)
    pieces = schedule.pieces.tolist()
    for program in range(6):
        first = pieces[program]
        second = pieces[first[9]]
        assert [piece[2:5] for piece in (first, second)] == [[program, 0, 10], [6 + program, 0, 10]]
    assert schedule.unit_slots.diff().tolist()[:12] == [1] * 12


def test_units_of_one_length_are_cut_alike():
    """Three units of 40 key tiles for 13 programs: four pieces of ten tiles each, and no piece across two units."""
    node = [NodeShape(0, 0, 3, 320)]
    schedule = scheduled(node, 3, 13, kv_heads=3, block_m=16)
    assert schedule.programs == len(schedule.pieces) == 12
    assert [piece[3:5] for piece in schedule.pieces.tolist()] == [[0, 10], [10, 20], [20, 30], [30, 40]] * 3


def test_short_units_go_to_programs_of_their_own():
    """Two heads of a node of two key tiles and one of 128: seven programs, of which one has both short units."""
    nodes = [NodeShape(0, 0, 1, 16), NodeShape(1, 0, 1, 1024)]
    schedule = scheduled(nodes, 1, 7, kv_heads=2, block_m=16)
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
    schedule = scheduled(node, 8, 24, kv_heads=2)
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
    schedule = scheduled(nodes, 64, 10, block_m=64)
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
        scheduled(node, 3, programs, block_m=16)


def test_a_schedule_says_whether_programs_are_left_to_suffixes():
    node = [NodeShape(0, 0, 3, 320)]
    sizes = {"kv_heads": 3, "block_m": 16, "grid": 13, "capacity": Capacity(1, 1, 5)}
    whole, fewer = (scheduled(node, 3, programs, **sizes) for programs in (13, 8))
    assert not whole.overlap_suffix.item()
    assert fewer.overlap_suffix.item()
    whole.copy_(fewer)
    assert whole.overlap_suffix.item()
    assert torch.equal(whole.pieces, fewer.pieces)
