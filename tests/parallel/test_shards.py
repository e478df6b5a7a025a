"""Contexts divided between ranks: every token is stored once, evenly, and read as one span per node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.parallel.shards import SUFFIX_BLOCK, Shard, order_after_gather, stored_forest

from ..attention.forests import PROPERTY, random_forest, tokens

RANKS = st.integers(1, 9)
BLOCKS = st.sampled_from([1, 1, 2, 5, SUFFIX_BLOCK])


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    rows, depth = draw(st.integers(1, 7)), draw(st.integers(0, 4))
    return random_forest(draw(st.randoms(use_true_random=False)), rows, depth, draw(st.sampled_from([3, 20, 200])))


def stored(forest: Forest, shards: Sequence[Shard]) -> list[Forest]:
    """What each rank stores of a forest whose segments are dealt out alike."""
    return [stored_forest(forest, lambda _, shard=shard: shard) for shard in shards]


@PROPERTY
@given(forest=forests(), ranks=RANKS, block=BLOCKS, run=st.sampled_from([None, 1, 7, 130]))
def test_ranks_store_every_token_of_a_path_once(forest, ranks, block, run):
    longest = max((node.span.stop for node in forest.nodes), default=0)
    if run is not None:  # a segment made of suffixes, of one of which each span is
        forest = Forest.from_paths([tuple(one for span in path for one in cut(span, run)) for path in forest.paths])
    shards = [Shard(rank, ranks, block, run) for rank in range(ranks)]
    places = [shard.stored_tokens(0, longest).tolist() for shard in shards]  # from a rank's storage to the whole run
    local = stored(forest, shards)
    for row, path in enumerate(forest.paths):
        found = [
            (segment, places[rank][position])
            for rank, one in enumerate(local)
            for segment, position in tokens(one.paths[row])
        ]
        assert sorted(found) == sorted(tokens(path))
    assert {one.rows for one in local} == {forest.rows}
    assert sum(one.stored_tokens for one in local) == forest.stored_tokens


def cut(span: Span, run: int) -> Iterator[Span]:
    """The span in parts of one suffix each."""
    start = span.start
    while start < span.stop:
        stop = min(span.stop, (start // run + 1) * run)
        yield Span(span.segment, start, stop - start)
        start = stop


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
        assert shard.stored_tokens(first, first + second).tolist() == owned
        assert after.length == len(owned)


@PROPERTY
@given(
    start=st.integers(0, 300), length=st.integers(0, 300), ranks=RANKS, block=BLOCKS, run=st.sampled_from([None, 90])
)
def test_the_whole_is_what_ranks_have_in_order(start, length, ranks, block, run):
    whole = torch.randn(start + length)
    order, longest = order_after_gather(Shard(0, ranks, block, run), start, start + length)
    shards = [Shard(rank, ranks, block, run) for rank in range(ranks)]
    parts = [whole[shard.stored_tokens(start, start + length)] for shard in shards]
    gathered = torch.cat([torch.nn.functional.pad(part, (0, longest - len(part))) for part in parts])
    assert torch.equal(gathered[order], whole[start:])


@PROPERTY
@given(lengths=st.lists(st.integers(0, 600), min_size=1, max_size=5), ranks=st.integers(2, 9), block=BLOCKS)
def test_suffixes_grow_where_ranks_store_them(lengths, ranks, block):
    """Of as many new tokens as a step may have, each is stored by one rank, behind what that has."""
    before, most = torch.tensor(lengths), block * (ranks - 1) + 1
    stored_by = torch.zeros(len(lengths), most, dtype=torch.long)
    for rank in range(ranks):
        shard = Shard(rank, ranks, block)
        first, stop = shard.next_stored(before)
        new = torch.arange(most)
        own = (new >= first[:, None]) & (new < stop[:, None])
        assert torch.equal(own, shard.stores(before[:, None] + new))
        assert shard.counts(before).tolist() == [shard.count(length) for length in lengths]
        for length in lengths:
            assert shard.positions(shard.count(length)).tolist() == shard.stored_tokens(0, length).tolist()
        stored_by += own
    assert bool((stored_by == 1).all())


def test_more_ranks_than_tokens():
    """Rows whose every token lies elsewhere have no node."""
    forest = Forest.from_paths([(Span(0, 0, 1), Span(0, 1, 1)), (Span(0, 0, 1), Span(0, 2, 1))])
    paths = [one.paths for one in stored(forest, [Shard(rank, 5) for rank in range(5)])]
    one = (Span(0, 0, 1),)
    assert paths == [(one, one), (one, ()), ((), one), ((), ()), ((), ())]
