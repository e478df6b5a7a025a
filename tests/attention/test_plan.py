"""Launch plans: programs for nodes and for suffixes, schedules of captured steps, launch parameters, and chains."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.launch import plan as plans
from hf_fastdecode.attention.launch.costs import _H200, estimated_costs
from hf_fastdecode.attention.launch.plan import (
    HeadShape,
    LaunchPlan,
    chains_may_stay,
    choose_chains,
    node_shapes,
    with_own_nodes,
)
from hf_fastdecode.kernels.forest_decode.schedule import Capacity, NodeShape

from .forests import one_context, random_forest

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.config import CHAINED, Config

CPU = torch.device("cpu")
GQA = HeadShape(kv_heads=8, queries_per_kv_head=4, head_dim=128, windowed=False)


@pytest.mark.parametrize(("rows", "context"), [(128, 8192), (512, 8192), (1024, 2048), (1024, 16384)])
def test_longer_suffixes_leave_fewer_programs_to_nodes(on_hopper, rows, context):
    plan = LaunchPlan(one_context(rows, context), GQA, CPU)
    chosen = [plan.programs(length) for length in (0, 64, 256, 1024, 4096)]
    assert chosen[0] == 132
    assert chosen == sorted(chosen, reverse=True)
    assert 66 <= chosen[-1] < 116
    for programs in chosen:
        schedule = plan.schedule(programs)
        assert schedule.programs <= programs
        pieces = schedule.pieces[:, 3:5].diff().sum()
        assert pieces == 8 * rows * 4 // 128 * context // 128


def test_kernels_that_take_turns_use_all_programs(on_hopper):
    on_hopper[0] = replace(on_hopper[0], overlap_suffix=False)
    plan = LaunchPlan(one_context(512, 8192), GQA, CPU)
    assert {plan.programs(length) for length in (0, 256, 10**6)} == {132}


def test_tables_of_a_size_launch_all_programs(on_hopper):
    """Those without work end at once, and leave their multiprocessors to suffixes."""
    plan = LaunchPlan(one_context(512, 8192), GQA, CPU, rows=512)
    schedule = plan.schedule(88, Capacity(1, 1, 200))
    assert schedule.programs == 132
    working = schedule.pieces[:132, 0] >= 0
    assert working.tolist() == [True] * 88 + [False] * 44
    schedule.copy_(plan.schedule(132, Capacity(1, 1, 200)))
    assert (schedule.pieces[:132, 0] >= 0).sum() == 128


def test_without_suffixes_nodes_have_all_programs(on_hopper):
    """Also where fewer would happen to divide the work better."""
    leaves = [Node(Span(0, 128 + 1024 * index, 1024), 4 * index, 4, 1) for index in range(256)]
    plan = LaunchPlan(Forest(1024, [Node(Span(0, 0, 128), 0, 1024), *leaves]), GQA, CPU)
    assert plan.programs(0) == 132


def test_nothing_is_left_to_suffixes_where_bytes_are_the_limit(on_hopper):
    """A thousand nodes of four rows each: their bytes and those of suffixes are read at one rate, in any order."""
    leaves = [Node(Span(0, 1000 + 300 * index, 300), 4 * index, 4, 1) for index in range(1000)]
    plan = LaunchPlan(Forest(4000, [Node(Span(0, 0, 1000), 0, 4000), *leaves]), GQA, CPU)
    alone = plan._seconds(132, 128)
    assert all(
        plan._seconds(programs, 128) >= (plan._node_bytes + 4000 * 128 * 8 * 128 * 4) / _H200.bandwidth
        for programs in plan._node_seconds
    )
    assert plan._seconds(plan.programs(128), 128) <= alone


def test_fewer_bytes_a_second_leave_less_to_multiprocessors():
    """An H100's memory is slower than an H200's, with as many multiprocessors."""
    slower = estimated_costs(132, 3.35e12)
    assert slower.beside_bandwidth == pytest.approx(_H200.beside_bandwidth * 3.35 / 4.8)
    assert estimated_costs(66, 2.4e12).beside_bandwidth == pytest.approx(_H200.beside_bandwidth)


def test_only_wide_groups_are_attended_to_apart(monkeypatch):
    from hf_fastdecode.kernels.forest_decode import config

    monkeypatch.setattr(config, "_hopper_kernel_runs", lambda _: True)
    choose = config.choose_config
    assert choose(512, 128, queries_per_kv_head=4, rows=64, kv_heads=8, overlap=True).overlap_suffix
    assert not choose(512, 128, queries_per_kv_head=4, rows=63, kv_heads=8, overlap=True).overlap_suffix
    assert not choose(4096, 128, queries_per_kv_head=1, rows=64, kv_heads=8, overlap=True).overlap_suffix
    assert not choose(512, 128, queries_per_kv_head=4, rows=64, kv_heads=8, overlap=True, windowed=True).overlap_suffix
    assert not choose(512, 80, queries_per_kv_head=4, rows=64, kv_heads=8, overlap=True).overlap_suffix


def test_tiles_shrink_to_what_a_device_holds():
    from hf_fastdecode.kernels.forest_decode.config import choose_config

    def tiles(packed, **options):
        config = choose_config(packed, 128, overlap=False, **options)
        return config.block_m, config.block_n, config.stages

    assert tiles(32, kv_heads=32) == (32, 128, 3)
    assert tiles(32, kv_heads=8) == (32, 64, 3)
    assert tiles(8, kv_heads=32, keys=767) == tiles(8, kv_heads=32) == (16, 64, 4)
    assert tiles(8, kv_heads=32, keys=768) == tiles(8, kv_heads=24, keys=768) == (16, 128, 3)
    assert tiles(8, kv_heads=23, keys=768) == (16, 64, 3)
    assert tiles(8, kv_heads=32, keys=4000, windowed=True) == (16, 64, 4)
    assert tiles(1, kv_heads=32, keys=4000) == (16, 64, 3)
    assert tiles(32, kv_heads=32, shared_memory=163 * 1024) == (32, 64, 4)
    assert tiles(8, kv_heads=32, keys=4000, shared_memory=163 * 1024) == (16, 64, 4)
    assert tiles(8, kv_heads=32, keys=4000, shared_memory=99 * 1024) == (16, 64, 2)
    assert tiles(64, shared_memory=99 * 1024) == (64, 64, 2)


@pytest.fixture
def on_an_h200(monkeypatch):
    """Launch parameters as an H200 has them."""
    from hf_fastdecode.kernels.forest_decode import config

    monkeypatch.setattr(config, "_hopper_kernel_runs", lambda _: True)
    monkeypatch.setattr(plans, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(plans, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(plans, "shared_memory", lambda _: 227 * 1024)
    return config


def chosen(forest: Forest, shape: HeadShape):
    return plans.decode_config(forest, shape, torch.device("cuda"), forest.rows)


MHA = HeadShape(kv_heads=32, queries_per_kv_head=1, head_dim=128, windowed=False)
MQA = HeadShape(kv_heads=1, queries_per_kv_head=8, head_dim=128, windowed=False)


@pytest.mark.parametrize(
    ("lengths", "tiles"), [((2048,), (64, 4)), ((8192,), (128, 3)), ((1700, 1700), (128, 3)), ((1500, 1500), (64, 4))]
)
def test_few_rows_of_many_heads_read_larger_tiles_of_long_contexts(on_an_h200, lengths, tiles):
    nodes = [Node(Span(0, sum(lengths[:depth]), length), 0, 8, depth) for depth, length in enumerate(lengths)]
    config = chosen(Forest(8, nodes), MHA)
    assert (config.block_n, config.stages) == tiles
    windowed = chosen(Forest(8, nodes), MHA._replace(windowed=True))
    assert (windowed.block_n, windowed.stages) == (64, 4)


@pytest.mark.parametrize(
    ("rows", "shape", "long_from"),
    [
        (8, GQA, 16384),
        (8, GQA._replace(head_dim=64), None),
        (8, GQA._replace(kv_heads=7), None),
        (2, GQA._replace(queries_per_kv_head=16), None),  # several queries of a row
        (20, GQA._replace(queries_per_kv_head=1), None),
        (1, GQA, None),
    ],
)
def test_eight_samples_of_long_contexts_have_more_tiles_in_flight(on_an_h200, rows, shape, long_from):
    for length in (2048, 8192, 16384, 32768):
        config = chosen(one_context(rows, length), shape)
        if long_from is not None and length >= long_from:
            assert (config.block_n, config.stages, config.suffix) == (64, 5, on_an_h200._BESIDE)
        else:
            assert (config.block_n, config.stages, config.suffix) == (64, 3, None)


@pytest.mark.parametrize(
    ("rows", "shape", "long_from"),
    [
        (128, MQA, 4096),
        (65, MQA, 8192),
        (64, MQA, None),
        (129, MQA, None),
        (128, MQA._replace(queries_per_kv_head=16), None),
        (128, MQA._replace(head_dim=64), None),
        (128, MQA._replace(windowed=True), None),
        (128, GQA, None),
    ],
)
def test_suffixes_of_few_heads_wait_while_long_contexts_are_read(on_an_h200, rows, shape, long_from):
    for length in (2048, 4096, 8192, 32768):
        long = long_from is not None and length >= long_from
        assert chosen(one_context(rows, length), shape).suffix == (on_an_h200._WAITING if long else None)


def test_where_contexts_begin_to_be_long_for_wide_nodes(on_an_h200):
    options = {"queries_per_kv_head": 8, "rows": 128, "kv_heads": 1, "overlap": True}
    assert on_an_h200.choose_config(1024, 128, keys=191, **options).suffix is None
    assert on_an_h200.choose_config(1024, 128, keys=192, **options).suffix == on_an_h200._WAITING


def test_how_long_a_forest_is_counts_what_each_node_takes(on_an_h200):
    """A root of all rows is not gone through more often for what its problems hold."""
    problems = [Node(Span(0, 64 + 200 * index, 200), 8 * index, 8, 1) for index in range(16)]
    forest = Forest(128, [Node(Span(0, 0, 64), 0, 128), *problems])
    assert chosen(forest, MQA).suffix is None
    assert chosen(one_context(128, 64 + 16 * 200), MQA).suffix is not None


def test_what_suits_long_contexts_needs_a_device_that_holds_it():
    from hf_fastdecode.kernels.forest_decode.config import _BESIDE, choose_config

    options = {"queries_per_kv_head": 4, "rows": 8, "kv_heads": 8}
    chosen = [
        choose_config(32, 128, keys=keys, overlap=overlap, shared_memory=memory * 1024, **options).suffix
        for keys, overlap, memory in ((768, True, 200), (767, True, 200), (768, False, 200), (768, True, 199))
    ]
    assert chosen == [_BESIDE, None, None, None]


def tree(*levels: tuple[int, int], rows: int) -> Forest:
    """A forest of levels of so many nodes of so many tokens, evenly divided."""
    nodes = [
        Node(Span(0, 1000 * depth + 10 * index, tokens), index * rows // count, rows // count, depth)
        for depth, (count, tokens) in enumerate(levels)
        for index in range(count)
    ]
    return Forest(rows, nodes)


@pytest.mark.parametrize("seed", range(60))
def test_rows_read_their_paths_in_order(seed):
    rng = random.Random(seed)
    forest = random_forest(rng, rng.randint(1, 30), rng.randint(0, 6), longest=rng.choice((3, 20, 200)))
    if seed % 2:
        counts = [1, *sorted(2 ** rng.randint(0, 4) for _ in range(5)), 16]
        forest = tree(*((count, rng.randint(1, 30)) for count in counts), rows=16)
    config = Config(rng.choice((16, 32, 64)), block_n=rng.choice((16, 64)), chain=rng.choice((2, 3, 8)))
    shapes = node_shapes(forest, rng.choice((1, 4, 16)), config)
    assert [shape[:2] for shape in shapes] == sorted(shape[:2] for shape in shapes)
    read = [[] for _ in range(forest.rows)]
    for shape in shapes:
        assert 1 <= len(shape.links) <= config.chain
        assert shape.length == sum(forest.nodes[index].span.length for index, _ in shape.links)
        assert [tokens for _, tokens in shape.links] == [forest.nodes[index].span.length for index, _ in shape.links]
        last = forest.nodes[shape.links[-1][0]]
        assert (shape.row_start, shape.row_count) == (last.row_start, last.row_count)
        for row in range(shape.row_start, shape.row_start + shape.row_count):
            read[row].append((shape.depth, shape.links))
    for row, found in enumerate(read):
        assert [depth for depth, _ in found] == list(range(len(found)))
        spans = [forest.nodes[index].span for _, links in found for index, _ in links]
        assert tuple(spans) == forest.paths[row]


def test_short_nodes_are_read_with_those_below():
    """Query tiles of four rows: reading the root once more with each of its descendants takes no more of them."""
    forest = tree((1, 512), (4, 4), (8, 4), (16, 4), rows=64)
    shapes = node_shapes(forest, 4, Config(16, block_n=64, chain=8))
    assert [len(shape.links) for shape in shapes] == [4] * 16
    assert shapes[1] == NodeShape(0, 4, 4, 524, ((0, 512), (1, 4), (5, 4), (14, 4)))
    shorter = node_shapes(forest, 4, Config(16, block_n=64, chain=2))
    assert [(shape.depth, len(shape.links)) for shape in shorter] == [(0, 2)] * 4 + [(1, 2)] * 16
    assert node_shapes(forest, 4, Config(16))[1] == NodeShape(1, 0, 16, 4)


def test_a_long_node_is_read_by_itself_where_that_takes_fewer_query_tiles():
    forest = tree((1, 512), (8, 4), (32, 4), rows=32)
    shapes = node_shapes(forest, 1, Config(16, block_n=64, chain=8))
    assert shapes[0] == NodeShape(0, 0, 32, 512, ((0, 512),))
    assert [(shape.depth, len(shape.links)) for shape in shapes[1:]] == [(1, 2)] * 32


def test_a_node_that_some_rows_end_with_is_read_alone():
    forest = Forest(4, [Node(Span(0, 0, 3), 0, 4), Node(Span(0, 5, 3), 0, 3, 1)])
    shapes = node_shapes(forest, 1, Config(16, chain=4))
    assert [shape.links for shape in shapes] == [((0, 3),), ((1, 3),)]


HOPPER = Config(128, block_n=128, stages=2, hopper=True)
NARROW = Config(16, block_n=64)


@pytest.mark.parametrize(
    ("levels", "rows", "kv_heads", "queries", "found"),
    [
        (((1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (32, 16), (64, 16), (128, 16)), 1024, 8, 4, 64),
        (((1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (32, 16), (64, 16), (128, 16)), 1024, 32, 1, 16),
        (((1, 1024), (16, 256)), 64, 8, 4, 64),
        (((1, 1024), (4, 256), (16, 128)), 512, 8, 4, None),
        (((1, 2400), (8, 512)), 1024, 8, 4, None),
        (((1, 2048),), 1024, 8, 4, None),
    ],
)
def test_chains_are_for_short_nodes(levels, rows, kv_heads, queries, found):
    """Trees of FastTree, and contexts that many rows share, of which the Hopper kernel's wide tiles waste nothing."""
    forest = tree(*levels, rows=rows)
    config = choose_chains(forest, HeadShape(kv_heads, queries, 128, False), HOPPER, 132)
    assert config is HOPPER if found is None else (config in CHAINED and config.block_m == found)


