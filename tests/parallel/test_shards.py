"""Contexts divided between ranks: every token is stored once, evenly, and read as one span per node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.parallel.shards import SUFFIX_BLOCK, Shard, whole

from ..attention.exactness import PROPERTY
from ..attention.forests import random_forest, tokens

RANKS = st.integers(1, 9)
BLOCKS = st.sampled_from([1, 1, 2, 5, SUFFIX_BLOCK])


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    rows, depth = draw(st.integers(1, 7)), draw(st.integers(0, 4))
    return random_forest(draw(st.randoms(use_true_random=False)), rows, depth, draw(st.sampled_from([3, 20, 200])))


@PROPERTY
@given(forest=forests(), ranks=RANKS, block=BLOCKS)
def test_ranks_store_every_token_of_a_path_once(forest, ranks, block):
    longest = max((node.span.stop for node in forest.nodes), default=0)
    shards = [Shard(rank, ranks, block) for rank in range(ranks)]
    places = [shard.places(0, longest).tolist() for shard in shards]  # from a rank's storage to the whole run
    local = [shard.forest(forest) for shard in shards]
    for row, path in enumerate(forest.paths):
        stored = [
            (segment, places[rank][position])
            for rank, found in enumerate(local)
            for segment, position in tokens(found.paths[row])
        ]
        assert sorted(stored) == sorted(tokens(path))
    assert {found.rows for found in local} == {forest.rows}
    assert sum(found.stored_tokens for found in local) == forest.stored_tokens


@PROPERTY
@given(start=st.integers(0, 500), length=st.integers(0, 500), ranks=RANKS)
def test_nodes_are_divided_to_the_token(start, length, ranks):
    parts = [Shard(rank, ranks).span(Span(0, start, length)).length for rank in range(ranks)]
    assert sum(parts) == length
    assert max(parts) - min(parts) <= 1


@PROPERTY
@given(first=st.integers(0, 300), second=st.integers(0, 300), ranks=RANKS, block=BLOCKS)
def test_what_is_appended_goes_behind_what_a_rank_has(first, second, ranks, block):
    for rank in range(ranks):
        shard = Shard(rank, ranks, block)
        before, after = shard.span(Span(0, 0, first)), shard.span(Span(0, first, second))
        assert (before.start, before.stop, after.stop) == (0, after.start, shard.count(first + second))
        owned = [token for token in range(first, first + second) if token // block % ranks == rank]
        assert shard.places(first, first + second).tolist() == owned
        assert after.length == len(owned)


@PROPERTY
@given(length=st.integers(0, 300), ranks=RANKS, block=BLOCKS)
def test_the_whole_is_what_ranks_have_in_order(length, ranks, block):
    run = torch.randn(2, length, 3)
    parts = [run[:, Shard(rank, ranks, block).places(0, length)] for rank in range(ranks)]
    assert torch.equal(whole(parts, block, dim=1), run)


def test_parts_of_no_run_are_refused():
    with pytest.raises(ValueError, match=r"of 4 tokens in blocks of 1 the ranks store \[2, 2\], got \[1, 3\]"):
        whole([torch.zeros(1), torch.zeros(3)])
    with pytest.raises(ValueError, match=r"a rank must be in 0\.\.1, got 2"):
        Shard(2, 2)
    with pytest.raises(ValueError, match="at least 1 token"):
        Shard(0, 2, 0)


def test_more_ranks_than_tokens():
    """Rows whose every token lies elsewhere have no node."""
    forest = Forest.from_paths([(Span(0, 0, 1), Span(0, 1, 1)), (Span(0, 0, 1), Span(0, 2, 1))])
    paths = [Shard(rank, 5).forest(forest).paths for rank in range(5)]
    one = (Span(0, 0, 1),)
    assert paths == [(one, one), (one, ()), ((), one), ((), ()), ((), ())]
