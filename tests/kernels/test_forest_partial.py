"""The operator in parts: nodes alone, partials of ranks and their merge, against the fp64 oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest
from hf_fastdecode.attention.kv import ForestKV, Partial, Segment, merge
from hf_fastdecode.attention.launch.kernel_call import AddressesOfLayers
from hf_fastdecode.parallel.sequence import merged
from hf_fastdecode.parallel.shards import Shard

from ..attention.forests import assert_error_rule, make_inputs, pytorch_attention, random_forest

pytest.importorskip("triton")
from hf_fastdecode.kernels.device import compute_capability, shared_memory
from hf_fastdecode.kernels.forest_decode import api as nodes
from hf_fastdecode.kernels.forest_decode import config as config_of_steps
from hf_fastdecode.kernels.forest_decode.api import Config, SuffixConfig, choose_config, forest_partial
from hf_fastdecode.kernels.forest_decode.limits import refusal
from hf_fastdecode.kernels.forest_decode.merge import merge_ranks

from .operator_runs import check, decode, decode_divided, schedule_of, small_config

INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROWS, LONGEST, HEAD_DIM = (7, 60, 16) if INTERPRETED else (70, 900, 128)
CONFIG = Config(16, block_n=16 if INTERPRETED else 64, overlap=False, suffix=SuffixConfig(merge=2))


def nodes_alone(query: Tensor, kv: ForestKV, slots: Tensor | None = None, softcap: float | None = None) -> Partial:
    """The operator over a forest's nodes."""
    rows, heads, queries, _ = query.shape
    kv_heads = kv.suffix.keys.shape[1]
    schedule = schedule_of(kv.forest, kv_heads, heads // kv_heads * queries, CONFIG, DEVICE)
    addresses = AddressesOfLayers(kv.forest).of(kv.segments).to(DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE) if slots is None else slots
    scale = query.shape[-1] ** -0.5
    return Partial(
        *forest_partial(query, addresses, slots, schedule, CONFIG, kv_heads=kv_heads, scale=scale, soft_cap=softcap)
    )


def oracle_of_nodes(query: Tensor, kv: ForestKV, softcap: float | None, dtype: torch.dtype) -> Partial:
    """Each row over the keys of its nodes, none of them hidden."""
    outs, lses = [], []
    for path, own in zip(kv.forest.paths, query, strict=True):
        group = own.shape[0] // kv.suffix.keys.shape[1]
        nodes = [kv.node(span) for span in path]
        keys, values = (
            torch.cat([empty[0, :, :0], *(node[part] for node in nodes)], 1).to(dtype).repeat_interleave(group, 0)
            for part, empty in enumerate(kv.suffix)
        )
        scores = own.to(dtype) @ keys.mT * own.shape[-1] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        outs.append(torch.softmax(scores, -1) @ values)
        lses.append(torch.logsumexp(scores, -1))
    return Partial(torch.stack(outs), torch.stack(lses))


def inputs(seed: int, queries: int, dtype: torch.dtype = torch.half):
    forest = random_forest(random.Random(seed), ROWS, 3, longest=LONGEST)
    lengths = [queries + 9 * row % 40 for row in range(ROWS)]
    options = {"heads": 8, "kv_heads": 2, "head_dim": HEAD_DIM, "queries": queries, "dtype": dtype}
    return make_inputs(forest, lengths, **options, device=DEVICE, seed=seed)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("queries", [1, 3])
def test_nodes_alone(queries, softcap):
    query, kv = inputs(29, queries)
    found = nodes_alone(query, kv, softcap=softcap)
    assert found.out.dtype == found.lse.dtype == torch.float32
    bare = check_nodes(found, query, kv, softcap)
    assert bare.any()
    assert not bare.all()


def check_nodes(found: Partial, query: Tensor, kv: ForestKV, softcap: float | None = None) -> Tensor:
    """Hold a partial of nodes against the oracle; returns which queries have no key."""
    oracle, yardstick = (oracle_of_nodes(query, kv, softcap, dtype) for dtype in (torch.double, torch.half))
    bare = torch.isinf(oracle.lse)
    assert (found.out[bare] == 0).all()
    assert torch.equal(torch.isinf(found.lse), bare)
    seen = oracle.lse[~bare]
    assert_error_rule(found.out[~bare], yardstick.out[~bare], oracle.out[~bare], seen)
    assert_error_rule(found.lse[~bare], yardstick.lse[~bare], seen, seen)
    return bare


WITH_REST = [(16, 128, 64), (20, 256, 64), (40, 64, 32), (4, 192, 64)]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("heads", "width", "rest"), [(2, 16, 8)] if INTERPRETED else WITH_REST)
def test_numbers_of_keys_that_all_heads_share(heads, width, rest, queries):
    """Stored once, beside those that each head has: keys and values that were made of latents."""
    forest = random_forest(random.Random(29), ROWS, 3, longest=LONGEST)
    sizes = {"heads": heads, "kv_heads": heads, "queries": queries, "dtype": torch.half, "device": DEVICE}
    query, kv = make_inputs(forest, queries, head_dim=width + rest, value_dim=width, **sizes)
    shared = [keys[:1, :, width:].contiguous() for keys, _ in kv.segments]
    of_heads = [Segment(keys[..., :width].contiguous(), values) for keys, values in kv.segments]
    joined = [
        Segment(torch.cat([keys, rest_of_keys.expand(heads, -1, -1)], -1), values)
        for (keys, values), rest_of_keys in zip(of_heads, shared, strict=True)
    ]
    config = CONFIG
    if not INTERPRETED:
        widest = max(node.row_count for node in forest.nodes) * queries
        fitting = {"overlap": compute_capability(DEVICE) >= (9, 0), "shared_memory": shared_memory(DEVICE)}
        config = choose_config(widest, width, rest=rest, **fitting)
    of_rests = torch.tensor([[shared[node.span.segment][0, node.span.start :].data_ptr() for node in forest.nodes]])
    tables = (
        torch.cat([AddressesOfLayers(forest).of(of_heads), of_rests]).to(DEVICE),
        torch.arange(ROWS, dtype=torch.int32, device=DEVICE),
        schedule_of(forest, heads, queries, config, DEVICE),
        config,
    )
    options = {"kv_heads": heads, "scale": query.shape[-1] ** -0.5, "rest": rest}
    found = Partial(*forest_partial(query, *tables, **options))
    check_nodes(found, query, replace(kv, segments=joined))
    for dtype in (torch.float32, torch.half):
        other = Partial(torch.randn_like(found.out).to(dtype), torch.randn_like(found.lse) + 5)
        out, lse = forest_partial(query, *tables, **options, other=other)
        merged = merge(found, Partial(other.out.float(), other.lse))
        assert out.dtype == dtype
        torch.testing.assert_close(out, merged.out.to(dtype))
        torch.testing.assert_close(lse, merged.lse)


