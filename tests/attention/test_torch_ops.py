"""Forest attention by PyTorch's operators, against the fp64 oracle and PyTorch's own attention over copied keys."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Segment
from hf_fastdecode.attention.partial import Partial
from hf_fastdecode.attention.prefill_ops import Run, causal_attention
from hf_fastdecode.attention.torch_ops import (
    BACKENDS,
    BackendError,
    choose_operator,
    dense_partial,
    describe,
    forest_attention,
    plain_partial,
)

from .forests import (
    DEVICES,
    DTYPE_NAMES,
    LOW_AND_FULL,
    Case,
    Problem,
    assert_error_rule,
    last_queries_see,
    make_inputs,
    make_problem,
    own_keys_and_values,
    poisoned,
    pytorch_causal_attention,
    random_forest,
    some_sinks,
    with_every_dtype,
)

PROPERTY = settings(deadline=None, database=None, max_examples=60)


# The error rule

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


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


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
    yardstick = torch.stack([physical(query, kv, row) for row in range(9)])
    assert_error_rule(forest_attention(query, kv).out, yardstick, oracle, lse)


def physical(query: Tensor, kv: ForestKV, row: int, scale: float | None = None) -> Tensor:
    """PyTorch's own attention of one row over a physical copy of its keys."""
    return pytorch_causal_attention(query[row], *own_keys_and_values(kv, row), scale, None)


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
    yardstick = torch.stack([physical(query, kv, row) for row in range(3)])
    assert lse.max() > 300
    assert_error_rule(forest_attention(query, kv).out, yardstick, oracle, lse)


# Exactness: in fp64 only the order of additions is left

FP64 = {"rtol": 1e-11, "atol": 1e-12}


def assert_partials_close(actual: Partial | tuple[Tensor, Tensor], expected: Partial | tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, other, **FP64)


@st.composite
def fp64_inputs(draw: st.DrawFn, device: str = "cpu") -> tuple[Tensor, ForestKV]:
    """Any forest of up to four levels, any suffixes, any grouping of heads, and one to four queries a row."""
    rows, queries = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    forest = random_forest(draw(st.randoms(use_true_random=False)), rows, draw(st.integers(0, 4)))
    length = st.integers(queries, queries + 6)
    lengths = draw(
        st.one_of(length, length.map(lambda same: [same] * rows), st.lists(length, min_size=rows, max_size=rows))
    )
    kv_heads = draw(st.integers(1, 3))
    return make_inputs(
        forest,
        lengths,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 20])),
        value_dim=draw(st.sampled_from([None, None, 12])),
        queries=queries,
        dtype=torch.float64,
        device=device,
        seed=draw(st.integers(0, 1000)),
    )


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


