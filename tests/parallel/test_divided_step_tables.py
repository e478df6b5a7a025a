"""Kernel tables of what each rank stores: suffixes that grow into own nodes, of unequal lengths."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Scoring, Segment, SuffixLengths
from hf_fastdecode.attention.launch import own_nodes
from hf_fastdecode.attention.launch.own_nodes import OwnNodes
from hf_fastdecode.parallel import sequence
from hf_fastdecode.parallel.collectives import PartialBuffer, merged
from hf_fastdecode.parallel.sequence import DividedStepTables, SequenceParallel

pytest.importorskip("triton")
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
    monkeypatch.setattr("hf_fastdecode.parallel.sequence.SUFFIX_BLOCK", BLOCK)
    monkeypatch.setattr(own_nodes, "STEP", 8)
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
        own = Segment._make(part[:, parallel.shard.places(0, 50)] for part in nodes)
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
