"""The cost model: what must hold whatever its constants are, and the choices that were measured."""

from dataclasses import replace

import pytest
import torch

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.launch.dispatch import (
    _H200,
    KERNELS,
    LIBRARY,
    PLAIN,
    Choice,
    Heads,
    estimated_costs,
    memory_bandwidth,
    predict,
)

MHA, GQA = Heads(32, 32, 128), Heads(32, 8, 128)


def shared(rows, length):
    return Forest(rows, [Node(Span(0, 0, length), 0, rows)])


def fastest(forest, suffix, heads):
    seconds = predict(forest, suffix, heads, _H200)
    return min(seconds, key=seconds.get)


@pytest.mark.parametrize("heads", [MHA, GQA], ids=["mha", "gqa"])
def test_plain_decoding_loses_where_much_is_shared(heads):
    seconds = predict(shared(128, 8192), 64, heads, _H200)
    assert seconds[PLAIN] > 20 * seconds[KERNELS]
    assert fastest(shared(128, 2048), 64, heads) == KERNELS


def test_plain_decoding_wins_where_nothing_is_shared():
    """One row: the same bytes, and on a device where that costs less, one launch."""
    cheap = replace(_H200, plain=replace(_H200.plain, launch=4e-6))
    seconds = predict(shared(1, 64), 16, MHA, cheap)
    assert min(seconds, key=seconds.get) == PLAIN
    alone = predict(Forest(4), 256, GQA, _H200)
    assert alone[PLAIN] < alone[LIBRARY]


def test_the_kernels_are_chosen_for_one_long_row():
    """As in ``ops.csv``: ``n1-m8192-L64-h32g8``."""
    assert fastest(shared(1, 8192), 64, GQA) == KERNELS


@pytest.mark.parametrize("name", [KERNELS, LIBRARY, PLAIN])
def test_more_work_takes_longer(name):
    base = predict(shared(64, 4096), 64, GQA, _H200)[name]
    assert predict(shared(64, 65536), 64, GQA, _H200)[name] > base
    assert predict(shared(64, 4096), 640, GQA, _H200)[name] > base
    assert predict(shared(64, 4096), 64, MHA, _H200)[name] > base


def test_every_node_is_read_once_by_the_kernels_and_by_every_row_in_plain():
    bytes_of_context = 8192 * GQA.bytes_per_token
    for rows in (1, 8):
        seconds = predict(shared(rows, 8192), 0, GQA, _H200)
        assert seconds[KERNELS] == pytest.approx(_H200.kernels.launch + bytes_of_context / _H200.kernels.bandwidth)
        assert seconds[PLAIN] == pytest.approx(_H200.plain.launch + rows * bytes_of_context / _H200.plain.bandwidth)


@pytest.mark.parametrize(
    ("window", "read"), [(None, 140), (10, 0), (50, 8 + 10 + 18), (60, 18 + 10 + 28), (80, 38 + 40), (10**6, 140)]
)
def test_of_a_node_is_read_what_any_of_its_rows_sees_in_a_window(window, read):
    """100 tokens over all rows, then 10 and 30 of two each, and 32 of their own: a row sees 0 to 68 of its path."""
    nodes = [Node(Span(0, 0, 100), 0, 4), Node(Span(0, 100, 10), 0, 2, 1), Node(Span(0, 110, 30), 2, 2, 1)]
    heads = replace(GQA, window=window)
    seconds = predict(Forest(4, nodes), 32, heads, _H200)
    seen = [length if window is None else min(length, max(0, window - 32)) for length in (110, 110, 130, 130)]
    own = 4 * min(32, window or 32) * GQA.bytes_per_token
    by_kernels = read * GQA.bytes_per_token / _H200.kernels.bandwidth + own / _H200.kernels.suffix_bandwidth
    assert seconds[KERNELS] == pytest.approx(_H200.kernels.launch + by_kernels)
    in_plain = sum(seen) * GQA.bytes_per_token + own
    assert seconds[PLAIN] == pytest.approx(_H200.plain.launch + in_plain / _H200.plain.bandwidth)


def test_other_devices_are_scaled():
    half = estimated_costs(66, 2.4e12)
    whole = predict(shared(1024, 32768), 256, GQA, _H200)
    for name, seconds in predict(shared(1024, 32768), 256, GQA, half).items():
        assert seconds == pytest.approx(2 * whole[name], rel=0.05)  # but for launches
    assert estimated_costs(66, None) == half


def test_what_a_small_cache_cannot_hold_is_read_again():
    """1024 rows of four queries are 32 tiles: for 24 multiprocessors two rounds through each head's 16 MiB."""
    forest = shared(1024, 32768)
    narrow = estimated_costs(24, 1e12)
    once, twice = (predict(forest, 0, GQA, replace(narrow, l2_bytes=size)) for size in (16 * 2**20, 16 * 2**20 - 1))
    size = 32768 * GQA.bytes_per_token
    slow = replace(narrow, kernels=replace(narrow.kernels, rate=float("inf")))
    read = [
        predict(forest, 0, GQA, replace(slow, l2_bytes=held))[KERNELS] - slow.kernels.launch
        for held in (16 * 2**20, 16 * 2**20 - 1)
    ]
    assert read == pytest.approx([size / slow.kernels.bandwidth, 2 * size / slow.kernels.bandwidth])
    assert once[PLAIN] == twice[PLAIN]
    wide = replace(slow, multiprocessors=32, l2_bytes=1)
    assert predict(forest, 0, GQA, wide)[KERNELS] - slow.kernels.launch == pytest.approx(read[0])


def test_matrix_units_before_hopper_and_kernels_without_its_kernel():
    """An A100's 108 multiprocessors stay below the 312 TFLOP/s that it is made for."""
    ampere, blackwell = estimated_costs(108, 2.0e12, 8), estimated_costs(148, 8e12, 10)
    assert ampere.kernels.rate == ampere.portable_rate < ampere.matmul_rate < 312e12
    assert blackwell.kernels.rate == blackwell.portable_rate == pytest.approx(_H200.portable_rate * 148 / 132)
    assert _H200.portable_rate < _H200.kernels.rate < _H200.matmul_rate
    windowed = replace(GQA, window=10**6)
    assert (
        predict(shared(1024, 32768), 64, windowed, _H200)[KERNELS]
        > predict(shared(1024, 32768), 64, GQA, _H200)[KERNELS]
    )


def test_memory_bandwidth():
    class H200:
        memory_clock_rate, memory_bus_width = 3201000, 6144

    assert memory_bandwidth(H200()) == pytest.approx(4.9e12, rel=0.01)
    assert memory_bandwidth(object()) is None


def test_a_choice_reads_as_text():
    assert (
        str(Choice(KERNELS, {KERNELS: 1.24e-5, PLAIN: 3e-5})) == "kernels (predicted us a layer: kernels 12, plain 30)"
    )


@pytest.mark.gpu
def test_costs_of_this_device():
    from hf_fastdecode.attention.launch.dispatch import costs_of

    costs = costs_of(torch.device("cuda", 0))
    assert 1e11 < costs.kernels.bandwidth < 2e13
