"""How many programs attend to nodes while others attend to suffixes, and the schedules of captured steps following."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import Segment, SuffixLengths
from hf_fastdecode.attention.launch import own_nodes, step_tables
from hf_fastdecode.attention.launch import plan as plans
from hf_fastdecode.attention.launch.addresses import node_addresses, suffix_addresses
from hf_fastdecode.attention.launch.costs import _H200, estimated_costs
from hf_fastdecode.attention.launch.own_nodes import OwnNodes
from hf_fastdecode.attention.launch.plan import Layout, Plan
from hf_fastdecode.attention.launch.step_tables import StepTables
from hf_fastdecode.attention.scoring import Scoring
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.kernels.forest_decode.schedule import Capacity

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig

CPU = torch.device("cpu")
GQA = Layout(kv_heads=8, queries_per_kv_head=4, head_dim=128, windowed=False)


@pytest.fixture
def on_hopper(monkeypatch):
    """Plans as a GPU of 132 multiprocessors would have them, for the launch parameters that a list holds."""
    config = [Config(128, block_n=128, stages=2, hopper=True, overlap_suffix=True)]
    monkeypatch.setattr(plans, "decode_config", lambda *_, **__: config[0])
    monkeypatch.setattr(plans, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(plans, "costs_of", lambda _: estimated_costs(132, 4.8e12))
    return config


class Stored(NamedTuple):
    """Storage of a layer that does not move."""

    segments: dict[int, Segment]
    suffix: Segment
    version: object = "never moves"


def one_context(rows: int, length: int) -> Forest:
    return Forest(rows, [Node(Span(0, 0, length), 0, rows)])


@pytest.mark.parametrize(("rows", "context"), [(128, 8192), (512, 8192), (1024, 2048), (1024, 16384)])
def test_longer_suffixes_leave_fewer_programs_to_nodes(on_hopper, rows, context):
    plan = Plan(one_context(rows, context), GQA, CPU)
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
    plan = Plan(one_context(512, 8192), GQA, CPU)
    assert {plan.programs(length) for length in (0, 256, 10**6)} == {132}


def test_tables_of_a_size_launch_all_programs(on_hopper):
    """Those without work end at once, and leave their multiprocessors to suffixes."""
    plan = Plan(one_context(512, 8192), GQA, CPU, rows=512)
    schedule = plan.schedule(88, Capacity(1, 1, 200))
    assert schedule.programs == 132
    working = schedule.pieces[:132, 0] >= 0
    assert working.tolist() == [True] * 88 + [False] * 44
    schedule.copy_(plan.schedule(132, Capacity(1, 1, 200)))
    assert (schedule.pieces[:132, 0] >= 0).sum() == 128


def test_without_suffixes_nodes_have_all_programs(on_hopper):
    """Also where fewer would happen to divide the work better."""
    leaves = [Node(Span(0, 128 + 1024 * index, 1024), 4 * index, 4, 1) for index in range(256)]
    plan = Plan(Forest(1024, [Node(Span(0, 0, 128), 0, 1024), *leaves]), GQA, CPU)
    assert plan.programs(0) == 132


def test_nothing_is_left_to_suffixes_where_bytes_are_the_limit(on_hopper):
    """A thousand nodes of four rows each: their bytes and those of suffixes are read at one rate, in any order."""
    leaves = [Node(Span(0, 1000 + 300 * index, 300), 4 * index, 4, 1) for index in range(1000)]
    plan = Plan(Forest(4000, [Node(Span(0, 0, 1000), 0, 4000), *leaves]), GQA, CPU)
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


@pytest.mark.gpu
def test_a_captured_graph_follows_rewritten_schedules(monkeypatch):
    """Two layers in one graph, replayed while schedules leave more and fewer programs to suffixes, and over another
    forest: the bits are those of the same kernels launched one by one."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel for Hopper leaves programs to suffixes")
    monkeypatch.setattr(step_tables, "_SCHEDULE_INTERVAL", 1)
    chosen = [132]
    monkeypatch.setattr(Plan, "programs", lambda self, suffix_tokens: chosen[0])
    device, rows, room = torch.device("cuda"), 128, 40
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    query, new_keys, new_values = normal(2, rows, 32, 1, 128), normal(2, rows, 8, 1, 128), normal(2, rows, 8, 1, 128)
    forests = [one_context(rows, 1000), Forest(100, [Node(Span(0, 0, 700), 0, 60), Node(Span(0, 700, 300), 60, 40)])]
    stored = [Segment(normal(8, 1000, 128), normal(8, 1000, 128)) for _ in range(2)]
    suffixes = [Segment(normal(rows, 8, room, 128), normal(rows, 8, room, 128)) for _ in range(2)]
    scoring = Scoring(128**-0.5)
    tables = StepTables(rows, 2, forests[1], device)
    storage = {layer: Stored({0: stored[layer]}, suffixes[layer]) for layer in range(2)}

    def step():
        return [tables.attend(layer, query[layer], new_keys[layer], new_values[layer], scoring) for layer in range(2)]

    tables.follow(forests[0], SuffixLengths.of(20), storage)
    step()
    known = next(iter(tables._schedules.values()))
    assert known.plan.config.overlap_suffix
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for forest, length, programs in [
        *((forests[0], 20, programs) for programs in (132, 104, 72, 132)),
        *((forests[1], 25, programs) for programs in (80, 132, 96)),
    ]:
        chosen[0] = programs
        for more in range(3):
            tables.follow(forest, SuffixLengths.of(length + more), storage)
            expected = [out.clone() for out in step()]
            for out in captured:
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            for out, other in zip(captured, expected, strict=True):
                assert torch.equal(out, other)
                assert torch.isfinite(out).all()
        assert known.programs == programs
        assert bool(known.tables.overlap_suffix.item()) == (programs < 132)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_captured_steps_follow_their_suffixes(on_hopper, monkeypatch):
    """Schedules change twice while rows decode, and the tokens stay stock's."""
    on_hopper[0] = Config(16, block_n=16, overlap=False, overlap_suffix=True, suffix=SuffixConfig(merge=2))
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    monkeypatch.setattr(plans, "multiprocessors", lambda _: 24)
    monkeypatch.setattr(step_tables, "_SCHEDULE_INTERVAL", 2)
    asked = []

    def programs(self, suffix_tokens):
        asked.append(suffix_tokens)
        return 24 - 8 * min(2, suffix_tokens // 4)

    monkeypatch.setattr(Plan, "programs", programs)
    made = []
    schedule = Plan.schedule
    monkeypatch.setattr(Plan, "schedule", lambda self, *args: made.append(args[0]) or schedule(self, *args))
    model = tiny_model("llama-gqa", num_hidden_layers=1)
    call = ragged_prompts(70, 66, shared=60) | {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 12}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert fd.explain(model).last_call.mode == "graph"
        assert made == [24, 16, 8]
        assert asked == [0, 2, 4, 6, 8, 10]


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_captured_steps_keep_their_tiles(on_hopper):
    """A context so long that other tiles would be chosen for it needs no other capture, and is attended to rightly."""
    rows, room = 4, 8
    captured = on_hopper[0] = Config(16, block_n=16, stages=4, overlap=False)
    query, new_keys, new_values = torch.randn(rows, 4, 1, 16), torch.randn(rows, 2, 1, 16), torch.randn(rows, 2, 1, 16)
    stored = Segment(torch.randn(2, 100, 16), torch.randn(2, 100, 16))
    suffixes = Segment(torch.randn(rows, 2, room, 16), torch.randn(rows, 2, room, 16))
    tables = StepTables(rows, 1, one_context(rows, 20), CPU)

    def attend(length):
        tables.follow(one_context(rows, length), SuffixLengths.of(3), {0: Stored({0: stored}, suffixes)})
        return tables.attend(0, query, new_keys, new_values, Scoring(0.25))

    attend(20)
    (known,) = tables._schedules.values()
    on_hopper[0] = replace(captured, block_n=32, stages=3, suffix=SuffixConfig(32))
    assert tables.fits(one_context(rows, 100))
    out = attend(100)
    assert known.plan.config == captured
    shared = [part[:, :100].expand(rows, -1, -1, -1) for part in stored]
    keys, values = (torch.cat([shared[i], suffixes[i][:, :, :4]], 2).repeat_interleave(2, 1) for i in range(2))
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.25)
    torch.testing.assert_close(out, expected)
    for changes in ({"block_m": 32}, {"warps": 8}, {"per_sm": 2}, {"overlap_suffix": True}, {"hopper": True}):
        on_hopper[0] = replace(captured, **changes)
        assert not tables.fits(one_context(rows, 20))


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_eager_steps_follow_their_suffixes(on_hopper, monkeypatch):
    on_hopper[0] = Config(16, block_n=16, overlap=False, overlap_suffix=True)
    monkeypatch.setattr(plans, "multiprocessors", lambda _: 24)
    monkeypatch.setattr(step_tables, "_SCHEDULE_INTERVAL", 1)
    seen = []
    monkeypatch.setattr(Plan, "programs", lambda self, suffix_tokens: seen.append(suffix_tokens) or 24 - suffix_tokens)
    model = tiny_model("llama-gqa")
    call = ragged_prompts(41, shared=33) | {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 6}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="eager", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
    assert sorted(set(seen)) == list(range(max(seen) + 1))


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


