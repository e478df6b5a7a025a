"""How many programs attend to nodes while others attend to suffixes, and the schedules of captured steps following."""

from dataclasses import replace

import pytest
import torch

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.launch import plan as plans
from hf_fastdecode.attention.launch.dispatch import _H200, estimated_costs
from hf_fastdecode.attention.launch.plan import HeadShape, LaunchPlan
from hf_fastdecode.kernels.forest_decode.schedule import Capacity

from .forests import one_context

pytest.importorskip("triton")

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
        plan._seconds(programs, 128) >= (plan._node_bytes + 4000 * 128 * 8 * 128 * 4) / _H200.kernels.bandwidth
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
