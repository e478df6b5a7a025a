"""One token per row appended to a slim cache, and its query rotated, against PyTorch's operators."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_fastdecode.conversion.fit.attention import rotate
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.failures import Kernel, KernelFailedError
from hf_fastdecode.kernels.slim_append import api
from hf_fastdecode.kernels.slim_append.api import append_token

from .operator_runs import DEVICE, DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "rotary", "rank", "own_tables"),
    [(1, 4, 64, 64, 0, False), (3, 9, 80, 32, 72, True), (2, 17, 128, 128, 1032, False)],
)
def test_append_token(
    rows: int, heads: int, head_dim: int, rotary: int, rank: int, own_tables: bool, dtype: torch.dtype
) -> None:
    """Only the rows' slots are written, in caches with strides of their own."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    columns = heads * head_dim
    query, keys, coordinates = normal(rows, heads, head_dim), normal(rows, columns), normal(rows, rank)
    offset = normal(columns)
    cos, sin = (normal(rows if own_tables else 1, rotary) for _ in range(2))
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


def test_query_in_half_precision() -> None:
    """It is rotated in fp32."""
    query = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    keys, table = torch.zeros(2, 32, device=DEVICE), torch.randn(2, 1, 16).to(DEVICE)
    stored, slots = torch.zeros(2, 1, 32, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    tables = table[0], table[1]
    found = append_token(query, keys, keys[:, :0].contiguous(), keys[0], tables, slots, (stored, stored[..., :0]))
    expected = rotate(query[:, :, None].float(), (table[:1], table[1:]), interleaved=False)
    torch.testing.assert_close(found, expected[:, :, 0])


def test_refused() -> None:
    query, keys = torch.zeros(2, 2, 16), torch.zeros(2, 32)
    stored, slots = torch.zeros(2, 1, 32), torch.zeros(2, dtype=torch.int64)
    table = torch.zeros(3, 16)
    with pytest.raises(ValueError, match=r"append_token takes contiguous tensors of one token per row.*\(3, 16\)"):
        append_token(query, keys, keys[:, :0].contiguous(), keys[0], (table, table), slots, (stored, stored[..., :0]))


def test_a_failure_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and activations keep their kernels."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(api, "launch", fail)
    query, keys, table = torch.zeros(2, 2, 16), torch.zeros(2, 32), torch.zeros(1, 16)
    stored, slots = torch.zeros(2, 1, 32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelFailedError, match="the kernel that appends to slim caches cannot run on cpu"):
        append_token(query, keys, keys[:, :0].contiguous(), keys[0], (table, table), slots, (stored, stored[..., :0]))
    assert list(failures._failures) == [(Kernel.APPEND, query.device)]
