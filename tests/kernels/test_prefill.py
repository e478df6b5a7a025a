"""The prefill kernel alone, interpreted: any intervals, partials and their merge, against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_fastdecode.kernels.prefill import api, reference
from hf_fastdecode.kernels.prefill.api import Config, choose_config

from .operator_runs import random


def some_intervals(tokens: int, length: int) -> Tensor:
    """Tokens in any order, some of which see no key."""
    generator = torch.Generator().manual_seed(length)
    first = torch.randint(0, length, (tokens,), generator=generator)
    last = (first + torch.randint(-4, length, (tokens,), generator=generator)).clamp_max(length - 1)
    return torch.stack([torch.randperm(tokens, generator=generator), first, last]).int()


def two_intervals(tokens: int) -> Tensor:
    """Tokens in order, each of which sees some keys of the first half, of the second, of both or none."""
    half = tokens // 2
    token, first, last = some_intervals(tokens, half)
    later = some_intervals(tokens, tokens - half)[1:] + half
    later[1, : tokens // 3] = -1  # whole tiles see none
    last[-tokens // 3 :] = -1
    return torch.stack([token.sort().values, first, last, *later])


def no_keys(query: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(query, torch.nan), query.new_full(query.shape[:2], -torch.inf)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.parametrize(("heads", "head_dim"), [((3, 1), 16), ((4, 2), 48)], ids=["h3g1-d16", "h4g2-d48"])
@pytest.mark.parametrize("soft_cap", [None, 2.0], ids=["nocap", "softcap2"])
def test_parts_merge_to_the_whole(soft_cap: float | None, heads: tuple[int, int], head_dim: int) -> None:
    """Of two contexts and the last keys, with sinks and without; of no keys, it is 0."""
    tokens, options = 23, {"scale": 0.3, "soft_cap": soft_cap}
    small: dict[str, Any] = {"config": Config(16, 16, 4, 1)}
    query, sinks = random(heads[0], tokens, head_dim, seed=0), random(heads[0], seed=0)
    mine, theirs = no_keys(query), no_keys(query.double())
    for length in (40, 7):
        context = (random(heads[1], length, head_dim, seed=1), random(heads[1], length, head_dim, seed=2))
        intervals = some_intervals(tokens, length)[:, :-5].contiguous()
        api.prefill_partial(query, *context, intervals, earlier=mine, **options, **small)
        reference.prefill_partial(query, *context, intervals, earlier=theirs, **options)
        seen = theirs[1] > -torch.inf
        torch.testing.assert_close(mine[1], theirs[1].float())
        torch.testing.assert_close(mine[0][seen], theirs[0][seen].float())
    own = (random(heads[1], tokens, head_dim, seed=3), random(heads[1], tokens, head_dim, seed=4))
    for some, (before, expected) in ((sinks, (mine, theirs)), (None, (mine, theirs)), (sinks, (None, None))):
        intervals = some_intervals(tokens, tokens)
        out = api.prefill_attention(query, *own, intervals, sinks=some, earlier=before, **options, **small)
        oracle = reference.prefill_attention(query.double(), *own, intervals, sinks=some, earlier=expected, **options)
        torch.testing.assert_close(out, oracle.float())
    for some, (before, expected) in ((sinks, (mine, theirs)), (None, (None, None))):
        pairs = two_intervals(tokens)
        lse, right = (before[1], expected[1]) if before else (query.new_empty(query.shape[:2]) for _ in range(2))
        given = {"sinks": some, **options}
        out = api.prefill_attention(query, *own, pairs, earlier=before, lse=lse, **given, **small)
        oracle = reference.prefill_attention(query.double(), *own, pairs, earlier=expected, lse=right, **given)
        torch.testing.assert_close(out, oracle.float())
        torch.testing.assert_close(lse, right.float())
    alone = api.prefill_attention(query, *own, intervals, **options, **small)
    assert not alone[:, intervals[0, intervals[1] > intervals[2]].long()].any()


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
def test_launch_parameters_fit_in_shared_memory(head_dim: int, shared_memory: int) -> None:
    assert choose_config(head_dim, shared_memory).shared_bytes(head_dim) <= shared_memory


def test_arguments_out_of_bounds_are_refused() -> None:
    query, keys, intervals = random(4, 5, 16, seed=0), random(2, 5, 16, seed=0), torch.zeros(3, 5, dtype=torch.int32)
    for match, changes in (
        ("multiple of the KV heads", {"query": query[:3]}),
        ("values must be", {"values": keys[..., :8]}),
        ("fp16, bf16 or fp32", {"query": query.double()}),
        ("keys must be", {"keys": keys.double()}),
        ("intervals must be", {"intervals": intervals.long()}),
        ("scale must be above 0", {"scale": 0.0}),
        ("sinks must be", {"sinks": torch.zeros(2)}),
        (r"earlier\[1\] must be", {"earlier": (query, query)}),
        ("lse must be", {"lse": torch.zeros(4, 6)}),
        ("contiguous in the last dimension", {"query": random(4, 16, 5, seed=0).mT}),
    ):
        given: dict[str, Any] = {"query": query, "keys": keys, "values": keys, "intervals": intervals, "scale": 1.0}
        with pytest.raises(ValueError, match=match):
            api.prefill_attention(**given | changes)
