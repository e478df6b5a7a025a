"""The kernel that merges partials of several ranks, against the same sums in fp64."""

from __future__ import annotations

import pytest
import torch

from hf_fastdecode.parallel.collectives import merged

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.ranks import merge_ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (3, 5, 2, 48), (2, 7, 1, 100)])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_partials_merge_to_those_of_fp64(ranks: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(ranks)
    width, queries = shape[-1], torch.Size(shape[:-1]).numel()
    out = torch.randn(ranks, queries, width, generator=generator)
    lse = torch.randn(ranks, queries, generator=generator) * 30
    lse[-1] = -torch.inf  # an empty shard, whose out is 0
    lse[:, 0] = -torch.inf  # a row without a key anywhere
    out[lse == -torch.inf] = 0
    given = torch.cat([out.flatten(1), lse], 1).to(DEVICE)
    found, found_lse = torch.empty(shape, device=DEVICE), torch.empty(shape[:-1], device=DEVICE)
    merge_ranks(given, found, found_lse)
    expected = merged(given.double().cpu(), shape)
    assert not bool(found.isnan().any())
    torch.testing.assert_close(found.cpu().double(), expected.out, rtol=0, atol=1e-6)
    torch.testing.assert_close(found_lse.cpu().double(), expected.lse, rtol=1e-6, atol=1e-6)
    assert bool((found_lse.flatten()[0] == -torch.inf) & (found.flatten(0, -2)[0] == 0).all())


@pytest.mark.gpu
def test_buffers_of_more_than_31_bits() -> None:
    ranks, queries, width = 5, 1 << 22, 128
    given = torch.zeros(ranks, queries * (width + 1), device=DEVICE)
    given[:-1, queries * width :] = -torch.inf
    given[-1, : queries * width] = 3.0
    found, lse = (
        torch.full((queries, width), torch.nan, device=DEVICE),
        torch.full((queries,), torch.nan, device=DEVICE),
    )
    merge_ranks(given, found, lse)
    assert bool((found == 3.0).all() & (lse == 0.0).all())
    del given, found, lse
    torch.cuda.empty_cache()  # 13 GB


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="4 queries of 8 numbers give 36 a rank, got 35"):
        merge_ranks(torch.zeros(2, 35), torch.zeros(4, 8), torch.zeros(4))