@PROPERTY
@given(data=st.data())
def test_the_oracle_is_pytorchs_attention_over_a_physical_copy(data: st.DataObject) -> None:
    query, kv = data.draw(fp64_inputs())
    out, lse = reference.forest_attention(query, kv, 0.3)
    head_dim, value_dim = query.shape[-1], out.shape[-1]
    for row in range(query.shape[0]):
        keys, values = own_keys_and_values(kv, row)
        group = query.shape[1] // keys.shape[0]
        visible = last_queries_see(query.shape[2], keys.shape[1], "cpu")
        for head in range(query.shape[1]):
            own = query[row, head], keys[head // group], values[head // group]
            torch.testing.assert_close(
                out[row, head], F.scaled_dot_product_attention(*own, visible, scale=0.3), **FP64
            )
            weights = torch.exp(0.3 * own[0] @ own[1].T) * visible
            torch.testing.assert_close(lse[row, head], weights.sum(-1).log(), **FP64)
    assert (out.shape[-1], head_dim) == (value_dim, kv.suffix.keys.shape[-1])


def test_the_oracle_caps_scores_softly() -> None:
    query, kv = make_inputs(Forest(1), [3], heads=1, kv_heads=1, head_dim=4, dtype=torch.float64)
    scores = 2.0 * torch.tanh(0.5 * query[0, 0] @ kv.suffix.keys[0, 0, :3].T / 2.0)
    out, lse = reference.forest_attention(query, kv, 0.5, softcap=2.0)
    torch.testing.assert_close(lse[0, 0], scores.exp().sum(-1).log(), **FP64)
    torch.testing.assert_close(out[0, 0], torch.softmax(scores, -1) @ kv.suffix.values[0, 0, :3], **FP64)


# Semantics


@PROPERTY
@given(data=st.data())
def test_shared_equals_physically_duplicated(device: str, data: st.DataObject) -> None:
    query, kv = data.draw(fp64_inputs(device))
    segments, nodes, depth = [], [], [0] * kv.forest.rows
    for node in kv.forest.nodes:
        for row in range(node.row_start, node.row_stop):
            nodes.append(Node(Span(len(segments), 0, node.span.length), row, 1, depth[row]))
            segments.append(Segment(*(part.clone() for part in kv.node(node.span))))
            depth[row] += 1
    duplicated = ForestKV(Forest(kv.forest.rows, nodes), segments, kv.suffix, kv.suffix_lengths)
    assert_partials_close(forest_attention(query, kv), forest_attention(query, duplicated))


@PROPERTY
@given(data=st.data())
def test_nothing_shared_equals_one_long_suffix_per_row(device: str, data: st.DataObject) -> None:
    query, kv = data.draw(fp64_inputs(device))
    rows = [own_keys_and_values(kv, row) for row in range(query.shape[0])]
    lengths = [keys.shape[1] for keys, _ in rows]
    keys, values = (
        torch.stack([F.pad(row[which], (0, 0, 0, max(lengths) - row[which].shape[1])) for row in rows])
        for which in (0, 1)
    )
    unused = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None, None]
    alone = ForestKV(Forest(len(rows)), [], poisoned(Segment(keys, values), unused), lengths)
    assert_partials_close(forest_attention(query, kv), forest_attention(query, alone))


@PROPERTY
@given(data=st.data())
def test_selecting_rows_of_the_forest_selects_rows_of_the_output(device: str, data: st.DataObject) -> None:
    query, kv = data.draw(fp64_inputs(device))
    rows = data.draw(st.lists(st.integers(0, query.shape[0] - 1), min_size=1, max_size=9))
    selected = ForestKV(
        kv.forest.select_rows(rows),
        kv.segments,
        Segment(kv.suffix.keys[rows], kv.suffix.values[rows]),
        [kv.lengths()[row] for row in rows],
    )
    out, lse = forest_attention(query, kv)
    assert_partials_close(forest_attention(query[rows], selected), (out[rows], lse[rows]))


def test_segments_may_be_numbered_at_will(device: str) -> None:
    size = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float64, "device": device}
    query, kv = make_inputs(Forest(2, [Node(Span(0, 3, 9), 0, 2), Node(Span(1, 3, 4), 1, 1, 1)]), 5, **size)
    forest = Forest(2, [Node(Span(7, 3, 9), 0, 2), Node(Span(3, 3, 4), 1, 1, 1)])
    numbered = ForestKV(forest, {7: kv.segments[0], 3: kv.segments[1]}, kv.suffix, kv.suffix_lengths)
    assert_partials_close(forest_attention(query, numbered), forest_attention(query, kv))


