"""Operators on the CPU, tiny: every way against the oracle, what a row holds, and what a wrong way gets."""

from dataclasses import replace

import pytest
import torch

from benchmarks.operator_time import Ceilings
from benchmarks.ops.cases import OP_SETS, NodeSpec, OpCase, shared, tree_case
from benchmarks.ops.inputs import BOUND, make_inputs, make_oracle, sets_needed
from benchmarks.ops.measure import OpBench
from benchmarks.ops.ways import OP_WAYS, OpWay, kernel_calls

CPU = torch.device("cpu")
TINY = OP_SETS["tiny"]
MIXED = OpCase(
    "mixed",
    5,
    (NodeSpec(7, 0, 2), NodeSpec(33, 2, 3), *(NodeSpec(row + 1, row, 1, 1) for row in range(5))),
    2,
    6,
    3,
    16,
)
TREE = tree_case(((1, 2, 4, 8), (5, 3, 7, 2)), 4, 2, head_dim=16)
CASES = [*TINY, MIXED, replace(MIXED, suffix=1, dtype="float16"), shared(3, 40, 5, 4, 1, head_dim=16), TREE]
IDS = [f"{case.name}-{case.dtype}" for case in CASES]


@pytest.fixture
def bench(monkeypatch):
    made = OpBench(CPU)
    made.ceilings = Ceilings(1e9, 1e10)
    return made


@pytest.mark.parametrize("way", sorted(set(OP_WAYS) - {"bifurcated-compiled"}))
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_way_obeys_the_error_rule(bench, case, way):
    row = bench.measure(case, way)
    if way == "bifurcated" and len(case.nodes) > 1:
        assert row["status"] == "not run: defined for one shared context only"
        return
    if OP_WAYS[way].library:
        assert row["status"].startswith("not run: ")
        return
    assert row["status"] == "ok"
    assert 0 <= row["error_ratio"] <= BOUND
    assert 0 < row["us_p20"] <= row["us_p50"] <= row["us_p80"]


@pytest.mark.parametrize("case", [replace(case, dtype="float16") for case in CASES], ids=IDS)
def test_the_kernel_of_nodes_obeys_the_error_rule_alone(case):
    pytest.importorskip("triton")
    from benchmarks.ops.kernel_ways import NodeKernel

    inputs = make_inputs(case.prefix_only, CPU, sets=1)[0]
    assert make_oracle(inputs).error(NodeKernel(inputs).attend().result()) <= BOUND


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("case", [shared(3, 200, 70, 6, 2, head_dim=32), shared(70, 65, 1, 1, 1, head_dim=16)])
def test_the_sketch_obeys_the_error_rule(case, programs):
    pytest.importorskip("triton")
    from benchmarks.ops.kernel_ways import Sketch

    case = replace(case, dtype="float16")
    for part in (case, case.suffix_only):
        inputs = make_inputs(part, CPU, sets=1)[0]
        assert make_oracle(inputs).error(Sketch(inputs, programs).attend()) <= BOUND
    inputs = make_inputs(case.prefix_only, CPU, sets=1)[0]
    assert make_oracle(inputs).error(Sketch(inputs, programs).attend_context().result()) <= BOUND


@pytest.mark.parametrize("case", [replace(case, dtype="float16") for case in TINY], ids=lambda case: case.name)
def test_the_kernels_obey_the_error_rule_on_every_set(case):
    pytest.importorskip("triton")
    inputs = make_inputs(case, CPU, sets=2)
    written = [part[:, :, -1:].clone() for part in inputs[1].suffix]
    for part in inputs[1].suffix:
        part[:, :, -1:] = torch.nan  # what the kernels must write before anyone reads it
    output = kernel_calls(inputs)[1]()
    for part, expected in zip(inputs[1].suffix, written, strict=True):
        assert torch.equal(part[:, :, -1:], expected)
    assert make_oracle(inputs[1]).error(output) <= BOUND
    assert make_oracle(inputs[0]).error(output) > 100, "the sets are the same"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 1.01,
        lambda out: out.roll(1, 0),
        lambda out: torch.where(torch.arange(len(out)).view(-1, 1, 1, 1) == len(out) - 1, torch.nan, out),
    ],
    ids=["scaled", "rows-moved", "nan"],
)
@pytest.mark.parametrize("later", [False, True], ids=["at-once", "when-repeated"])
def test_a_wrong_way_gets_no_times(bench, monkeypatch, spoil, later):
    def variants(sets):
        right, calls = OP_WAYS["hydragen"].variants(sets)["flash"][0], []

        def call():
            calls.append(1)
            return right() if later and len(calls) == 1 else spoil(right())

        return {"broken": [call]}

    monkeypatch.setitem(OP_WAYS, "broken", OpWay(variants))
    row = bench.measure(TINY[0], "broken")
    assert row["status"].startswith("wrong: broken errs ")
    assert row["status"].endswith("when it is repeated") == later
    assert row["error_ratio"] > BOUND
    assert row["us_p50"] is None
    assert row["over_floor"] is None
    bench.check = False
    assert bench.measure(TINY[0], "broken")["status"] == "ok"


