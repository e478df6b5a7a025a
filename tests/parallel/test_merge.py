"""Attention over contexts divided between ranks, merged, against attention over the whole."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Partial, Scoring, Segment, SuffixLengths
from hf_fastdecode.attention.launch import plan
from hf_fastdecode.attention.launch.plan import OwnNodes
from hf_fastdecode.kernels.failures import KernelFailedError
from hf_fastdecode.parallel import sequence
from hf_fastdecode.parallel.sequence import DividedStepTables, PartialBuffer, SequenceParallel, merged, partial_buffer
from hf_fastdecode.parallel.shards import Shard, stored_forest

from ..attention.forests import assert_error_rule, random_forest

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 6, 2, 20, 12


def attend(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Partial:
    """One row over the keys that one rank stores, in the dtype of the query, partials in fp32 or fp64.

    Args:
        query: ``[heads, head_dim]``.
        keys: ``[kv_heads, tokens, head_dim]``.
        values: ``[kv_heads, tokens, value_dim]``.
        sinks: ``[heads]``.
    """
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (keys, values))
    scores = (query[:, None] @ keys.mT)[:, 0] * HEAD_DIM**-0.5  # [heads, tokens]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None]], 1)
        values = torch.cat([values, values.new_zeros(HEADS, 1, VALUE_DIM)], 1)
    lse = torch.logsumexp(scores, 1)
    weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[:, None]).exp()
    return Partial((weights[:, None] @ values.to(scores))[:, 0], lse)


def over_forest(query: Tensor, forest: Forest, storage: tuple[Tensor, Tensor], sinks: Tensor | None) -> Partial:
    """All rows, over keys and values ``[kv_heads, tokens, width]`` of segment 0."""
    rows = []
    for row, path in enumerate(forest.paths):
        parts = [torch.cat([part[:, :0], *[part[:, span.start : span.stop] for span in path]], 1) for part in storage]
        rows.append(attend(query[row], *parts, sinks))
    return Partial(*map(torch.stack, zip(*rows, strict=True)))


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 100])
def test_merged_shards_keep_the_error_rule(ranks: int, dtype: torch.dtype, sinks: bool) -> None:
    paths = random_forest(random.Random(ranks), rows=6, depth=3, longest=60).paths
    forest = Forest.from_paths([*(tuple(span for span in path if span.segment == 0) for path in paths), ()])
    stored = max(node.span.stop for node in forest.nodes)
    generator = torch.Generator().manual_seed(ranks)
    query = torch.randn(forest.rows, HEADS, HEAD_DIM, generator=generator).to(dtype)
    storage = (
        torch.randn(KV_HEADS, stored, HEAD_DIM, generator=generator).to(dtype),
        torch.randn(KV_HEADS, stored, VALUE_DIM, generator=generator).to(dtype),
    )
    sink = torch.randn(HEADS, generator=generator) if sinks else None
    shape = forest.rows, HEADS, VALUE_DIM
    buffers = []
    for rank in range(ranks):
        shard, buffer = Shard(rank, ranks), partial_buffer(shape)
        buffer.flat.fill_(torch.nan)  # whatever is not written shows
        own = (storage[0][:, shard.stored_tokens(0, stored)], storage[1][:, shard.stored_tokens(0, stored)])
        here = stored_forest(forest, lambda _, shard=shard: shard)
        part = over_forest(query, here, own, sink if shard.counts_sinks else None)
        for view, one in zip(buffer.partial, part, strict=True):
            view.copy_(one)
        buffers.append(buffer.flat)
    found = merged(torch.stack(buffers), shape)
    oracle = over_forest(query.double(), forest, (storage[0].double(), storage[1].double()), sink)
    pytorch = over_forest(query, forest, storage, sink)
    assert torch.equal(found.lse.isneginf(), oracle.lse.isneginf())
    assert bool(oracle.lse.isneginf().any()) != sinks
    finite = oracle.lse.isfinite()
    assert_error_rule(found.out, pytorch.out.to(dtype), oracle.out, oracle.lse[finite])
    assert_error_rule(found.lse[finite], pytorch.lse[finite], oracle.lse[finite])


def test_the_partial_of_no_key_changes_no_bit() -> None:
    """A rank with an empty shard sends (0, -inf), wherever it stands in the order."""
    buffer, empty = partial_buffer((3, HEADS, VALUE_DIM)), partial_buffer((3, HEADS, VALUE_DIM))
    buffer.flat.copy_(torch.randn(len(buffer.flat), generator=torch.Generator().manual_seed(0)))
    empty.partial.out.zero_()
    empty.partial.lse.fill_(-torch.inf)
    for order in ([buffer, empty, empty], [empty, buffer, empty], [empty, empty, buffer]):
        found = merged(torch.stack([one.flat for one in order]), (3, HEADS, VALUE_DIM))
        assert torch.equal(found.out, buffer.partial.out)
        assert torch.equal(found.lse, buffer.partial.lse)
    nothing = merged(torch.stack([empty.flat, empty.flat]), (3, HEADS, VALUE_DIM))
    assert torch.equal(nothing.out, torch.zeros_like(nothing.out))
    assert bool(nothing.lse.isneginf().all())


def test_a_kernel_that_fails_leaves_the_merge_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = pytest.importorskip("hf_fastdecode.kernels.forest_decode.merge")
    shape = (3, 2, 8)
    buffers = [partial_buffer(shape) for _ in range(2)]
    for buffer in buffers:
        buffer.flat.normal_()
    by_rank = torch.stack([buffer.flat for buffer in buffers])

    def fail(*given: Tensor) -> None:
        raise KernelFailedError("no compiler")

    monkeypatch.setattr(sequence, "gathered", lambda *_: by_rank)
    monkeypatch.setattr(sequence, "_by_kernel", lambda _: True)
    monkeypatch.setattr(ranks, "merge_ranks", fail)
    for dtype in (torch.float32, torch.bfloat16):
        found, expected = sequence.merge_over(None, buffers[0], dtype), merged(by_rank, shape)
        assert torch.equal(found.out, expected.out.to(dtype))
        assert torch.equal(found.lse, expected.lse)


CPU = torch.device("cpu")
ROWS, RANKS, BLOCK, MOST = 3, 2, 4, 24


class Stored:
    """A layer's keys and values."""

    def __init__(self, nodes: Segment, suffix: Segment):
        self.segments, self.suffix, self.version = {0: nodes}, suffix, object()