def test_a_run_may_be_cut_into_a_chain_of_nodes(device: str) -> None:
    size = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": torch.float64, "device": device}
    query, kv = make_inputs(Forest(3, [Node(Span(0, 0, 60), 0, 3)]), [5, 2, 9], **size)
    cuts = [0, 1, 30, 59, 60]
    chain = [Node(Span(0, a, b - a), 0, 3, depth) for depth, (a, b) in enumerate(pairwise(cuts))]
    cut = ForestKV(Forest(3, chain), kv.segments, kv.suffix, kv.suffix_lengths)
    assert_partials_close(forest_attention(query, cut), forest_attention(query, kv))


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


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [4, 9, 20, 38, 60])
def test_what_no_query_sees_is_not_read(window: int, queries: int, device: str) -> None:
    """Rows of one node see different parts of it; the tokens before all of these may be anything."""
    nodes = [Node(Span(0, 0, 40), 0, 6), Node(Span(1, 0, 9), 0, 3, 1), Node(Span(1, 9, 14), 3, 3, 1)]
    query, kv = make_inputs(Forest(6, nodes), 8, heads=4, kv_heads=2, head_dim=16, queries=queries, device=device)
    expected = forest_attention(query, kv, window=window)
    for node, behind in zip(kv.forest.nodes, (9 + 8, 8, 8), strict=True):  # the least that lies behind it
        hidden = node.span.length + behind - window - queries + 1
        for part in kv.node(node.span):
            part[:, : max(0, hidden)] = torch.nan
    for part in kv.suffix:
        part[:, :, : max(0, 8 - window - queries + 1)] = torch.nan
    for actual, same in zip(forest_attention(query, kv, window=window), expected, strict=True):
        assert torch.equal(actual, same)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_query_does_not_see_the_tokens_behind_it(ragged: bool, backend: str, queries: int, device: str) -> None:
    lengths = [9, 4 if ragged else 9]
    query, kv = make_inputs(
        Forest(2, [Node(Span(0, 0, 7), 0, 2)]),
        lengths,
        heads=2,
        kv_heads=1,
        head_dim=16,
        queries=queries,
        device=device,
    )
    before = forest_attention(query, kv, backend=backend)
    for behind in range(1, queries):
        for row, length in enumerate(lengths):
            kv.suffix.keys[row, :, length - behind] += 1.0
            kv.suffix.values[row, :, length - behind] += 1.0
        after = forest_attention(query, kv, backend=backend)
        torch.testing.assert_close(after.out[:, :, :-behind], before.out[:, :, :-behind])
        assert ((after.out - before.out)[:, :, -behind:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_AND_FULL], ids=DTYPE_NAMES.get)
def test_lse_is_the_natural_log_in_fp32(dtype: torch.dtype, backend: str, device: str) -> None:
    """A zero query scores 0 everywhere, so its log-sum-exp is ln(number of keys), and its output the mean value."""
    query, kv = make_inputs(
        Forest(3, [Node(Span(0, 0, 100), 0, 2)]),
        [5, 5, 5],
        heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=dtype,
        device=device,
    )
    out, lse = forest_attention(torch.zeros_like(query), kv, backend=backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (wide, wide)
    expected = torch.tensor([math.log(105), math.log(105), math.log(5)], dtype=wide, device=device)
    # Natural and binary logarithms differ by 44 %; PyTorch's CPU operator is right to 1e-5 in half precision.
    torch.testing.assert_close(lse, expected[:, None, None].expand(3, 4, 1), rtol=1e-4, atol=0)
    mean = torch.stack([own_keys_and_values(kv, row)[1].double().mean(1) for row in range(3)])
    assert (out[:, :, 0].double() - mean.repeat_interleave(2, 1)).abs().max() < 8 * torch.finfo(dtype).eps


# Nothing shared is copied, and it is read once


class Reads(TorchDispatchMode):
    """Counts the operators that read each watched tensor's storage, and fails one that spreads or copies it.

    To spread is to make more numbers of it than it has, even as a view; `may_copy` allows one copy, as wide as that.
    """

    def __init__(self, watched: Sequence[Tensor], may_copy: bool = False):
        super().__init__()
        self.limit = {_storage(tensor): tensor.numel() for tensor in watched}
        self.count = dict.fromkeys(self.limit, 0)
        self.may_copy = may_copy
        self.copies: list[Tensor] = []  # kept alive, so that nothing else takes their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} & set(self.limit)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.numel()]
        for storage in read:
            for tensor in made:
                assert tensor.numel() <= self.limit[storage], f"{func} spreads shared keys or values: {tensor.shape}"
                if _storage(tensor) != storage and tensor.numel() == self.limit[storage]:
                    assert self.may_copy, f"{func} copies shared keys or values: {tensor.shape}"
                    self.copies.append(tensor)
                    self.limit[_storage(tensor)] = tensor.numel()
            if storage in self.count:
                self.count[storage] += not any(_storage(tensor) == storage for tensor in made)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def shared_kv(*nodes: Node, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ForestKV]:
    """Six rows over nodes that fill their storage and are larger than all their scores."""
    query, kv = make_inputs(
        Forest(6, nodes), [5, 6, 7, 8, 5, 6], heads=4, kv_heads=2, head_dim=64, dtype=dtype, device=device
    )
    size = [max(node.span.stop for node in nodes if node.span.segment == index) for index in range(len(kv.segments))]
    segments = [
        Segment(*(part[:, :stop].clone() for part in segment)) for segment, stop in zip(kv.segments, size, strict=True)
    ]
    return query, ForestKV(kv.forest, segments, kv.suffix, kv.suffix_lengths)


TREE = (Node(Span(0, 0, 400), 0, 6), Node(Span(1, 0, 300), 0, 4, 1), Node(Span(2, 0, 350), 4, 2, 1))
ALIKE = tuple(Node(Span(0, 200 * index, 200), 2 * index, 2) for index in range(3))


@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["nocap", "softcap5"])
@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("nodes", [TREE, ALIKE], ids=["tree", "alike"])
def test_shared_keys_and_values_are_read_once_and_never_spread(
    nodes: tuple[Node, ...], backend: str, softcap: float | None, dtype: torch.dtype, device: str
) -> None:
    query, kv = shared_kv(*nodes, device=device, dtype=dtype)
    plain = backend == "plain" or softcap is not None  # needs fp32 operands, which a batch of nodes must lie close for
    with Reads([tensor for segment in kv.segments for tensor in segment], may_copy=plain) as reads:
        forest_attention(query, kv, softcap=softcap, backend=backend)
    assert list(reads.count.values()) == [1] * len(reads.count)


