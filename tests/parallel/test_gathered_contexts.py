"""Contexts that all ranks gather in one order, whatever each of them reads."""

from __future__ import annotations

import torch

from hf_fastdecode.attention.forest import Span
from hf_fastdecode.attention.kv import Segment
from hf_fastdecode.parallel.divided_pass import GatheredContexts

SPANS = [Span(number, 0, 1 + number) for number in range(4)]


def test_every_rank_gathers_all_in_one_order() -> None:
    orders = []
    for asked in ([], SPANS, [SPANS[2], SPANS[0], SPANS[3]], [SPANS[1], SPANS[1]]):
        gathered: list[Span] = []

        def gather(span: Span, gathered: list[Span] = gathered) -> Segment:
            gathered.append(span)
            return Segment(torch.full((1,), span.segment), torch.full((1,), span.segment))

        contexts = GatheredContexts(SPANS, set(asked), gather)
        assert [int(contexts(span).keys) for span in asked] == [span.segment for span in asked]
        contexts.finish()
        orders.append(gathered)
    assert orders == [SPANS] * 4