def rank(number: int) -> SequenceParallel:
    """One of the processes, without communication."""
    parallel = SequenceParallel(SimpleNamespace(rank=lambda: number, size=lambda: RANKS))
    assert parallel.suffix_shard.block == BLOCK
    return parallel


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
def test_steps_of_all_ranks_attend_to_all_keys(monkeypatch, ragged):
    """Suffixes grow into own nodes, of unequal lengths."""
    pytest.importorskip("triton")
    monkeypatch.setattr("hf_fastdecode.parallel.sequence.SUFFIX_BLOCK", BLOCK)
    monkeypatch.setattr(plan, "STEP", 8)
    buffers: list[PartialBuffer] = []
    monkeypatch.setattr(sequence, "merge_over", lambda group, buffer, dtype: buffers.append(buffer) or buffer.partial)
    generator = torch.Generator().manual_seed(0)
    nodes = Segment(*torch.randn(2, 2, 50, 16, generator=generator))
    tokens = Segment(*torch.randn(2, ROWS, 2, MOST, 16, generator=generator))
    forest = Forest(ROWS, [Node(Span(0, 0, 30), 0, ROWS), Node(Span(0, 30, 1), 1, 1, 1)])
    ranks = [rank(number) for number in range(RANKS)]
    tables, layers = [], []
    for parallel in ranks:
        here = parallel.stored(forest, {})
        tables.append(DividedStepTables(parallel, ROWS, [0], here, CPU, OwnNodes(used=True)))
        own = Segment._make(part[:, parallel.shard.stored_tokens(0, 50)] for part in nodes)
        room = Segment._make(torch.full((ROWS, 2, MOST // RANKS + BLOCK, 16), torch.nan) for _ in range(2))
        layers.append(Stored(own, room))
    scoring, shorter = Scoring(0.25, sinks=torch.randn(4, generator=generator)), torch.arange(ROWS) * ragged * 3
    for before in range(MOST - 1):
        lengths = (before - shorter).clamp_min(0)
        given = SuffixLengths(before, lengths.int() if ragged else None, int(lengths.min()))
        query = torch.randn(ROWS, 4, 1, 16, generator=generator)
        new = [part[torch.arange(ROWS), :, lengths][:, :, None] for part in tokens]
        buffers.clear()
        for parallel, table, layer in zip(ranks, tables, layers, strict=True):
            table.follow(parallel.stored(forest, {}), given, {0: layer})
            table.attend(0, query, *new, scoring)
        found = merged(torch.stack([buffer.flat for buffer in buffers]), query.shape)
        kv = ForestKV(forest, {0: nodes}, tokens, (lengths + 1).tolist())
        out, lse = reference.forest_attention(query, kv, 0.25, sinks=scoring.sinks)
        torch.testing.assert_close(found.out, out.float(), atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found.lse, lse.float(), atol=2e-6, rtol=2e-6)
    assert all(len(table.forest.nodes) > 2 for table in tables)  # own nodes among them
