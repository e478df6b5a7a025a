"""Convolutions over segments of many tokens, against exact ones and PyTorch's in the same dtype."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_fastdecode.kernels.state_scans import api, reference

from ..operator_runs import DEVICE, DTYPES, assert_as_exact, random

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(("length", "taps"), [(4, 4), (3, 4), (2, 3)])
@pytest.mark.parametrize("resumed", [False, True], ids=["from-zeros", "resumed"])
@pytest.mark.parametrize("dense", [False, True], ids=["strided", "dense"])
def test_convolve(length: int, taps: int, resumed: bool, dense: bool, dtype: torch.dtype) -> None:
    """Segments of a token, of none, and around a chunk's length."""
    lengths, channels = (1, 63, 0, 65, 2, 64), 70
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    x = random(channels, sum(lengths), seed=1, dtype=dtype).T
    x = x.contiguous() if dense else x
    states = random(len(lengths), channels, length, seed=2, dtype=dtype) if resumed else None
    weight, bias = random(channels, taps, seed=3, dtype=dtype), random(channels, seed=4, dtype=dtype)
    given = x, starts, states, weight, bias if dense else None
    named = {"silu": dense, "length": length}
    out, final = api.convolve(*given, **named)
    wide = [one.double() if one is not None and one.is_floating_point() else one for one in given]
    exact, _ = reference.convolve(*wide, **named)
    stock, kept = reference.convolve(*given, **named)
    assert_as_exact(out, stock, exact)
    assert torch.equal(final, kept)


def test_refused() -> None:
    x, starts = random(3, 8, seed=1), torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"convolve takes .* got \(3, 8\), \(2,\), \(8, 5\)"):
        api.convolve(x, starts, None, x.new_zeros(8, 5), None, silu=True, length=3)
