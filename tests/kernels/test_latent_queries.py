"""Queries over latents and what is stored of a token, against PyTorch with the same roundings, and fp64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hf_fastdecode.kernels.latent_queries import reference
from hf_fastdecode.kernels.latent_queries.api import Angles, Rotation, absorb, refusal
from hf_fastdecode.kernels.pointwise.api import RotaryForm

from .operator_runs import DEVICE, PRODUCT_DTYPES, random

ROTATIONS = {
    "DeepSeek-V2": Rotation(RotaryForm.WHOLE, pairs=True, stays=True),
    "DeepSeek-V3": Rotation(RotaryForm.ROUNDED, pairs=True),
    "MiniCPM3": Rotation(RotaryForm.ROUNDED, pairs=False),
}
SIZES = [(1, 2, 16, 8, 24, 64), (17, 3, 24, 16, 16, 72), (70, 1, 32, 32, 32, 130)]
"""Rows, heads, key, rotary, value, latent."""


def tensors(sizes: tuple[int, ...], dtype: torch.dtype):
    rows, heads, key, rotary, value, latent = sizes
    query, compressed = random(rows, heads, key + rotary, seed=1, dtype=dtype), random(rows, latent + rotary, seed=2)
    weight = random(heads * (key + value), latent, seed=3, dtype=dtype) / 4
    return query, compressed.to(dtype), random(latent, seed=4, dtype=dtype), weight


def angles_of(rotation: Rotation, rows: int, rotary: int, dtype: torch.dtype) -> Angles:
    """Real and imaginary parts, as DeepSeek-V2 has them; or two halves, which differ here."""
    if rotation.stays:
        numbers = torch.polar(torch.ones(rows, rotary // 2), 9 * random(rows, rotary // 2, seed=5).float().cpu())
        return Angles(*torch.view_as_real(numbers.to(DEVICE)).unbind(-1))
    angle = 9 * random(rows, rotary, seed=5).float()
    return Angles(angle.cos().to(dtype), angle.sin().to(dtype))


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_absorb(sizes: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    """Error at most 1.1 times that of PyTorch's operators, and a rounding; most numbers are the same."""
    rotation, given = ROTATIONS[name], tensors(sizes, dtype)
    angles = angles_of(rotation, 1 if sizes[0] == 17 else sizes[0], sizes[3], dtype)
    assert refusal(*given) is None
    found, expected = (one(*given, 1e-6, angles, rotation) for one in (absorb, reference.absorb))
    wide = [one.double() for one in given]
    exact = reference.absorb(*wide, 1e-6, Angles(*(one.double() for one in angles)), rotation)
    for one, two, three in zip(found, expected, exact, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        eps = torch.finfo(dtype).eps * three.abs().max()
        assert (one - three).norm() <= 1.1 * (two - three).norm() + eps
        assert (one - three).abs().max() <= 1.1 * (two - three).abs().max() + eps
        if dtype != torch.float32:
            assert (one != two).float().mean() <= 0.01


def test_what_is_refused() -> None:
    query, compressed, factor, weight = tensors(SIZES[0], torch.float16)
    rotation, angles = ROTATIONS["MiniCPM3"], angles_of(ROTATIONS["MiniCPM3"], 1, 8, torch.float16)
    assert refusal(query, compressed, factor, weight.double()) is not None
    assert refusal(query, compressed, factor, weight[:, ::2]) is not None
    assert refusal(query.repeat(513, 1, 1), compressed, factor, weight) is not None
    with pytest.raises(ValueError, match="absorb takes contiguous query"):
        absorb(query, compressed[:, ::2], factor, weight, 1e-6, angles, rotation)
