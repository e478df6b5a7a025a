"""The decode kernels against the fp64 oracle: interpreted on the CPU, and over many random forests on a GPU."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor

import hf_fastdecode as fd
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Segment
from hf_fastdecode.attention.launch.plan import node_shapes
from hf_fastdecode.kernels.device import shared_memory

from ..attention.forests import assert_error_rule, make_inputs, random_forest
from ..cases import exhaustive_but
from ..generation.calls import as_in_stock
from ..tiny_models import ragged_prompts, tiny_model

pytest.importorskip("triton")
from hf_fastdecode._compat import CACHE
from hf_fastdecode.kernels.failures import Kernel, failure
from hf_fastdecode.kernels.forest_decode import api
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig, choose_config
from hf_fastdecode.kernels.forest_decode.schedule import Capacity, NodeShape, needed_capacity

from .operator_runs import DEVICE, check, check_result, decode, rows_with_ages, small_config

INTERPRETED = not torch.cuda.is_available()
INTERPRETED_IN_FP32 = pytest.mark.skipif(not INTERPRETED, reason="fp32 is multiplied in tf32 on a GPU, and refused")
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


def random_case(seed: int):
    """Inputs drawn from everything the kernels take; small where they are interpreted."""
    rng = random.Random(seed)
    big = DEVICE == "cuda"
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
        device=DEVICE,
        seed=seed,
    )
    return query, kv, 20.0 if head_dim in (64, 48) else None


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the same cases are among the many")
@pytest.mark.parametrize("seed", range(16))
def test_random_forests_interpreted(seed):
    query, kv, softcap = random_case(seed)
    suffix = SuffixConfig(merge=2) if seed % 4 else None
    config = Config(16, block_n=16, overlap=False, suffix=suffix, overlap_suffix=seed % 3 == 0)
    check(query, kv, softcap=softcap, config=config, fewer_programs=seed % 2 == 0)


@INTERPRETED_IN_FP32
@pytest.mark.parametrize("block_m", [16, 32])
def test_interpreted_in_fp32(block_m):
    """Queries of a row across two query tiles, several pieces of a unit, several depths."""
    forest = random_forest(random.Random(3), 9, 3, longest=70)
    query, kv = make_inputs(forest, 13, heads=6, kv_heads=2, head_dim=16, queries=3)
    config = Config(block_m, block_n=16, per_sm=3, overlap=False, suffix=SuffixConfig(merge=2))
    check_result(decode(query, kv, config=config), query, kv)


@pytest.mark.parametrize(("block_m", "chain"), [(16, 4), (32, 2)])
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
    query, kv = make_inputs(Forest(rows, nodes), 9, **options, queries=1 if small else 3, device=DEVICE)
    config = Config(block_m, block_n=16, overlap=not INTERPRETED, suffix=SuffixConfig(merge=2), chain=chain)
    shapes = node_shapes(kv.forest, group, config)
    assert len(shapes) < len(kv.forest.nodes), "nothing is read in chains"
    check(query, kv, config=config)


@pytest.mark.parametrize("seed", range(4))
def test_rows_stored_elsewhere_and_rows_that_take_no_part(seed):
    """What a captured graph changes between steps: storage slots, idle rows, tables wider than the work."""
    rng = random.Random(seed)
    forest = random_forest(rng, 6, 2, longest=90)
    query, kv = make_inputs(
        forest, 9, heads=4, kv_heads=2, head_dim=16, dtype=torch.half, device=DEVICE, seed=seed, queries=1
    )
    config = small_config(overlap_suffix=seed % 2 == 1)
    slots = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).int().to(DEVICE)
    shapes = [NodeShape(node.depth, node.row_start, node.row_count, node.span.length) for node in forest.nodes]
    needed = needed_capacity(shapes, kv_heads=2, queries=2, block_m=16)
    room = Capacity(needed.depths + 1, needed.nodes + 3, needed.units + 5)
    out, lse = decode(query, kv, config=config, slots=slots, capacity=room)
    check_result((out, lse), query, kv)

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
    forest = random_forest(random.Random(1), 5, 2, longest=40)
    layout = {"heads": heads, "kv_heads": 2, "head_dim": 16, "queries": queries}
    query, kv = make_inputs(forest, 37, **layout, dtype=torch.half, device=DEVICE, seed=1)
    generator = torch.Generator().manual_seed(2)
    origins = torch.stack([torch.randperm(5, generator=generator) for _ in range(37 - queries)], dim=1)
    given = {"origins": origins.int().contiguous().to(DEVICE), "window": window}
    check_result(decode(query, kv, config=small_config(), **given), query, kv, window=window)


@pytest.mark.parametrize("fewer_programs", [False, True])
def test_results_are_written_once(fewer_programs, monkeypatch):
    """By the kernel of suffixes, or by the one that merges where programs are left to suffixes."""
    forest = random_forest(random.Random(3), 9, 2, longest=70)
    query, kv = make_inputs(forest, 13, heads=4, kv_heads=2, head_dim=16, dtype=torch.half, device=DEVICE)
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
    config = small_config(overlap_suffix=True)
    out, _ = decode(query, kv, config=config, fewer_programs=fewer_programs, return_lse=False)
    assert launched == [not fewer_programs, fewer_programs]
    assert torch.isfinite(out).all()


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(25))
def test_random_forests_on_a_gpu(block):
    """Five hundred cases, twenty at a time."""
    for seed in range(20 * block, 20 * block + 20):
        query, kv, softcap = random_case(seed)
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
    query, kv = make_inputs(Forest(3), 5, heads=2, kv_heads=1, head_dim=16, device=DEVICE)
    half = ForestKV(kv.forest, [], Segment(*(part.half() for part in kv.suffix)), 5)
    query, config = query.half(), Config(16, overlap=not INTERPRETED)
    check_result(decode(query, half, config=config, capacity=capacity), query, half)


@pytest.mark.parametrize("queries", exhaustive_but([3], [1, 3]))
@pytest.mark.parametrize(
    ("window", "sinks"),
    [(None, True), *((window, sinks) for window in (1, 2, 40, 150, 10**6) for sinks in (False, True))],
)
def test_windows_and_sinks(window, sinks, queries):
    """A window may end in the new tokens, in the suffix, or in a node at any depth."""
    rows, longest = (7, 60) if INTERPRETED else (70, 500)
    forest = random_forest(random.Random(5), rows, 3, longest=longest)
    assert len(forest.levels) == 3
    lengths = [queries + 9 * row % 50 for row in range(rows)]
    head_dim = 16 if INTERPRETED else 128
    options = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "queries": queries, "dtype": torch.half}
    query, kv = make_inputs(forest, lengths, **options, device=DEVICE)
    sink = torch.linspace(-3, 6, 8, device=DEVICE).half().float() if sinks else None
    config = small_config(overlap_suffix=queries == 3) if INTERPRETED else None
    scoring = {"window": window, "sinks": sink}
    check_result(decode(query, kv, config=config, **scoring), query, kv, **scoring)


def with_biases(query: Tensor, kv: ForestKV, biases: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Attention of each row over a copy of its keys, in a dtype, with biases by distance; and its log-sum-exp."""
    outs, lses = [], []
    for *row, age in rows_with_ages(query, kv):
        bias = biases[:, age.clamp(0, biases.shape[1] - 1)].masked_fill(age < 0, -torch.inf).to(dtype)
        own, keys, values = (part.to(dtype) for part in row)
        outs.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=bias))
        lses.append(torch.logsumexp(own.double() @ keys.double().mT * query.shape[-1] ** -0.5 + bias.double(), -1))
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("rows", [7] if INTERPRETED else [12, 30, 48, 70, 150])  # by which tiles are chosen
@pytest.mark.parametrize(("queries", "group"), [(1, 1), (3, 1), (1, 4)])
def test_biases_by_distance(queries, group, rows):
    """Distances reach into the new tokens, the suffix, and nodes at any depth, beyond the last that has its own."""
    forest = random_forest(random.Random(5), rows, 3, longest=60 if INTERPRETED else 500)
    lengths = [queries + 9 * row % 50 for row in range(rows)]
    heads, head_dim = 4, 16 if INTERPRETED else 128
    options = {"heads": heads, "kv_heads": heads // group, "head_dim": head_dim, "queries": queries}
    query, kv = make_inputs(forest, lengths, **options, dtype=torch.half, device=DEVICE)
    biases = 3 * torch.randn(heads, 41, generator=torch.Generator().manual_seed(0)).half().float().to(DEVICE)
    config = small_config(overlap_suffix=queries == 3) if INTERPRETED else None
    out, lse = decode(query, kv, config=config, biases=biases)
    oracle, oracle_lse = with_biases(query, kv, biases, torch.double)
    yardstick, yardstick_lse = with_biases(query, kv, biases, torch.half)
    assert_error_rule(out, yardstick, oracle, oracle_lse)
    assert_error_rule(lse, yardstick_lse.float(), oracle_lse, oracle_lse)


@pytest.mark.gpu
def test_more_tiles_than_a_multiprocessor_holds():
    """Biases are in flight too: these tiles take 272 KiB. Fewer are in flight then, and nothing else fails later."""
    forest = random_forest(random.Random(6), 48, 2, longest=500)
    options = {"heads": 2, "kv_heads": 2, "head_dim": 128, "dtype": torch.half}
    query, kv = make_inputs(forest, 20, **options, device="cuda")
    biases = torch.randn(2, 41, generator=torch.Generator().manual_seed(0)).half().float().cuda()
    out, _ = decode(query, kv, config=Config(64, block_n=128, stages=3, overlap=False), biases=biases)
    oracle, oracle_lse = with_biases(query, kv, biases, torch.double)
    assert_error_rule(out, with_biases(query, kv, biases, torch.half)[0], oracle, oracle_lse)
    assert failure(Kernel.FOREST, query.device) is None


@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min, -1e30])
@pytest.mark.parametrize(("window", "queries"), [(None, 1), (1, 1), (2, 4)])
def test_the_least_sink_is_none(least, window, queries):
    """Also where a tile of the suffix hides from a query."""
    options = {"heads": 2, "kv_heads": 1, "head_dim": 16, "queries": queries, "dtype": torch.half}
    query, kv = make_inputs(Forest(2), queries + 20, **options, device=DEVICE)
    config = small_config()
    sinks = torch.full((2,), least, device=DEVICE)
    out, _ = decode(query, kv, config=config, window=window, sinks=sinks)
    without, _ = decode(query, kv, config=config, window=window)
    assert torch.equal(out, without)


