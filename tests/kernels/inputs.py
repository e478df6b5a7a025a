"""The device and the dtypes that tests of kernels run in, and random numbers for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Triton's interpreter cuts numbers off where bf16 rounds them.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)

DTYPES = [torch.float32, torch.float16, BF16]

PRODUCT_DTYPES = [
    torch.float16,
    BF16,
    pytest.param(torch.float32, marks=pytest.mark.skipif(DEVICE == "cuda", reason="Triton multiplies fp32 in tf32")),
]
"""Of kernels with matrix products."""


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Random numbers, the same on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