def test_rows_that_take_no_part():
    query, kv = inputs(29, 1)
    slots = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    slots[::2] = -1
    some, every = nodes_alone(query, kv, slots), nodes_alone(query, kv)
    assert (some.out[::2] == 0).all()
    assert torch.isneginf(some.lse[::2]).all()
    assert torch.equal(some.out[1::2], every.out[1::2])
    assert torch.equal(some.lse[1::2], every.lse[1::2])


def test_no_nodes():
    query, kv = make_inputs(Forest(3), 5, heads=2, kv_heads=1, head_dim=16, dtype=torch.half, device=DEVICE)
    found = nodes_alone(query, kv)
    assert (found.out == 0).all()
    assert torch.isneginf(found.lse).all()


@pytest.mark.parametrize(
    ("ranks", "queries", "group", "overlap_suffix", "softcap"),
    [
        *((ranks, 1, 4, False, None) for ranks in (1, 2, 4)),
        *((4, 1, 1, False, None), (4, 1, 4, True, None), (2, 3, 4, True, 2.0), (4, 3, 1, False, None)),
    ],
)
def test_what_ranks_store_of_nodes_and_suffixes(ranks, queries, group, overlap_suffix, softcap):
    """Each rank appends its part of the new tokens; the partials of all merge to attention to all keys."""
    forest = random_forest(random.Random(29), ROWS, 3, longest=LONGEST)
    lengths = [queries + 5 * row % 17 for row in range(ROWS)]
    options = {"heads": 2 * group, "kv_heads": 2, "head_dim": HEAD_DIM, "queries": queries, "dtype": torch.half}
    query, kv = make_inputs(forest, lengths, **options, device=DEVICE, seed=queries)
    sinks = torch.randn(2 * group, device=DEVICE)
    config = replace(CONFIG, overlap_suffix=overlap_suffix)
    scoring = {"softcap": softcap, "sinks": sinks}
    shards = [Shard(rank, ranks, block=3 if ranks > 1 else LONGEST) for rank in range(ranks)]
    parts = [decode_divided(query, kv, shard, config=config, **scoring) for shard in shards]
    assert ranks < 4 or any(torch.isneginf(part.lse).any() for part in parts)  # of rows that have no key here
    assert all((part.out[torch.isneginf(part.lse)] == 0).all() for part in parts)
    found = merge(*parts)
    oracle, oracle_lse = reference.forest_attention(query, kv, **scoring)
    assert_error_rule(found.out.half(), pytorch_attention(query, kv, **scoring), oracle, oracle_lse)