def chosen(forest: Forest, layout: Layout):
    return plans.decode_config(forest, layout, torch.device("cuda"), forest.rows)


MHA = Layout(kv_heads=32, queries_per_kv_head=1, head_dim=128, windowed=False)
MQA = Layout(kv_heads=1, queries_per_kv_head=8, head_dim=128, windowed=False)


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
    ("rows", "layout", "long_from"),
    [
        (8, GQA, 16384),
        (8, GQA._replace(head_dim=64), None),
        (8, GQA._replace(kv_heads=7), None),
        (2, GQA._replace(queries_per_kv_head=16), None),  # several queries of a row
        (20, GQA._replace(queries_per_kv_head=1), None),
        (1, GQA, None),
    ],
)
def test_eight_samples_of_long_contexts_have_more_tiles_in_flight(on_an_h200, rows, layout, long_from):
    for length in (2048, 8192, 16384, 32768):
        config = chosen(one_context(rows, length), layout)
        if long_from is not None and length >= long_from:
            assert (config.block_n, config.stages, config.suffix) == (64, 4, on_an_h200._BESIDE)
        else:
            assert (config.block_n, config.stages, config.suffix) == (64, 3, None)


@pytest.mark.parametrize(
    ("rows", "layout", "long_from"),
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
def test_suffixes_of_few_heads_wait_while_long_contexts_are_read(on_an_h200, rows, layout, long_from):
    for length in (2048, 4096, 8192, 32768):
        long = long_from is not None and length >= long_from
        assert chosen(one_context(rows, length), layout).suffix == (on_an_h200._WAITING if long else None)


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


def test_addresses_are_those_of_the_nodes_views():
    """Segments may be views themselves, of other strides."""
    plain = Segment(torch.zeros(2, 40, 16), torch.zeros(2, 50, 16)[:, 10:].contiguous())
    turned = Segment(torch.zeros(40, 2, 16).transpose(0, 1), torch.zeros(50, 2, 16)[10:].transpose(0, 1))
    segments = {1: plain, 4: turned}
    forest = Forest(12, [Node(Span((1, 4)[row % 2], 3 * row, 2), row, 1) for row in range(12)])
    views = [segments[node.span.segment].view(node.span) for node in forest.nodes]
    assert node_addresses(forest, segments).tolist() == [
        [view.keys.data_ptr() for view in views],
        [view.values.data_ptr() for view in views],
        [view.keys.stride(0) for view in views],
    ]
    assert node_addresses(Forest(2), segments).tolist() == [[], [], []]


@pytest.fixture
def stepping(monkeypatch):
    """Tables whose own nodes grow by four tokens, and a step that compares with PyTorch's attention."""
    monkeypatch.setattr(own_nodes, "STEP", 4)
    rows, room, context = 3, 32, 20
    query, new = torch.randn(rows, 4, 1, 16), Segment(torch.randn(rows, 2, 1, 16), torch.randn(rows, 2, 1, 16))
    shared = Segment(torch.randn(2, context, 16), torch.randn(2, context, 16))
    suffixes = Segment(torch.randn(rows, 2, room, 16), torch.randn(rows, 2, room, 16))
    forest = one_context(rows, context)
    tables = StepTables(rows, 1, forest, CPU, OwnNodes(used=True))

    def step(length):
        tables.follow(forest, SuffixLengths.of(length), {0: Stored({0: shared}, suffixes)})
        out = tables.attend(0, query, *new, Scoring(0.25))
        whole = [
            torch.cat([part.expand(rows, -1, -1, -1), own[:, :, : length + 1]], 2).repeat_interleave(2, 1)
            for part, own in zip(shared, suffixes, strict=True)
        ]
        expected = torch.nn.functional.scaled_dot_product_attention(query, *whole, scale=0.25)
        torch.testing.assert_close(out, expected)

    return tables, step


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
@pytest.mark.parametrize("where", ["schedule", "addresses"])
def test_an_update_that_failed_is_done_again(stepping, monkeypatch, where):
    """No memory for a schedule, or an interrupt before addresses are written: the next step is right again."""
    _, step = stepping
    step(2)
    step(3)
    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise torch.OutOfMemoryError("no room")

        patch.setattr(*((Plan, "schedule") if where == "schedule" else (step_tables, "suffix_addresses")), fail)
        with pytest.raises(torch.OutOfMemoryError):
            step(4)
    for length in (4, 5, 8, 9):
        step(length)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_launch_parameters_stay_while_own_nodes_grow(stepping, monkeypatch):
    """Where others would now be chosen, as after another kernel has failed: schedules are cut for those in use."""
    tables, step = stepping
    step(2)
    (known,) = tables._schedules.values()
    choose = plans.decode_config
    monkeypatch.setattr(plans, "decode_config", lambda *a, **k: replace(choose(*a, **k), block_m=32, block_n=32))
    for length in (3, 4, 8, 12):
        step(length)
    assert list(tables._schedules.values()) == [known]
    assert not tables.fits(one_context(3, 19))


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_own_nodes_of_rows_of_different_lengths(monkeypatch):
    """As long as the shortest suffix allows."""
    monkeypatch.setattr(own_nodes, "STEP", 4)
    rows, lengths = 3, torch.tensor([9, 14, 6], dtype=torch.int32)
    query, new = torch.randn(rows, 4, 1, 16), Segment(torch.randn(rows, 2, 1, 16), torch.randn(rows, 2, 1, 16))
    suffixes = Segment(torch.randn(rows, 2, 32, 16), torch.randn(rows, 2, 32, 16))
    tables = StepTables(rows, 1, Forest(rows), CPU, OwnNodes(used=True))
    for _ in range(2):  # own nodes begin with the second step
        tables.follow(Forest(rows), SuffixLengths(14, lengths, 6), {0: Stored({}, suffixes)})
        out = tables.attend(0, query, *new, Scoring(0.25))
    assert [node.span.length for node in tables.forest.nodes] == [4, 4, 4]
    for row, length in enumerate(lengths.tolist()):
        keys, values = (part[row, :, : length + 1].repeat_interleave(2, 0) for part in suffixes)
        expected = torch.nn.functional.scaled_dot_product_attention(query[row], keys, values, scale=0.25)
        torch.testing.assert_close(out[row], expected)


@pytest.mark.parametrize("rows", [(), (3,)], ids=["segment", "suffix"])
def test_addresses_need_keys_and_values_of_equal_strides(rows):
    """But for those of dimensions of size 1, which nothing steps along."""
    keys, longer = torch.zeros(*rows, 2, 40, 16), torch.zeros(*rows, 2, 50, 16)[..., 10:, :]

    def addresses(part, value):
        if rows:
            return suffix_addresses(Segment(part, value))
        return node_addresses(Forest(1, [Node(Span(0, 1, 2), 0, 1)]), [Segment(part, value)])

    with pytest.raises(ValueError, match="need equal strides"):
        addresses(keys, longer)
    if not rows:
        addresses(keys[:1], longer[:1])