def test_narrow_tiles_large_heads_and_single_levels_have_no_chains():
    deep = tree(*((2**depth, 16) for depth in range(8)), rows=1024)
    for forest, head_dim, config in (
        (deep, 256, HOPPER),
        (deep, 128, NARROW),
        (tree((128, 16), rows=1024), 128, HOPPER),
        (Forest(1024), 128, HOPPER),
    ):
        assert choose_chains(forest, HeadShape(8, 4, head_dim, False), config, 132) is config


@pytest.mark.parametrize(("levels", "rows"), [(((1, 4000),), 10), (((1, 8), (2, 256)), 64)])
def test_own_nodes_do_not_decide(levels, rows):
    """A captured step has its launch parameters before any row has own nodes, and keeps them."""
    forest = tree(*levels, rows=rows)
    for tokens in (1, 384):
        shape = HeadShape(1, 16, 128, False)
        found = choose_chains(with_own_nodes(forest, tokens), shape, HOPPER, 132)
        assert found is choose_chains(forest, shape, HOPPER, 132)


@pytest.mark.parametrize(
    ("levels", "rows", "wide", "stays"),
    [
        (((1, 190), (2, 200)), 16, Config(64, block_n=128), True),  # without chains about as fast
        (((1, 40), (2, 200)), 16, Config(64, block_n=128), True),
        (((1, 16384), (2, 200)), 256, HOPPER, False),
        (((2, 300),), 16, Config(64, block_n=128), False),  # nothing is known of single levels
        ((), 16, Config(64, block_n=128), False),
    ],
)
def test_captured_chains_stay_where_they_cost_little(levels, rows, wide, stays):
    forest = with_own_nodes(tree(*levels, rows=rows), 1)
    chained, _ = CHAINED
    shape = HeadShape(2, 4, 128, False)
    assert chains_may_stay(forest, shape, chained, wide, 132) is stays
    assert not chains_may_stay(forest, shape, chained, NARROW, 132)
    assert not chains_may_stay(forest, shape, replace(chained, chain=3), wide, 132)  # whose time is not known