@pytest.mark.parametrize(
    "spread",
    [
        pytest.param(lambda keys: keys.repeat_interleave(2, 0), id="repeat_interleave"),
        pytest.param(lambda keys: keys[None].expand(6, -1, -1, -1), id="expand"),
        pytest.param(lambda keys: keys.clone(), id="clone"),
    ],
)
def test_the_watch_for_copies_sees_one(spread: Callable[[Tensor], Tensor]) -> None:
    keys = torch.randn(2, 40, 8)
    with Reads([keys]), pytest.raises(AssertionError, match=r"spreads|copies"):
        spread(keys)
    if spread(keys).numel() > keys.numel():
        with Reads([keys], may_copy=True), pytest.raises(AssertionError, match="spreads"):
            spread(keys.double())


# Backends


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors without data, so that the choice for a GPU can be seen on any machine."""
    with FakeTensorMode():
        yield


def qkv(
    device: str, dtype: torch.dtype, head_dim: int = 64, value_dim: int | None = None, queries: int = 4, keys: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((queries, head_dim), (keys, head_dim), (keys, value_dim or head_dim))
    query, key, value = (torch.empty(1, 2, *size, device=device, dtype=dtype) for size in sizes)
    return query, key, value


@pytest.mark.parametrize(
    ("expected", "asked"),
    [
        pytest.param("cpu", {"device": "cpu", "dtype": torch.float32}, id="cpu-fp32"),
        pytest.param("cpu", {"device": "cpu", "dtype": torch.bfloat16}, id="cpu-bf16"),
        pytest.param("plain", {"device": "cpu", "dtype": torch.float32, "value_dim": 32}, id="cpu-value-dim"),
        pytest.param("flash", {"device": "cuda", "dtype": torch.bfloat16}, id="cuda-bf16"),
        pytest.param("flash", {"device": "cuda", "dtype": torch.float16, "head_dim": 256}, id="cuda-d256"),
        pytest.param("efficient", {"device": "cuda", "dtype": torch.float16, "head_dim": 264}, id="cuda-d264"),
        pytest.param("efficient", {"device": "cuda", "dtype": torch.float32}, id="cuda-fp32"),
        pytest.param("plain", {"device": "cuda", "dtype": torch.float32, "head_dim": 6}, id="cuda-unaligned"),
        pytest.param("plain", {"device": "cuda", "dtype": torch.float64}, id="cuda-fp64"),
        pytest.param(
            "cudnn", {"device": "cuda", "dtype": torch.bfloat16, "queries": 4096, "keys": 4096}, id="cuda-large"
        ),
        pytest.param(
            "flash",
            {"device": "cuda", "dtype": torch.bfloat16, "queries": 4096, "keys": 4096, "head_dim": 256},
            id="cuda-large-d256",
        ),
    ],
)
def test_auto_chooses_an_operator_that_can_run(expected: str, asked: dict[str, Any]) -> None:
    with fake_tensors():
        assert choose_operator("auto", *qkv(**asked)) == expected


@pytest.mark.parametrize(
    ("backend", "asked", "reason"),
    [
        pytest.param("flash", {"device": "cpu", "dtype": torch.bfloat16}, "device 'cpu'", id="flash-on-cpu"),
        pytest.param("cudnn", {"device": "cpu", "dtype": torch.bfloat16}, "device 'cpu'", id="cudnn-on-cpu"),
        pytest.param("efficient", {"device": "cpu", "dtype": torch.float32}, "device 'cpu'", id="efficient-on-cpu"),
        pytest.param("cpu", {"device": "cuda", "dtype": torch.float32}, "device 'cuda'", id="cpu-on-cuda"),
        pytest.param("cpu", {"device": "meta", "dtype": torch.float32}, "device 'meta'", id="cpu-on-meta"),
        pytest.param(
            "cpu",
            {"device": "cpu", "dtype": torch.float32, "value_dim": 32},
            "one head_dim.* 64 and 32",
            id="value-dim",
        ),
        pytest.param("flash", {"device": "cuda", "dtype": torch.float32}, r"got torch\.float32", id="flash-fp32"),
        pytest.param(
            "flash",
            {"device": "cuda", "dtype": torch.float16, "head_dim": 264},
            "up to 256.* got 264",
            id="flash-d264",
        ),
        pytest.param(
            "flash",
            {"device": "cuda", "dtype": torch.float16, "head_dim": 20},
            "multiples of 8, got 20",
            id="flash-d20",
        ),
        pytest.param(
            "cudnn",
            {"device": "cuda", "dtype": torch.float16, "head_dim": 136},
            "up to 128.* got 136",
            id="cudnn-d136",
        ),
        pytest.param("efficient", {"device": "cuda", "dtype": torch.float64}, r"float64", id="efficient-fp64"),
        pytest.param(
            "efficient", {"device": "cuda", "dtype": torch.float32, "head_dim": 6}, "aligned.* 6", id="efficient-d6"
        ),
    ],
)
def test_a_forced_backend_that_cannot_run_says_why(backend: str, asked: dict[str, Any], reason: str) -> None:
    with fake_tensors(), pytest.raises(BackendError, match=f"'{backend}' cannot run: .*{reason}.*use backend="):
        choose_operator(backend, *qkv(**asked))


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(BackendError, match=rf"{', '.join(BACKENDS)}, got 'fastest'"):
        choose_operator("fastest", *qkv("cpu", torch.float32))


@pytest.mark.parametrize("backend", ["flash", "fastest"])
@pytest.mark.parametrize(
    ("lengths", "queries", "softcap"),
    [
        pytest.param([5, 5], 1, None, id="even"),
        pytest.param([5, 5], 3, None, id="causal"),
        pytest.param(
            [3, 3],
            3,
            None,
            id="nothing-before-the-queries",
        ),
        pytest.param([5, 4], 1, None, id="ragged"),
        pytest.param([5, 5], 1, 5.0, id="softcap"),
    ],
)
def test_forest_attention_never_takes_another_operator_than_the_forced_one(
    lengths: list[int], queries: int, softcap: float | None, backend: str
) -> None:
    query, kv = make_inputs(Forest(2), lengths, heads=2, kv_heads=1, head_dim=8, queries=queries)
    with pytest.raises(BackendError, match=backend):
        forest_attention(query, kv, softcap=softcap, backend=backend)


@pytest.mark.parametrize("lengths", [[2, 2], [4, 2]], ids=["even", "ragged"])
def test_a_suffix_shorter_than_the_queries_is_refused(lengths: list[int]) -> None:
    query, kv = make_inputs(Forest(2), lengths, heads=2, kv_heads=1, head_dim=8, queries=3)
    with pytest.raises(ValueError, match=r"3 queries.* got 2 to "):
        forest_attention(query, kv)


@pytest.mark.parametrize(
    ("lengths", "softcap", "backend", "expected"),
    [
        pytest.param([5, 5, 5], None, "auto", "cpu", id="auto"),
        pytest.param([5, 5, 5], None, "plain", "plain", id="plain"),
        pytest.param([5, 5, 5], 5.0, "auto", "plain", id="softcap"),
        pytest.param(
            [5, 4, 5],
            None,
            "auto",
            "plain",
            id="ragged",
        ),
    ],
)
def test_describe_names_the_operator_of_every_part(
    lengths: list[int], softcap: float | None, backend: str, expected: str
) -> None:
    nodes = [Node(Span(0, 0, 9), 0, 3), Node(Span(0, 9, 4), 0, 1, 1), Node(Span(0, 20, 7), 1, 2, 1)]
    query, kv = make_inputs(Forest(3, nodes), lengths, heads=2, kv_heads=1, head_dim=8)
    line = describe(query, kv, softcap=softcap, backend=backend)
    root, groups, suffixes = line.split(", ")[:3]
    of_nodes = "cpu" if lengths != [5, 5, 5] else expected
    assert re.search(rf"1 node.* 9 tokens at depth 0 by {of_nodes}\b", root)
    assert re.search(rf"2 node.* 11 tokens at depth 1 by {of_nodes}\b", groups)
    assert re.search(rf"3 suffixes by {expected}\b", suffixes)


# The dense operators


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_AND_FULL], ids=DTYPE_NAMES.get)
def test_no_keys_is_the_empty_partial(dtype: torch.dtype, backend: str, device: str) -> None:
    query, keys, values = qkv(device, dtype, keys=0)
    out, lse = dense_partial(query.fill_(1.0), keys, values, 1.0, backend=backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(out, torch.zeros(1, 2, 4, 64, dtype=wide, device=device))
    assert torch.equal(lse, torch.full((1, 2, 4), -torch.inf, dtype=wide, device=device))


def test_a_query_that_sees_no_key_gets_the_empty_partial() -> None:
    query, keys, values = (torch.randn(2, 3, 8) for _ in range(3))
    visible = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    out, lse = plain_partial(query, keys, values, 1.0, visible=visible)
    assert torch.equal(out[:, 1], torch.zeros(2, 8)) and torch.equal(lse[:, 1], torch.full((2,), -torch.inf))
    assert out.isfinite().all() and lse[:, ::2].isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dense_operators_agree_with_the_definition(causal: bool, backend: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 3, 70, 24, generator=generator).to(device) for _ in range(3))
    out, lse = dense_partial(query, keys, values, 0.4, causal=causal, backend=backend)
    scores = 0.4 * query.double() @ keys.double().mT
    if causal:
        scores = scores.masked_fill(~last_queries_see(70, 70, device), -torch.inf)
    expected, expected_lse = torch.softmax(scores, -1) @ values.double(), torch.logsumexp(scores, -1)
    yardstick = F.scaled_dot_product_attention(query, keys, values, is_causal=causal, scale=0.4)
    assert_error_rule(out, yardstick, expected, expected_lse)
    assert_error_rule(lse, torch.logsumexp(scores.float(), -1), expected_lse, expected_lse)


# Prefill


def prefill_id(context: tuple[int, ...]) -> str:
    return "ctx" + "+".join(map(str, context)) if context else "alone"


def prefill_inputs(
    context: Sequence[int], length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Queries, keys and values of a run, and what lies before it, all views of longer, poisoned storage."""
    kv_heads = heads[1]
    spans, stored = [], 2
    for tokens in (*context, length):
        spans.append(Span(0, stored, tokens))
        stored += tokens + 2
    paths = Forest.from_paths([tuple(spans)])
    _, kv = make_inputs(paths, [1], heads=heads[0], kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    query = torch.randn(heads[0], length, head_dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    *earlier, (keys, values) = (kv.node(span) for span in spans)
    return query, keys, values, [tuple(part) for part in earlier]


def prefill_oracle(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    context: Sequence[tuple[Tensor, Tensor]],
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefill by definition, in fp64, one query and head at a time."""
    heads, length, _ = query.shape
    every_key = torch.cat([part[0] for part in context] + [keys], 1).double()
    every_value = torch.cat([part[1] for part in context] + [values], 1).double()
    before = every_key.shape[1] - length
    out = torch.empty(heads, length, values.shape[-1], dtype=torch.float64, device=query.device)
    lse = torch.empty(heads, length, dtype=torch.float64, device=query.device)
    for head in range(heads):
        kv_head = head // (heads // keys.shape[0])
        for position in range(length):
            seen = slice(0 if window is None else max(0, before + position + 1 - window), before + position + 1)
            scores = every_key[kv_head, seen] @ query[head, position].double() * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            lse[head, position] = torch.logsumexp(scores, 0)
            if sinks is not None:
                lse[head, position] = torch.logaddexp(lse[head, position], sinks[head].double())
            out[head, position] = torch.exp(scores - lse[head, position]) @ every_value[kv_head, seen]
    return out, lse


def attend_run(query: Tensor, keys: Tensor, values: Tensor, scale: float, earlier: Sequence, **scoring: Any) -> Tensor:
    """One run of tokens after others."""
    run = Run(query.shape[1], tuple(range(len(earlier))))
    return causal_attention(query, keys, values, scale, runs=[run], stored=earlier.__getitem__, **scoring)


@PROPERTY
@given(data=st.data())
def test_runs_of_a_pass_are_what_they_are_alone(device: str, data: st.DataObject) -> None:
    """Of equal and unequal lengths, over contexts that they share or not, side by side or apart."""
    kv_heads = data.draw(st.integers(1, 2))
    heads = kv_heads * data.draw(st.integers(1, 3))
    scoring = {"softcap": data.draw(st.none() | st.just(1.5)), "window": data.draw(st.none() | st.integers(1, 9))}
    scoring["sinks"] = some_sinks(heads, device) if data.draw(st.booleans()) else None
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def normal(count: int, length: int) -> Tensor:
        return torch.randn(count, length, 8, generator=generator, dtype=torch.float64).to(device)

    contexts = [(normal(kv_heads, length), normal(kv_heads, length)) for length in (5, 1, 3)]
    paths = ((), (0,), (0, 1), (0, 2), (1,))
    drawn = data.draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(paths)), min_size=1, max_size=6))
    runs = [Run(length, path) for length, path in drawn]
    total = sum(run.length for run in runs)
    query, keys, values = normal(heads, total), normal(kv_heads, total), normal(kv_heads, total)
    together = causal_attention(query, keys, values, 0.5, runs=runs, stored=contexts.__getitem__, **scoring)
    start = 0
    for run in runs:
        own = slice(start, start + run.length)
        start = own.stop
        earlier = [contexts[name] for name in run.context]
        expected, _ = prefill_oracle(query[:, own], keys[:, own], values[:, own], 0.5, earlier, **scoring)
        torch.testing.assert_close(together[:, own], expected, **FP64)


def test_runs_of_a_pass_read_a_shared_context_once(device: str) -> None:
    query, keys, values, earlier = prefill_inputs((40, 30), 12, (4, 2), 64, torch.float32, device)
    earlier = [(part.clone(), value.clone()) for part, value in earlier]
    runs = [Run(4, (0, 1)), Run(3, (0,)), Run(5, (0, 1))]
    with Reads([tensor for part in earlier for tensor in part]) as reads:
        causal_attention(query, keys, values, 0.2, runs=runs, stored=earlier.__getitem__)
    assert list(reads.count.values()) == [1] * 4


@pytest.mark.parametrize(
    ("softcap", "backend"),
    [(None, "auto"), (None, "plain"), (None, "fused"), (3.0, "auto"), (3.0, "plain")],
    ids=["auto", "plain", "fused", "softcap3-auto", "softcap3-plain"],
)
@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize(
    ("context", "length", "heads", "head_dim"),
    [
        pytest.param((), 1, (2, 2), 16, id="alone-m1-h2g2-d16"),
        pytest.param((), 63, (4, 2), 64, id="alone-m63-h4g2-d64"),
        pytest.param((1,), 17, (4, 4), 80, id="after1-m17-h4g4-d80"),
        pytest.param((63,), 1, (4, 1), 128, id="after63-m1-h4g1-d128"),
        pytest.param((200, 1, 17), 31, (6, 2), 64, id="after200+1+17-m31-h6g2-d64"),
    ],
)
def test_prefill_error_is_at_most_twice_pytorchs_own(
    context: tuple[int, ...],
    length: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    backend: str,
    device: str,
) -> None:
    if backend == "fused":  # one that "auto" leaves to PyTorch to choose when nothing lies before the run
        backend = "cpu" if device == "cpu" else "efficient" if dtype == torch.float32 else "flash"
    query, keys, values, earlier = prefill_inputs(context, length, heads, head_dim, dtype, device)
    out = attend_run(query, keys, values, 0.2, earlier, softcap=softcap, backend=backend)
    assert out.dtype == dtype
    oracle, lse = prefill_oracle(query, keys, values, 0.2, earlier, softcap)
    every_key, every_value = (
        torch.cat([part[which] for part in earlier] + [run], 1) for which, run in enumerate((keys, values))
    )
    yardstick = pytorch_causal_attention(query, every_key, every_value, 0.2, softcap)
    assert_error_rule(out, yardstick, oracle, lse)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "softcap3"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["nosinks", "sinks"])
@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("window", [None, 1, 7, 30, 60, 100])
def test_windowed_prefill_keeps_the_error_rule(
    window: int | None,
    dtype: torch.dtype,
    with_sinks: bool,
    softcap: float | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows that end in the run and at every depth above it; what no query sees is not read."""
    monkeypatch.setattr("hf_fastdecode.attention.prefill_ops._WINDOWED_QUERIES", 8)
    query, keys, values, earlier = prefill_inputs((20, 1, 17), 31, (6, 2), 64, dtype, device)
    scoring = {"softcap": softcap, "window": window, "sinks": some_sinks(6, device) if with_sinks else None}
    every_key, every_value = (
        torch.cat([part[which] for part in earlier] + [run], 1) for which, run in enumerate((keys, values))
    )
    oracle, lse = prefill_oracle(query, keys, values, 0.2, earlier, **scoring)
    yardstick = pytorch_causal_attention(query, every_key, every_value, 0.2, **scoring)
    if window is not None:
        hidden = 38
        for part in earlier:
            count = min(part[0].shape[1], max(0, hidden - window + 1))
            hidden -= part[0].shape[1]
            for stored in part:
                stored[:, :count] = torch.nan
    out = attend_run(query, keys, values, 0.2, earlier, **scoring)
    assert out.dtype == dtype
    assert_error_rule(out, yardstick, oracle, lse)


@PROPERTY
@given(data=st.data())
def test_prefill_in_pieces_equals_prefill_at_once(device: str, data: st.DataObject) -> None:
    total, kv_heads = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 2))
    heads = kv_heads * data.draw(st.integers(1, 3))
    scoring = {"softcap": data.draw(st.none() | st.just(1.5)), "window": data.draw(st.none() | st.integers(1, 14))}
    scoring["sinks"] = some_sinks(heads, device) if data.draw(st.booleans()) else None
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    query, keys, values = (
        torch.randn(count, total, 8, generator=generator, dtype=torch.float64).to(device)
        for count in (heads, kv_heads, kv_heads)
    )
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=3))})
    pieces = [(keys[:, a:b], values[:, a:b]) for a, b in pairwise(cuts)]
    outs = [
        attend_run(query[:, a : a + own.shape[1]], own, own_values, 0.5, pieces[:index], **scoring)
        for index, (a, (own, own_values)) in enumerate(zip(cuts, pieces, strict=False))
    ]
    expected, _ = prefill_oracle(query, keys, values, 0.5, [], **scoring)
    torch.testing.assert_close(torch.cat(outs, 1), expected, **FP64)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "softcap3"])
@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_prefill_reads_its_context_once_and_never_copies_it(backend: str, softcap: float | None, device: str) -> None:
    query, keys, values, earlier = prefill_inputs((400, 300), 7, (4, 2), 64, torch.float32, device)
    earlier = [(part.clone(), value.clone()) for part, value in earlier]
    with Reads([tensor for part in earlier for tensor in part]) as reads:
        attend_run(query, keys, values, 0.2, earlier, softcap=softcap, backend=backend)
    assert list(reads.count.values()) == [1] * 4


def test_prefill_refuses_a_backend_that_cannot_run() -> None:
    query, keys, values, earlier = prefill_inputs((3,), 5, (2, 1), 16, torch.float32, "cpu")
    with pytest.raises(BackendError, match=r"'flash' cannot run: .*'cpu'"):
        attend_run(query, keys, values, 0.2, earlier, backend="flash")
    with pytest.raises(BackendError, match=r"backend='cpu' cannot compute a sliding window in prefill; use backend="):
        attend_run(query, keys, values, 0.2, earlier, window=2, backend="cpu")


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