def test_arguments_are_checked():
    query, kv = inputs(29, 1)
    partial = nodes_alone(query, kv)
    biases = torch.zeros(query.shape[1], 4, device=DEVICE)
    of_biases = "biases by distance need whole suffixes, no soft cap"
    for options, message in (
        ({"into": Partial(partial.out, partial.lse[:, :1])}, r"into\[1\] must be"),
        ({"into": Partial(partial.out.double(), partial.lse)}, r"into\[0\] must be .* float32"),
        ({"divided": True, "window": 5}, "a window of 5 tokens cannot count keys on other devices"),
        ({"biases": biases, "divided": True}, of_biases),
        ({"biases": biases, "softcap": 5.0}, of_biases),
    ):
        with pytest.raises(ValueError, match=message):
            decode(query, kv, config=CONFIG, **options)
    for given, kv_heads, message in (
        (query, 3, "heads must be a multiple of the KV heads, got 8 and 3"),
        (query.repeat_interleave(2, -1)[..., ::2], 2, "query must be .* contiguous in the last dimension"),
        (query.double(), 2, r"query must be fp16, bf16 or fp32, got torch\.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            forest_partial(given, *[None] * 4, kv_heads=kv_heads, scale=1.0)


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (3, 5, 2, 48), (2, 7, 1, 100)])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_partials_merge_to_those_of_fp64(ranks: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(ranks)
    width, queries = shape[-1], torch.Size(shape[:-1]).numel()
    out = torch.randn(ranks, queries, width, generator=generator)
    lse = torch.randn(ranks, queries, generator=generator) * 30
    lse[-1] = -torch.inf  # an empty shard, whose out is 0
    lse[:, 0] = -torch.inf  # a row without a key anywhere
    out[lse == -torch.inf] = 0
    given = torch.cat([out.flatten(1), lse], 1).to(DEVICE)
    found, found_lse = torch.empty(shape, device=DEVICE), torch.empty(shape[:-1], device=DEVICE)
    merge_ranks(given, found, found_lse)
    expected = merged(given.double().cpu(), shape)
    assert not bool(found.isnan().any())
    torch.testing.assert_close(found.cpu().double(), expected.out, rtol=0, atol=1e-6)
    torch.testing.assert_close(found_lse.cpu().double(), expected.lse, rtol=1e-6, atol=1e-6)
    assert bool((found_lse.flatten()[0] == -torch.inf) & (found.flatten(0, -2)[0] == 0).all())


@pytest.mark.gpu
def test_buffers_of_more_than_31_bits() -> None:
    ranks, queries, width = 5, 1 << 22, 128
    given = torch.zeros(ranks, queries * (width + 1), device=DEVICE)
    given[:-1, queries * width :] = -torch.inf
    given[-1, : queries * width] = 3.0
    found, lse = (
        torch.full((queries, width), torch.nan, device=DEVICE),
        torch.full((queries,), torch.nan, device=DEVICE),
    )
    merge_ranks(given, found, lse)
    assert bool((found == 3.0).all() & (lse == 0.0).all())
    del given, found, lse
    torch.cuda.empty_cache()  # 13 GB


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="4 queries of 8 elements give 36 a rank, got 35"):
        merge_ranks(torch.zeros(2, 35), torch.zeros(4, 8), torch.zeros(4))


def keys_and_values(kv: ForestKV) -> ForestKV:
    """Latents with what follows them as keys, and latents as values."""

    def joined(parts: Segment) -> Segment:
        return Segment(torch.cat(parts, -1), parts.keys)

    return replace(kv, segments=[joined(parts) for parts in kv.segments], suffix=joined(kv.suffix))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("latent", "rest"), [(512, 64), (256, 64), (256, 32)] if not INTERPRETED else [(32, 8)])