@pytest.mark.parametrize("tile", range(8))
def test_one_wrong_query_tile_is_noticed(tile):
    """Of 256 rows, a query tile's 32 are zero."""
    inputs = make_inputs(shared(256, 40, 3, 4, 1, head_dim=16, dtype="float32"), CPU, sets=1)[0]
    oracle = make_oracle(inputs)
    right = OP_WAYS["hydragen"].variants([inputs])["flash"][0]()
    assert oracle.error(right) <= BOUND
    right[32 * tile : 32 * tile + 32] = 0
    assert oracle.error(right) > BOUND


def test_what_does_not_fit_is_a_result(bench, monkeypatch):
    def variants(sets):
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setitem(OP_WAYS, "large", OpWay(variants))
    row = bench.measure(TINY[0], "large")
    assert row["status"] == "does not fit"
    assert row["us_p50"] is None


def test_the_fastest_variant_counts(bench, monkeypatch, nap):
    def variants(sets):
        right = OP_WAYS["hydragen"].variants(sets)["flash"][0]

        def slow():
            nap(5e-3)
            return right()

        return {"slow": [slow], "fast": [right]}

    monkeypatch.setitem(OP_WAYS, "two", OpWay(variants))
    assert bench.measure(TINY[0], "two")["variant"] == "fast"


def test_bytes_flops_and_floor_by_hand(bench):
    case = shared(4, 96, 8, 4, 2, head_dim=32, dtype="float32")
    row = bench.measure(case, "ours")
    token = 2 * 2 * 32 * 4  # K and V, KV heads, head_dim, bytes
    assert row["bytes"] == (96 + 4 * 8) * token + 2 * 4 * 4 * 32 * 4
    assert row["flops"] == 4 * 4 * 32 * 4 * (96 + 8)
    assert row["floor_us"] == pytest.approx(1e6 * max(row["bytes"] / 1e9, row["flops"] / 1e10))
    assert row["over_floor"] == pytest.approx(row["us_p50"] / row["floor_us"])
    assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["us_p50"] / 1e6)
    assert case.copied_bytes(4) == 4 * (96 + 8) * token
    prefix, suffix = bench.measure(case, "ours-prefix"), bench.measure(case, "ours-suffix")
    assert prefix["bytes"] == (96 + 4) * token + 2 * 4 * 4 * 32 * 4
    assert suffix["bytes"] == 4 * 8 * token + 2 * 4 * 4 * 32 * 4


def test_trees_by_hand():
    case = TINY[1]
    assert case.context_lengths == [65] * 6
    assert case.stored_tokens == 48 + 2 * 17
    assert case.columns()["nodes"] == "1x48+2x17"
    two_level, as_one, first_only = OP_SETS["two-level"]
    assert two_level.context_lengths == as_one.context_lengths
    assert (two_level.stored_tokens, as_one.stored_tokens) == (2400 + 8 * 512, 8 * 2912)
    assert [length + first_only.suffix for length in first_only.context_lengths] == [2400 + 512 + 64] * 1024
    assert OP_SETS["ragged"][0].context_lengths == [1024 << step for step in range(8)]


def test_the_grid_is_the_whole_grid():
    assert len(OP_SETS["grid"]) == len({case.name for case in OP_SETS["grid"]}) == 6 * 4 * 2 * 3
    assert {case.head_dim for case in OP_SETS["grid"]} == {128}


def test_levels_with_gaps_are_refused():
    with pytest.raises(ValueError, match="depth 0 covers 2 of 3 rows"):
        OpCase("gap", 3, (NodeSpec(5, 0, 2),), 1, 2, 1)
    with pytest.raises(ValueError, match="suffix must be at least 1"):
        OpCase("empty", 3, (), 0, 2, 1)


def test_sets_outgrow_the_cache(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("P", (), {"L2_cache_size": 50_000_000})
    )
    cuda = torch.device("cuda")
    for size, expected in ((1_000_000, 100), (60_000_000, 2), (300_000_000, 2), (500_000_000, 1), (1000, 256)):
        assert sets_needed(size, cuda) == expected
    assert sets_needed(1000, CPU) == 1
