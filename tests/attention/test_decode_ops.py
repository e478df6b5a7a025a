"""Forest attention by PyTorch's operators, against the fp64 oracle and PyTorch's own attention over copied keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Partial, Segment
from hf_fastdecode.attention.torch_operators.decode_ops import biased_causal_attention, forest_attention
from hf_fastdecode.attention.torch_operators.prefill_ops import Run

from .forests import (
    DEVICES,
    DTYPE_NAMES,
    LOW_AND_FULL,
    PROPERTY,
    Case,
    Problem,
    assert_error_rule,
    assert_partials_close,
    fp64_inputs,
    make_inputs,
    make_problem,
    pytorch_attention,
    random_forest,
    some_sinks,
    with_every_dtype,
)

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "prompts": (1, 2, 4),
    "context": (1, 63, 1000),
    "samples": (1, 5),
    "suffix": (17, 16, 33),
    "ragged": (False, True),
    "queries": (1, 3, 16),
    "depth": (0, 1, 2, 3),
    "head_dim": (16, 64, 80, 128),
    "softcap": (None, None, None, 5.0),
    "window": (None, None, 1, 16, 40, 900),
    "sinks": (False, False, True),
}
HEADS = ((8, 8), (8, 2), (6, 1), (1, 1))


def sampled_cases(count: int) -> Iterator[Case]:
    """Cases from all over the grid, always the same ones."""
    rng = random.Random(0)
    for _ in range(count):
        heads, kv_heads = rng.choice(HEADS)
        case = Case(heads=heads, kv_heads=kv_heads)
        yield replace(case, **{name: rng.choice(choices) for name, choices in DIMENSIONS.items()})


CASES = [
    Case(),
    Case(prompts=1, context=1, samples=1, suffix=1, heads=2, head_dim=16),
    Case(prompts=1, context=1000, samples=1, suffix=1),
    Case(prompts=1, context=1000, samples=200, heads=4),
    Case(prompts=40, context=63, samples=5, suffix=1, heads=2, head_dim=16),
    Case(prompts=200, context=1, samples=1, ragged=True, heads=2, head_dim=16),
    Case(prompts=4, samples=1, suffix=3, queries=3, kv_heads=8),
    Case(prompts=1, samples=5, suffix=16, queries=16, kv_heads=1, depth=2),
    # A window that ends in the suffix, in the prompts' nodes, in the one above them, and before all.
    *(Case(depth=2, window=window, queries=queries) for window in (10, 40, 90, 900) for queries in (1, 3)),
    Case(depth=3, ragged=True, window=60, sinks=True),
    Case(depth=2, sinks=True),
    *sampled_cases(24),
]


def operators_for(case: Case) -> Iterator[Any]:
    """The case with every device and every backend that can compute it."""
    plain_only = case.softcap is not None or case.ragged
    for device in DEVICES:
        on_cpu = device == "cpu"
        fused = (
            ("cpu",) if on_cpu else ("efficient",) if case.dtype == torch.float32 else ("flash", "cudnn", "efficient")
        )
        for backend in ("auto", "plain", *(() if plain_only else fused)):
            name, marks = ("cpu", ()) if on_cpu else (device.values[0], device.marks)
            yield pytest.param(case, name, backend, id=f"{case}-{name}-{backend}", marks=marks)


@pytest.mark.parametrize(
    ("case", "device", "backend"), [run for case in with_every_dtype(CASES) for run in operators_for(case)]
)
def test_error_is_at_most_twice_pytorchs_own(case: Case, device: str, backend: str) -> None:
    problem = make_problem(case, device)
    actual = forest_attention(problem.query, problem.kv, **case.scoring(device), backend=backend)
    assert_partial_is_right(actual, problem)


def assert_partial_is_right(actual: Partial, problem: Problem) -> None:
    assert actual.out.dtype == actual.lse.dtype == torch.float32
    assert_error_rule(actual.out, problem.pytorch, problem.oracle, problem.oracle_lse)
    assert_error_rule(actual.lse, problem.pytorch_lse, problem.oracle_lse, problem.oracle_lse)


@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("seed", range(6))
def test_random_forests_keep_the_error_rule(seed: int, dtype: torch.dtype, device: str) -> None:
    rng = random.Random(seed)
    forest = random_forest(rng, rows=9, depth=3, longest=150)
    lengths = [rng.randint(1, 40) for _ in range(9)]
    query, kv = make_inputs(forest, lengths, heads=8, kv_heads=2, head_dim=64, dtype=dtype, device=device, seed=seed)
    oracle, lse = reference.forest_attention(query, kv)
    assert_error_rule(forest_attention(query, kv).out, pytorch_attention(query, kv), oracle, lse)


@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("loud", ["node", "suffix"])
def test_scores_of_hundreds_keep_the_error_rule(loud: str, dtype: torch.dtype, device: str) -> None:
    """One part outweighs the other by e^hundreds, or both compete at that height."""
    query, kv = make_inputs(
        Forest(3, [Node(Span(0, 0, 100), 0, 3)]), [20, 20, 20], heads=4, kv_heads=2, head_dim=64, device=device
    )
    (segment,), suffix = kv.segments, kv.suffix
    if loud == "node":
        segment = Segment(segment.keys * 16, segment.values)
    else:
        suffix = Segment(suffix.keys * 16, suffix.values)
    query, cast = (query * 8).to(dtype), lambda part: Segment(part.keys.to(dtype), part.values.to(dtype))
    kv = ForestKV(kv.forest, [cast(segment)], cast(suffix), kv.suffix_lengths)
    oracle, lse = reference.forest_attention(query, kv)
    assert lse.max() > 300
    assert_error_rule(forest_attention(query, kv).out, pytorch_attention(query, kv), oracle, lse)


@PROPERTY
@given(
    data=st.data(),
    scale=st.none() | st.just(0.7),
    softcap=st.none() | st.just(2.0),
    window=st.none() | st.integers(1, 60),
    with_sinks=st.booleans(),
)
def test_any_forest_equals_the_oracle(
    device: str, data: st.DataObject, scale: float | None, softcap: float | None, window: int | None, with_sinks: bool
) -> None:
    query, kv = data.draw(fp64_inputs(device))
    sinks = some_sinks(query.shape[1], device) if with_sinks else None
    scoring = {"softcap": softcap, "window": window, "sinks": sinks}
    expected = reference.forest_attention(query, kv, scale, **scoring)
    assert_partials_close(forest_attention(query, kv, scale, **scoring), expected)
    assert_partials_close(forest_attention(query, kv, scale, **scoring, backend="plain"), expected)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param([(0, 10, 10, 0, 2), (0, 30, 10, 2, 2), (0, 50, 10, 4, 2), (0, 70, 10, 6, 2)], id="alike"),
        pytest.param([(0, 10, 10, 0, 2), (0, 20, 10, 2, 2), (0, 50, 10, 4, 2), (0, 60, 10, 6, 2)], id="spacing"),
        pytest.param([(0, 10, 10, 0, 2), (0, 30, 10, 2, 2), (0, 50, 9, 4, 2), (0, 70, 10, 6, 2)], id="length"),
        pytest.param([(0, 10, 10, 0, 2), (0, 30, 10, 2, 2), (0, 50, 10, 4, 1), (0, 70, 10, 5, 3)], id="rows"),
        pytest.param([(0, 10, 10, 0, 2), (0, 30, 10, 3, 2), (0, 50, 10, 6, 2)], id="a-row-between"),
        pytest.param([(0, 10, 10, 0, 2), (1, 30, 10, 2, 2), (0, 50, 10, 4, 2), (1, 70, 10, 6, 2)], id="segment"),
        pytest.param([(0, 10, 10, 0, 2), (0, 10, 10, 2, 2), (0, 10, 10, 4, 2), (0, 10, 10, 6, 2)], id="one-span"),
        pytest.param([(0, 10, 10, 0, 2), (0, 14, 10, 2, 2), (0, 18, 10, 4, 2), (0, 22, 10, 6, 2)], id="overlapping"),
        pytest.param([(0, 70, 10, 0, 2), (0, 50, 10, 2, 2), (0, 30, 10, 4, 2), (0, 10, 10, 6, 2)], id="backwards"),
    ],
)
def test_neighbours_alike_but_for_one_thing(
    nodes: list[tuple[int, int, int, int, int]], queries: int, device: str
) -> None:
    forest = Forest(
        8, [Node(Span(segment, start, length), row, count) for segment, start, length, row, count in nodes]
    )
    size = {"heads": 4, "kv_heads": 2, "head_dim": 8, "queries": queries, "dtype": torch.float64, "device": device}
    query, kv = make_inputs(forest, [5] * 8, **size)
    assert_partials_close(forest_attention(query, kv), reference.forest_attention(query, kv))


@pytest.mark.parametrize("lengths", [[2, 2], [4, 2]], ids=["even", "ragged"])
def test_a_suffix_shorter_than_the_queries_is_refused(lengths: list[int]) -> None:
    query, kv = make_inputs(Forest(2), lengths, heads=2, kv_heads=1, head_dim=8, queries=3)
    with pytest.raises(ValueError, match=r"3 queries.* got 2 to "):
        forest_attention(query, kv)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forest": Forest(3)}, "queries of 2 rows, a forest of 3"),
        ({"suffix_lengths": 9}, "capacity of 8, got 9 to 9"),
        ({"forest": Forest.from_paths([(Span(0, 2, 10),)] * 2)}, "outside its segment of 11 tokens"),
    ],
    ids=["rows", "capacity", "segment"],
)
def test_what_does_not_fit_the_storage_is_an_error(change, message):
    kv = {
        "forest": Forest.from_paths([(Span(0, 1, 10),)] * 2),
        "segments": [Segment(torch.randn(2, 11, 16), torch.randn(2, 11, 16))],
        "suffix": Segment(torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)),
        "suffix_lengths": 4,
    }
    forest_attention(torch.randn(2, 4, 1, 16), ForestKV(**kv))
    with pytest.raises(ValueError, match=message):
        forest_attention(torch.randn(2, 4, 1, 16), ForestKV(**kv | change))


def test_no_rows():
    kv = ForestKV(Forest(0), [], Segment(torch.randn(0, 2, 8, 16), torch.randn(0, 2, 8, 16)), 4)
    out, lse = forest_attention(torch.randn(0, 4, 1, 16), kv)
    assert (out.shape, lse.shape) == ((0, 4, 1, 16), (0, 4, 1))


BIASED_HEADS, WIDTH, SCALE = 3, 8, 0.7


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def expected(query, keys, values, biases):
    """Attention of the last tokens of one sequence, ``[heads, queries, width]``."""
    tokens, queries = keys.shape[1], query.shape[1]
    ages = torch.arange(tokens - queries, tokens)[:, None] - torch.arange(tokens)
    scores = query @ keys.mT * SCALE + biases[:, ages.clamp(0, biases.shape[1] - 1)]
    return scores.masked_fill(ages < 0, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("lengths", [6, [6, 3, 2, 5]], ids=["equal", "unequal"])
def test_rows_over_two_levels_of_nodes(lengths):
    torch.manual_seed(0)
    queries, segment, biases = (
        2,
        Segment(normal(BIASED_HEADS, 20, WIDTH), normal(BIASED_HEADS, 20, WIDTH)),
        normal(BIASED_HEADS, 5),
    )
    shared, own = Span(0, 0, 7), Span(0, 7, 4)
    forest = Forest.from_paths([(shared, own), (shared, own), (shared,), ()])
    suffix = Segment(normal(4, BIASED_HEADS, 9, WIDTH), normal(4, BIASED_HEADS, 9, WIDTH))
    query, kv = normal(4, BIASED_HEADS, queries, WIDTH), ForestKV(forest, [segment], suffix, lengths)
    got = forest_attention(query, kv, SCALE, distances=biases).out
    for row, path in enumerate(forest.paths):
        nodes, count = [segment.view(span) for span in path], kv.lengths()[row]
        keys, values = (
            torch.cat([*(node[part] for node in nodes), suffix[part][row, :, :count]], 1) for part in (0, 1)
        )
        torch.testing.assert_close(got[row], expected(query[row], keys, values, biases))


def test_runs_of_a_prefill():
    torch.manual_seed(0)
    query, keys, values = (normal(BIASED_HEADS, 10, WIDTH) for _ in range(3))
    biases = normal(BIASED_HEADS, 4)
    got = biased_causal_attention(query, keys, values, SCALE, biases, runs=[Run(6), Run(1), Run(3)])
    for own in (slice(0, 6), slice(6, 7), slice(7, 10)):
        torch.testing.assert_close(got[:, own], expected(query[:, own], keys[:, own], values[:, own], biases))
