"""Biases by distance over a forest, against products in fp64 of each row's own keys."""

from __future__ import annotations

import pytest
import torch

from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.attention.kv import ForestKV, Segment
from hf_fastdecode.attention.runs import Run
from hf_fastdecode.attention.torch_operators.decode_ops import biased_causal_attention, biased_forest_attention

HEADS, WIDTH, SCALE = 3, 8, 0.7


def random(*shape):
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
    queries, segment, biases = 2, Segment(random(HEADS, 20, WIDTH), random(HEADS, 20, WIDTH)), random(HEADS, 5)
    shared, own = Span(0, 0, 7), Span(0, 7, 4)
    forest = Forest.from_paths([(shared, own), (shared, own), (shared,), ()])
    suffix = Segment(random(4, HEADS, 9, WIDTH), random(4, HEADS, 9, WIDTH))
    query, kv = random(4, HEADS, queries, WIDTH), ForestKV(forest, [segment], suffix, lengths)
    got = biased_forest_attention(query, kv, SCALE, biases).out
    for row, path in enumerate(forest.paths):
        nodes, count = [segment.view(span) for span in path], kv.lengths()[row]
        keys, values = (
            torch.cat([*(node[part] for node in nodes), suffix[part][row, :, :count]], 1) for part in (0, 1)
        )
        torch.testing.assert_close(got[row], expected(query[row], keys, values, biases))


def test_runs_of_a_prefill():
    torch.manual_seed(0)
    query, keys, values = (random(HEADS, 10, WIDTH) for _ in range(3))
    biases = random(HEADS, 4)
    got = biased_causal_attention(query, keys, values, SCALE, biases, runs=[Run(6), Run(1), Run(3)])
    for own in (slice(0, 6), slice(6, 7), slice(7, 10)):
        torch.testing.assert_close(got[:, own], expected(query[:, own], keys[:, own], values[:, own], biases))
