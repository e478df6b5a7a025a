"""The decode kernels against the fp64 oracle: interpreted on the CPU, and over many random forests on a GPU."""

import random
from dataclasses import replace

import pytest
import torch

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Segment
from hf_fastdecode.attention.launch.plan import node_shapes
from hf_fastdecode.kernels.device import shared_memory

from ..attention.forests import assert_error_rule, make_inputs, pytorch_attention, pytorch_lse, random_forest
from ..cases import exhaustive_but

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode import api
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig, choose_config
from hf_fastdecode.kernels.forest_decode.schedule import Capacity, NodeShape, needed_capacity

from .operator_runs import check, decode, pytorch_with_mask

INTERPRETED = not torch.cuda.is_available()
# Queries at once, query heads of a KV head, KV heads, head_dim.
_COMPILED = (
    (1, 1, 4, 128),
    (1, 4, 2, 128),
    (1, 8, 1, 64),
    (2, 3, 2, 80),
    (5, 4, 2, 128),
    (16, 1, 2, 64),
    (1, 2, 2, 256),
)
_INTERPRETED = ((1, 1, 2, 16), (1, 2, 1, 48), (3, 4, 1, 16), (1, 4, 1, 48))


def random_case(seed: int, device: str):
    """Inputs drawn from everything the kernels take; small where they are interpreted."""
    rng = random.Random(seed)
    big = device == "cuda"
    rows = rng.choice((1, 2, 3, 7, 33, 130)) if big else rng.choice((1, 2, 5))
    # Each of these combinations is a compilation; the forests, which are not, vary freely.
    queries, group, kv_heads, head_dim = rng.choice(_COMPILED if big else _INTERPRETED)
    forest = random_forest(rng, rows, rng.randint(0, 3), longest=rng.choice((1, 63, 300, 1000)) if big else 90)
    longest = rng.choice((1, 17, 64, 200)) if big else rng.choice((1, 20))
    lengths = [queries + rng.randint(0, longest) for _ in range(rows)]
    # Triton's interpreter takes the bits of bfloat16 operands of a dot for integers.
    dtype = (torch.bfloat16 if head_dim in (64, 128) else torch.float16) if big else torch.float16
    query, kv = make_inputs(
        forest,
        lengths,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        queries=queries,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    return query, kv, 20.0 if head_dim in (64, 48) else None


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the same cases are among the many")
@pytest.mark.parametrize("seed", range(16))
def test_random_forests_interpreted(seed):
    query, kv, softcap = random_case(seed, "cpu")
    suffix = SuffixConfig(merge=2) if seed % 4 else None
    config = Config(16, block_n=16, overlap=False, suffix=suffix, overlap_suffix=seed % 3 == 0)
    check(query, kv, softcap=softcap, config=config, fewer_programs=seed % 2 == 0)


@pytest.mark.skipif(not INTERPRETED, reason="float32 is multiplied in tf32 on a GPU, and refused")
@pytest.mark.parametrize("block_m", [16, 32])
def test_interpreted_in_fp32(block_m):
    """Queries of a row across two query tiles, several pieces of a unit, several depths."""
    forest = random_forest(random.Random(3), 9, 3, longest=70)
    query, kv = make_inputs(forest, 13, heads=6, kv_heads=2, head_dim=16, queries=3)
    config = Config(block_m, block_n=16, per_sm=3, overlap=False, suffix=SuffixConfig(merge=2))
    out, lse = decode(query, kv, config=config)
    oracle, oracle_lse = reference.forest_attention(query, kv)
    assert_error_rule(out, pytorch_attention(query, kv), oracle, oracle_lse)
    assert_error_rule(lse, pytorch_lse(query, kv), oracle_lse, oracle_lse)


@pytest.mark.parametrize("chain", [2, 4])
@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("seed", exhaustive_but([0, 1], range(4)))
def test_short_nodes_read_in_chains(seed, block_m, chain):
    """Deep trees, whose last links may begin within a key tile or end with it."""
    rng = random.Random(seed)
    small = INTERPRETED or seed % 2
    rows, scale = (12, 1) if INTERPRETED else (96, 4)
    levels = [(1, 40), (2, 5), (4, 16), (12, 3), (12, 11 * (seed % 3) + 1)]
    start, nodes = 0, []
    for depth, (count, tokens) in enumerate(levels):
        for index in range(count):
            each = rows // count
            nodes.append(Node(Span(0, start, scale * tokens + rng.randint(0, 3)), index * each, each, depth))
            start += 200
    group, head_dim = rng.choice(((1, 48), (4, 16)) if INTERPRETED else ((1, 80), (4, 128)))
    options = {"heads": 2 * group, "kv_heads": 2, "head_dim": head_dim, "dtype": torch.half}
    device = "cpu" if INTERPRETED else "cuda"
    query, kv = make_inputs(Forest(rows, nodes), 9, **options, queries=1 if small else 3, device=device)
    config = Config(block_m, block_n=16, overlap=not INTERPRETED, suffix=SuffixConfig(merge=2), chain=chain)
    shapes = node_shapes(kv.forest, group, config)
    assert len(shapes) < len(kv.forest.nodes), "nothing is read in chains"
    check(query, kv, config=config)


@pytest.mark.parametrize("seed", range(4))
def test_rows_stored_elsewhere_and_rows_that_take_no_part(seed):
    """What a captured graph changes between steps: storage slots, idle rows, tables wider than the work."""
    device = "cpu" if INTERPRETED else "cuda"
    rng = random.Random(seed)
    forest = random_forest(rng, 6, 2, longest=90)
    query, kv = make_inputs(
        forest, 9, heads=4, kv_heads=2, head_dim=16, dtype=torch.half, device=device, seed=seed, queries=1
    )
    config = Config(
        16, block_n=16, overlap=not INTERPRETED, suffix=SuffixConfig(merge=2), overlap_suffix=seed % 2 == 1
    )
    slots = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).int().to(device)
    oracle, oracle_lse = reference.forest_attention(query, kv)
    shapes = [NodeShape(node.depth, node.row_start, node.row_count, node.span.length) for node in forest.nodes]
    needed = needed_capacity(shapes, kv_heads=2, queries=2, block_m=16)
    room = Capacity(needed.depths + 1, needed.nodes + 3, needed.units + 5)
    out, lse = decode(query, kv, config=config, slots=slots, capacity=room)
    assert_error_rule(out, pytorch_attention(query, kv), oracle, oracle_lse)
    assert_error_rule(lse, pytorch_lse(query, kv), oracle_lse, oracle_lse)

    slots[2] = slots[5] = -1
    fewer, fewer_lse = decode(query, kv, config=config, slots=slots, capacity=room)
    taking = slots >= 0
    assert torch.equal(fewer[taking], out[taking])
    assert torch.equal(fewer_lse[taking], lse[taking])
    assert not fewer[~taking].any()
    assert (fewer_lse[~taking] == -torch.inf).all()


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("heads", "queries"), [(2, 1), (4, 1), (4, 3)], ids=["one-query", "group", "draft"])
def test_tokens_of_a_suffix_in_several_slots(heads, queries, window):
    """What beam search leaves: each token where the row wrote it that was continued."""
    device = "cpu" if INTERPRETED else "cuda"
    forest = random_forest(random.Random(1), 5, 2, longest=40)
    layout = {"heads": heads, "kv_heads": 2, "head_dim": 16, "queries": queries}
    query, kv = make_inputs(forest, 37, **layout, dtype=torch.half, device=device, seed=1)
    generator = torch.Generator().manual_seed(2)
    origins = torch.stack([torch.randperm(5, generator=generator) for _ in range(37 - queries)], dim=1)
    config = Config(16, block_n=16, overlap=not INTERPRETED, suffix=SuffixConfig(block_n=16, merge=2))
    out, lse = decode(query, kv, config=config, origins=origins.int().contiguous().to(device), window=window)
    oracle, oracle_lse = reference.forest_attention(query, kv, window=window)
    yardstick, yardstick_lse = pytorch_with_mask(query, kv, window, None)
    assert_error_rule(out, yardstick, oracle, oracle_lse)
    assert_error_rule(lse, yardstick_lse, oracle_lse, oracle_lse)


