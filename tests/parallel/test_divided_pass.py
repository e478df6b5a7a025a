"""What each rank computes of a prefill pass: all tokens once, alike much work, and together the attention of one."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from torch import Tensor

from hf_fastdecode.attention.forest import Span
from hf_fastdecode.attention.kv import Segment
from hf_fastdecode.attention.torch_operators.prefill_ops import PackedRuns, Run, causal_attention
from hf_fastdecode.parallel.shards import GatheredContexts, InPass, cut_runs, tokens_of_rank

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
CONTEXT = "before"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [0, 5, 64, 101])
def test_ranks_compute_each_token_once_and_alike_many(tokens: int, ranks: int) -> None:
    places = [tokens_of_rank(tokens, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(places).tolist()) == list(range(tokens))
    assert all(bool((own.diff() > 0).all()) for own in places)
    assert max(map(len, places)) - min(map(len, places)) <= 2


def test_ranks_attend_to_alike_many_keys() -> None:
    keys = [int((tokens_of_rank(8000, rank, 4) + 1).sum()) for rank in range(4)]
    assert max(keys) - min(keys) < 0.001 * min(keys)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "runs",
    [[Run(90)], [Run(90, (CONTEXT,))], [Run(7), Run(40, (CONTEXT,)), Run(1), Run(25)]],
    ids=["one", "with-context", "several"],
)
def test_parts_are_the_attention_of_the_whole(runs: list[Run], ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(run.length for run in runs)
    query = torch.randn(KV_HEADS * GROUP, tokens, HEAD_DIM, generator=generator, dtype=torch.float64)
    whole, before = (
        tuple(torch.randn(KV_HEADS, n, HEAD_DIM, generator=generator, dtype=torch.float64) for _ in range(2))
        for n in (tokens, 30)
    )

    def stored(name: Hashable) -> tuple[Tensor, Tensor]:
        if isinstance(name, InPass):
            return whole[0][:, name.start : name.stop], whole[1][:, name.start : name.stop]
        assert name == CONTEXT
        return before

    expected = causal_attention(query, *whole, HEAD_DIM**-0.5, runs=PackedRuns(runs), stored=stored)
    for rank in range(ranks):
        own = tokens_of_rank(tokens, rank, ranks)
        parts = cut_runs(runs, own)
        keys, values = (part[:, own] for part in whole)
        found = causal_attention(query[:, own], keys, values, HEAD_DIM**-0.5, runs=PackedRuns(parts), stored=stored)
        torch.testing.assert_close(found, expected[:, own], rtol=0, atol=1e-6)


SPANS = [Span(number, 0, 1 + number) for number in range(4)]


def test_every_rank_gathers_all_in_one_order() -> None:
    orders = []
    for asked in ([], SPANS, [SPANS[2], SPANS[0], SPANS[3]], [SPANS[1], SPANS[1]]):
        gathered: list[Span] = []

        def gather(span: Span, gathered: list[Span] = gathered) -> Segment:
            gathered.append(span)
            return Segment(torch.full((1,), span.segment), torch.full((1,), span.segment))

        contexts = GatheredContexts(SPANS, set(asked), gather, gather(SPANS[0]))
        gathered.clear()
        assert [int(contexts.read(span).keys) for span in asked] == [span.segment for span in asked]
        contexts.finish()
        orders.append(gathered)
    assert orders == [SPANS] * 4