@INTERPRETED_IN_FP32
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa", "llama-mqa", "gpt2"])
def test_generate_gives_stock_tokens(name):
    """In fp32, where the tokens must be stock's."""
    model = tiny_model(name)
    arguments = {**ragged_prompts(41, 36, shared=33), "num_return_sequences": 2, "max_new_tokens": 4}
    arguments |= {"do_sample": True, "top_k": 0}
    assert "by triton" in "".join(as_in_stock(model, lambda: model.generate(**arguments), backend="triton").layers)


@INTERPRETED_IN_FP32
def test_a_copied_cache_reads_its_own_memory():
    """Tables of addresses are not copied with a cache: they would point into the original."""
    model = tiny_model("llama-gqa")
    token = torch.full((1, 1), 5)
    with fd.enabled(model, backend="triton"), torch.no_grad():
        cache = fd.prefill(model, ragged_prompts(40)["input_ids"])
        model(token, **{CACHE: cache}, position_ids=torch.full((1, 1), 40))
        twin = copy.deepcopy(cache)
        expected = model(token, **{CACHE: twin}, position_ids=torch.full((1, 1), 41)).logits
        twin.crop(-1)
        for segment in cache.layers[0].storage.segments.values():
            segment.keys.zero_()
        again = model(token, **{CACHE: twin}, position_ids=torch.full((1, 1), 41)).logits
    assert torch.equal(again, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa"])
def test_generate_on_a_gpu_errs_no_more_than_stock(name):
    """Logits of a bf16 model fed the same tokens, by steps: error against fp64 at most twice stock's."""
    arguments = {"hidden_size": 256, "num_hidden_layers": 2}
    exact = tiny_model(name, **arguments).double().cuda()
    model = tiny_model(name, **arguments).bfloat16().cuda()
    prompt = {key: value.cuda() for key, value in ragged_prompts(300).items()}
    out = exact.generate(**prompt, num_return_sequences=8, do_sample=True, top_k=0, max_new_tokens=40)

    class Forced(LogitsProcessor):
        def __call__(self, input_ids, scores):
            chosen = out[:, input_ids.shape[1]]
            return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)

    def logits(model):
        options = {"logits_processor": [Forced()], "output_logits": True, "return_dict_in_generate": True}
        run = model.generate(**prompt, num_return_sequences=8, do_sample=True, max_new_tokens=40, **options)
        return torch.stack(run.logits, 1).double()

    oracle, stock = logits(exact), logits(model)
    with fd.enabled(model):
        shared = logits(model)
        assert "by triton" in "".join(fd.explain(model).last_call.layers)
    assert (shared - oracle).norm() <= 2 * (stock - oracle).norm()
    assert (shared - oracle).abs().max() <= 2 * (stock - oracle).abs().max()
