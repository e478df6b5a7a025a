"""Tables that eager and captured steps follow: schedules, own nodes, addresses, and updates that fail."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Scoring, Segment, SuffixLengths
from hf_fastdecode.attention.launch import plan as plans
from hf_fastdecode.attention.launch import step_tables
from hf_fastdecode.attention.launch.kernel_call import AddressesOfLayers, suffix_addresses
from hf_fastdecode.attention.launch.plan import LaunchPlan, OwnNodes
from hf_fastdecode.attention.launch.step_tables import StepTables
from hf_fastdecode.attention.torch_operators.decode_ops import nodes_attention
from hf_fastdecode.generation.steps import modes

from ..generation.calls import as_in_stock
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .forests import one_context

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig

CPU = torch.device("cpu")


class Stored(NamedTuple):
    """Storage of a layer that does not move."""

    segments: dict[int, Segment]
    suffix: Segment | None
    version: object = "never moves"


@pytest.mark.gpu
def test_a_captured_graph_follows_rewritten_schedules(monkeypatch):
    """Two layers in one graph, replayed while schedules leave more and fewer programs to suffixes, and over another
    forest: the bits are those of the same kernels launched one by one."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel for Hopper leaves programs to suffixes")
    monkeypatch.setattr(step_tables, "_SCHEDULE_INTERVAL", 1)
    chosen = [132]
    monkeypatch.setattr(LaunchPlan, "programs", lambda self, suffix_tokens: chosen[0])
    device, rows, room = torch.device("cuda"), 128, 40
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    query, new_keys, new_values = normal(2, rows, 32, 1, 128), normal(2, rows, 8, 1, 128), normal(2, rows, 8, 1, 128)
    forests = [one_context(rows, 1000), Forest(100, [Node(Span(0, 0, 700), 0, 60), Node(Span(0, 700, 300), 60, 40)])]
    stored = [Segment(normal(8, 1000, 128), normal(8, 1000, 128)) for _ in range(2)]
    suffixes = [Segment(normal(rows, 8, room, 128), normal(rows, 8, room, 128)) for _ in range(2)]
    scoring = Scoring(128**-0.5)
    tables = StepTables(rows, range(2), forests[1], device)
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
def test_nodes_alone():
    """Of a layer without suffixes in the tables, beside one that has some; over two forests."""
    generator = torch.Generator().manual_seed(0)
    nodes = Segment(*torch.randn(2, 2, 50, 16, generator=generator))
    suffix = Segment(*torch.randn(2, 5, 2, 8, 16, generator=generator))
    query = torch.randn(5, 2, 1, 16, generator=generator)
    forests = [
        Forest(5, [Node(Span(0, 0, 30), 0, 5), Node(Span(0, 30, 13), 1, 3, 1)]),
        Forest(4, [Node(Span(0, 5, 41), 0, 3)]),
    ]
    tables = StepTables(5, range(2), forests[0], CPU)
    storage = {0: Stored({0: nodes}, suffix), 1: Stored({0: nodes}, None)}
    for forest in forests:
        tables.follow(forest, SuffixLengths.of(3), storage)
        found = tables.attend_nodes(1, query, 0.25)
        wide = Segment(*(part.double() for part in nodes))
        expected = nodes_attention(query[: forest.rows].double(), forest, {0: wide}, 0.25, backend="plain")
        for one, oracle in zip(found, expected, strict=True):
            torch.testing.assert_close(one[: forest.rows], oracle.float(), atol=2e-6, rtol=2e-6)
        assert not found.out[forest.rows :].any()
        assert (found.lse[forest.rows :] == -torch.inf).all()
    assert (tables.suffixes[0] != 0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
@pytest.mark.parametrize("used", [False, True], ids=["suffixes", "own-nodes"])
def test_tables_follow_trees_read_in_chains(monkeypatch, used):
    """Two trees of short nodes in the same tables, while suffixes grow: what is read in chains differs."""
    config = Config(16, block_n=16, overlap=False, chain=3, suffix=SuffixConfig(merge=2))
    monkeypatch.setattr(plans, "decode_config", lambda *args, **options: config)
    monkeypatch.setattr(plans, "STEP", 8)
    generator = torch.Generator().manual_seed(0)
    nodes = Segment(*torch.randn(2, 2, 90, 16, generator=generator))
    suffix = Segment(*torch.randn(2, 8, 2, 40, 16, generator=generator))
    new = Segment(*torch.randn(2, 8, 2, 1, 16, generator=generator))
    query = torch.randn(8, 4, 1, 16, generator=generator)
    levels = ((1, 20), (2, 3), (4, 2), (8, 5))
    trees = []
    for chosen in (levels, levels[1:3]):
        places = [(depth, index, *level) for depth, level in enumerate(chosen) for index in range(level[0])]
        spans = [Span(0, 5 * start, tokens) for start, (_, _, _, tokens) in enumerate(places)]
        trees.append(
            Forest(8, [Node(s, i * 8 // n, 8 // n, d) for s, (d, i, n, _) in zip(spans, places, strict=True)])
        )
    tables = StepTables(8, range(1), trees[0], CPU, OwnNodes(used=used))
    storage = {0: Stored({0: nodes}, suffix)}
    for forest, length in ((trees[0], 3), (trees[0], 9), (trees[1], 9), (trees[1], 30), (trees[0], 30)):
        assert tables.fits(forest)
        tables.follow(forest, SuffixLengths.of(length), storage)
        out = tables.attend(0, query, *new, Scoring(0.25))
        tables.follow(forest, SuffixLengths.of(length), storage)  # own nodes begin once the head layout is known
        out = tables.attend(0, query, *new, Scoring(0.25))
        whole = Segment(*(part[:, :, : length + 1].double() for part in suffix))
        kv = ForestKV(forest, [Segment(*(part.double() for part in nodes))], whole, length + 1)
        expected, _ = reference.forest_attention(query.double(), kv, 0.25)
        torch.testing.assert_close(out, expected.float(), atol=2e-6, rtol=2e-6)
    known = next(iter(tables._schedules.values()))
    assert known.tables.chains.shape[1] == 3
    assert len(known.plan._node_shapes) < len(tables.forest.nodes)


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

    monkeypatch.setattr(LaunchPlan, "programs", programs)
    made = []
    schedule = LaunchPlan.schedule
    monkeypatch.setattr(LaunchPlan, "schedule", lambda self, *args: made.append(args[0]) or schedule(self, *args))
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
    tables = StepTables(rows, [0], one_context(rows, 20), CPU)

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
    monkeypatch.setattr(
        LaunchPlan, "programs", lambda self, suffix_tokens: seen.append(suffix_tokens) or 24 - suffix_tokens
    )
    model = tiny_model("llama-gqa")
    call = ragged_prompts(41, shared=33) | {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 6}
    as_in_stock(model, lambda: model.generate(**call), mode="eager", backend="triton")
    assert sorted(set(seen)) == list(range(max(seen) + 1))


def test_addresses_are_those_of_the_nodes_views():
    """Segments may be views themselves, of other strides."""
    plain = Segment(torch.zeros(2, 40, 16), torch.zeros(2, 50, 16)[:, 10:].contiguous())
    turned = Segment(torch.zeros(40, 2, 16).transpose(0, 1), torch.zeros(50, 2, 16)[10:].transpose(0, 1))
    segments = {1: plain, 4: turned}
    forest = Forest(12, [Node(Span((1, 4)[row % 2], 3 * row, 2), row, 1) for row in range(12)])
    views = [segments[node.span.segment].view(node.span) for node in forest.nodes]
    assert AddressesOfLayers(forest).of(segments).tolist() == [
        [view.keys.data_ptr() for view in views],
        [view.values.data_ptr() for view in views],
        [view.keys.stride(0) for view in views],
    ]
    assert AddressesOfLayers(Forest(2)).of(segments).tolist() == [[], [], []]


@pytest.fixture
def stepping(monkeypatch):
    """Tables whose own nodes grow by four tokens, and a step that compares with PyTorch's attention."""
    monkeypatch.setattr(plans, "STEP", 4)
    rows, room, context = 3, 32, 20
    query, new = torch.randn(rows, 4, 1, 16), Segment(torch.randn(rows, 2, 1, 16), torch.randn(rows, 2, 1, 16))
    shared = Segment(torch.randn(2, context, 16), torch.randn(2, context, 16))
    suffixes = Segment(torch.randn(rows, 2, room, 16), torch.randn(rows, 2, room, 16))
    forest = one_context(rows, context)
    tables = StepTables(rows, [0], forest, CPU, OwnNodes(used=True))

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

        patch.setattr(*((LaunchPlan, "schedule") if where == "schedule" else (step_tables, "suffix_addresses")), fail)
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
    monkeypatch.setattr(plans, "STEP", 4)
    rows, lengths = 3, torch.tensor([9, 14, 6], dtype=torch.int32)
    query, new = torch.randn(rows, 4, 1, 16), Segment(torch.randn(rows, 2, 1, 16), torch.randn(rows, 2, 1, 16))
    suffixes = Segment(torch.randn(rows, 2, 32, 16), torch.randn(rows, 2, 32, 16))
    tables = StepTables(rows, [0], Forest(rows), CPU, OwnNodes(used=True))
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
        return AddressesOfLayers(Forest(1, [Node(Span(0, 1, 2), 0, 1)])).of([Segment(part, value)])

    with pytest.raises(ValueError, match="need equal strides"):
        addresses(keys, longer)
    if not rows:
        addresses(keys[:1], longer[:1])
