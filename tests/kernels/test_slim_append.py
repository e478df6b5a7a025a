"""One token per row appended to a slim cache, and its query rotated, against PyTorch's operators."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_fastdecode.conversion.fit.attention import rotate
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels import slim_append as api
from hf_fastdecode.kernels.failures import Kernel, KernelFailedError
from hf_fastdecode.kernels.slim_append import append_token

from .operator_runs import DEVICE, DTYPES, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "rotary", "rank", "own_tables"),
    [(1, 4, 64, 64, 0, False), (3, 9, 80, 32, 72, True), (2, 17, 128, 128, 1032, False)],
)
def test_append_token(
    rows: int, heads: int, head_dim: int, rotary: int, rank: int, own_tables: bool, dtype: torch.dtype
) -> None:
    """Only the rows' slots are written, in caches with strides of their own."""
    columns = heads * head_dim
    query, offset = random(rows, heads, head_dim, seed=1), random(columns, seed=2)
    keys, coordinates = random(rows, columns, seed=3), random(rows, rank, seed=4)
    cos, sin = (random(rows if own_tables else 1, rotary, seed=seed) for seed in (5, 6))
    slots = torch.tensor([4, 0, 6][:rows], device=DEVICE)
    caches = [torch.full((rows, 7, width + 8), torch.nan, dtype=dtype, device=DEVICE) for width in (columns, rank)]
    stored = caches[0][..., :columns], caches[1][..., :rank]
    found = append_token(query, keys, coordinates, offset, (cos, sin), slots, stored)
    tables = cos[:, None], sin[:, None]
    expected = rotate(query[:, :, None].double(), tuple(table.double() for table in tables), interleaved=False)
    torch.testing.assert_close(found, expected[:, :, 0].float())
    every = torch.arange(rows, device=DEVICE)
    for cache, width, part in zip(caches, (columns, rank), (keys - offset, coordinates), strict=True):
        assert torch.equal(cache[every, slots, :width], part.to(dtype))
        cache[every, slots, :width] = torch.nan
        assert cache.isnan().all()


def small(query: torch.Tensor, table: torch.Tensor) -> tuple:
    """Arguments for two rows of two heads of 16 elements, without V-coordinates."""
    keys, stored = torch.zeros(2, 32, device=DEVICE), torch.zeros(2, 1, 32, device=DEVICE)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    return query, keys, keys[:, :0].contiguous(), keys[0], (table, table), slots, (stored, stored[..., :0])


def test_query_in_half_precision() -> None:
    """It is rotated in fp32."""
    query, table = random(2, 2, 16, seed=1, dtype=torch.half), random(1, 16, seed=2)
    expected = rotate(query[:, :, None].float(), (table, table), interleaved=False)
    torch.testing.assert_close(append_token(*small(query, table)), expected[:, :, 0])


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"append_token takes contiguous tensors of one token per row.*\(3, 16\)"):
        append_token(*small(random(2, 2, 16, seed=1), random(3, 16, seed=2)))


def test_a_failure_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and activations keep their kernels."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(api, "launch", fail)
    query = random(2, 2, 16, seed=1)
    with pytest.raises(KernelFailedError, match="the kernel that appends to slim caches cannot run on"):
        append_token(*small(query, random(1, 16, seed=2)))
    assert list(failures._failures) == [(Kernel.APPEND, query.device)]