@pytest.mark.parametrize("fewer_programs", [False, True])
def test_results_are_written_once(fewer_programs, monkeypatch):
    """By the kernel of suffixes, or by the one that merges where programs are left to suffixes."""
    device = "cpu" if INTERPRETED else "cuda"
    forest = random_forest(random.Random(3), 9, 2, longest=70)
    query, kv = make_inputs(forest, 13, heads=4, kv_heads=2, head_dim=16, dtype=torch.half, device=device)
    launched = []

    class Recorded:
        def __init__(self, kernel, out):
            self.kernel, self.out = kernel, out

        def __getitem__(self, grid):
            def launch(*args, **options):
                out = args[self.out]
                assert out.dtype == torch.half
                out_before = out.clone() if launched else out.fill_(torch.nan).clone()
                self.kernel[grid](*args, **options)
                launched.append(not torch.equal(out.nan_to_num(99), out_before.nan_to_num(99)))

            return launch

    for name, kernel in (("attend_suffixes", api.attend_suffixes), ("merge_rows", api.merge_rows)):
        monkeypatch.setattr(api, name, Recorded(kernel, kernel.arg_names.index("out")))
    config = Config(16, block_n=16, overlap=False, overlap_suffix=True, suffix=SuffixConfig(merge=2))
    out, _ = decode(query, kv, config=config, fewer_programs=fewer_programs, return_lse=False)
    assert launched == [not fewer_programs, fewer_programs]
    assert torch.isfinite(out).all()


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(25))
def test_random_forests_on_a_gpu(block):
    """Five hundred cases, twenty at a time."""
    for seed in range(20 * block, 20 * block + 20):
        query, kv, softcap = random_case(seed, "cuda")
        try:
            check(query, kv, softcap=softcap, fewer_programs=seed % 4 > 0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {tuple(query.shape)} {query.dtype} {kv.forest} {error}") from error


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_every_tile_size_on_a_gpu(block_m, overlap):
    forest = random_forest(random.Random(5), 70, 2, longest=900)
    query, kv = make_inputs(forest, 40, heads=8, kv_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    config = choose_config(block_m, 128, overlap=overlap, shared_memory=shared_memory(query.device))
    config = replace(config, block_m=block_m)
    check(query, kv, config=config)
    for fewer_programs in (False, True):
        check(query, kv, config=replace(config, overlap_suffix=True), fewer_programs=fewer_programs)
    if block_m < 64:  # as with many KV heads
        check(query, kv, config=replace(config, block_n=128))
    if block_m == 128:  # where the Hopper kernel is not for a device
        check(query, kv, config=Config(128, warps=8, per_sm=1, overlap=overlap))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(8, 32, 8), (8, 32, 32), (128, 8, 1), (32, 32, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_launch_parameters_for_long_contexts_on_a_gpu(rows, heads, kv_heads, dtype):
    rng = random.Random(rows)
    queries_per_kv_head = heads // kv_heads
    major, _ = torch.cuda.get_device_capability()
    short, long = (
        choose_config(
            rows * queries_per_kv_head,
            128,
            queries_per_kv_head=queries_per_kv_head,
            rows=rows,
            kv_heads=kv_heads,
            keys=keys,
            overlap=major >= 9,
        )
        for keys in (0, 10**6)
    )
    assert short != long or major != 9
    trunk = Node(Span(0, 0, 3000), 0, rows)
    for forest in (Forest(rows, [trunk]), Forest(rows, [trunk, Node(Span(0, 3000, 700), 1, rows - 2, 1)])):
        lengths = [rng.randint(1, 400) for _ in range(rows)]
        query, kv = make_inputs(
            forest, lengths, heads=heads, kv_heads=kv_heads, head_dim=128, dtype=dtype, device="cuda"
        )
        check(query, kv, config=long)


@pytest.mark.parametrize("capacity", [None, Capacity(2, 0, 3)])
def test_no_nodes(capacity):
    query, kv = make_inputs(Forest(3), 5, heads=2, kv_heads=1, head_dim=16, device="cpu" if INTERPRETED else "cuda")
    half = ForestKV(kv.forest, [], Segment(*(part.half() for part in kv.suffix)), 5)
    query, config = query.half(), Config(16, overlap=not INTERPRETED)
    out, lse = decode(query, half, config=config, capacity=capacity)
    oracle, oracle_lse = reference.forest_attention(query, half)
    assert_error_rule(out, pytorch_attention(query, half), oracle, oracle_lse)
    assert_error_rule(lse, pytorch_lse(query, half), oracle_lse, oracle_lse)
