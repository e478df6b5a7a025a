"""Launch parameters: bounded by what a thread and a program can hold, and the fewer programs, the more each loads."""

from dataclasses import astuple, replace
from itertools import pairwise, product

import pytest

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.config import choose_config, choose_merge_config, choose_suffix_config

HEAD_DIMS = (64, 128, 192, 256)
PROGRAMS = (8, 64, 128, 256, 512, 1024, 4096)
SCRATCH = 16  # KiB that a program of suffixes may take beside its tiles


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def suffixes(programs, queries_per_kv_head, *, kv_heads=8, head_dim=128, queries=1, overlap_suffix=False, memory=227):
    sizes = (programs // kv_heads, kv_heads, queries_per_kv_head // queries, queries, head_dim)
    return choose_suffix_config(*sizes, overlap_suffix=overlap_suffix, shared_memory=memory * 1024)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("queries_per_kv_head", [1, 3, 8, 16, 48, 256])
def test_what_a_thread_of_suffixes_holds_is_bounded(queries_per_kv_head, head_dim):
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


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("queries_per_kv_head", [1, 3, 8, 16, 48, 256])
def test_what_a_thread_that_merges_holds_is_bounded(queries_per_kv_head, head_dim):
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