def test_against_the_oracle(latent, rest, queries):
    """Nodes at two depths, and suffixes that differ in length."""
    rows, heads, longest = (3, 2, 60) if INTERPRETED else (33, 16, 700)
    forest = random_forest(random.Random(3), rows, 2, longest=longest)
    lengths = [queries + 7 * row % 40 for row in range(rows)]
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    sizes = {"heads": heads, "kv_heads": 1, "queries": queries, "dtype": dtype, "device": DEVICE}
    _, kv = make_inputs(forest, lengths, head_dim=latent, value_dim=rest, **sizes)
    query, _ = make_inputs(forest, lengths, head_dim=latent + rest, **sizes)
    out, lse = decode(query, kv, config=small_config() if INTERPRETED else None)
    whole = keys_and_values(kv)
    oracle, oracle_lse = reference.forest_attention(query, whole)
    assert_error_rule(out, pytorch_attention(query, whole), oracle, oracle_lse)
    torch.testing.assert_close(lse.double(), oracle_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("generation", "memory", "widest"),
    [(9, 227, (64, 64)), (10, 227, (32, 64)), (8, 163, (64, 32)), (8, 99, (16, 32))],
)
def test_launch_parameters_fit(generation, memory, widest, monkeypatch):
    """On a B200, `make test-compile` found 345 KiB for 64 queries, 112 KiB for 32."""
    monkeypatch.setattr(config_of_steps, "_generation", lambda device: generation)
    for packed in (1, 16, 512):
        config = choose_config(packed, 576, overlap=True, latents=True, shared_memory=1024 * memory)
        assert 2 * 576 * (config.block_m + config.stages * config.block_n) <= 1024 * memory
    assert (config.block_m, config.block_n) == widest


def test_queries_that_tiles_do_not_hold_are_refused():
    """128 queries of a group of 16 heads would take 256 KiB of shared memory."""
    for queries, most in ((4, None), (5, 64)):
        query, keys, rest = (
            torch.zeros(1, heads, queries, width, dtype=torch.half, device=DEVICE)
            for heads, width in ((16, 576), (1, 512), (1, 64))
        )
        found = refusal(query, keys, rest, [])
        if INTERPRETED or shared_memory(query.device) >= 160 * 1024:
            assert found == (
                most and f"it takes up to {most} queries of a group of heads over latents at once here, got 80"
            )


@pytest.mark.gpu
@pytest.mark.parametrize("off", [0, 8])
def test_storage_that_rows_of_all_memory_do_not_begin_with(off):
    """Of no KV head, or of the first one only: heads are 16 bytes further apart than their tokens are long."""
    query, kv = hopper_inputs(head_dim=128)

    def moved(part: Tensor) -> Tensor:
        heads, tokens, head_dim = part.shape
        apart = tokens * head_dim + 8
        flat = torch.full((off + heads * apart,), torch.nan, dtype=part.dtype, device=part.device)
        return flat[off:].as_strided(part.shape, (apart, head_dim, 1), off).copy_(part)

    check(query, replace(kv, segments=[Segment(*map(moved, segment)) for segment in kv.segments]))


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "plane"), [(64, 1 << 12), (128, 1 << 11)])
def test_nodes_that_lie_across_planes(head_dim, plane, monkeypatch):
    monkeypatch.setattr("hf_fastdecode.kernels.forest_decode.api.PLANE", plane)
    check(*hopper_inputs(head_dim))


def hopper_inputs(head_dim: int) -> tuple[Tensor, ForestKV]:
    """Nodes of one tile and of several, wide enough for the Hopper kernel where there is one."""
    forest = random_forest(random.Random(6), 90, 3, longest=900)
    widest = 4 * max(node.row_count for node in forest.nodes)
    assert choose_config(widest, head_dim, overlap=True).hopper == (torch.cuda.get_device_capability()[0] == 9)
    return make_inputs(forest, 20, heads=8, kv_heads=2, head_dim=head_dim, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_descriptor_finds_every_row(head_dim):
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    descriptor = nodes.all_memory(torch.bfloat16, 128, head_dim, nodes.PLANE)
    row = 2 * head_dim
    for address in (row, 0x302000000, 0x7F0123456700 // row * row, (1 << nodes.ADDRESS_BITS) - row):
        plane, at = divmod(address // row - 1, nodes.PLANE)
        assert plane < descriptor.shape[0]
        assert descriptor.base.data_ptr() + 2 * (plane * descriptor.strides[0] + at * descriptor.strides[1]) == address
    # What the bulk copy engine takes (CUDA driver API, cuTensorMapEncodeTiled), and 32-bit coordinates.
    assert all(2 * stride < 1 << 40 for stride in descriptor.strides)
    assert all(size < 1 << 31 for size in descriptor.shape)
