"""Numbers in 8 bits: there and back, and their bytes."""

from __future__ import annotations

import math
from shutil import which

import pytest
import torch
from torch import Tensor

from hf_fastdecode.conversion.fit import cached_numbers
from hf_fastdecode.conversion.fit.cached_numbers import EIGHT_BITS, load, store, stored_bytes, views


@pytest.mark.parametrize("width", [1, 16, 63, 100])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_int8_is_off_by_half_a_step(width: int, magnitude: float) -> None:
    """A group's range has 254 steps; the rounding of the scale adds a little."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1, 1000, width, generator=generator, dtype=torch.float64) * magnitude
    x[0, 0, 3] = 0
    stored = store(x, torch.int8, 16)
    back = load(stored, torch.int8, 16)
    assert stored.dtype == torch.uint8
    assert stored.shape[-1] == stored_bytes(width, torch.int8, 16)
    assert back.dtype == torch.float32
    assert not back[0, 0, 3].any()
    for one, found in zip(x.split(16, -1), back.split(16, -1)):
        bound = one.abs().amax(-1, keepdim=True) / 254 * (1 + 2**-8)
        assert ((found - one).abs() <= bound).all()


def test_fp8_is_off_by_half_a_unit_of_three_bits() -> None:
    x = torch.randn(1000, 48, generator=torch.Generator().manual_seed(1))
    back = load(store(x, torch.float8_e4m3fn, 16), torch.float8_e4m3fn, 16)
    smallest = x.unflatten(-1, (3, 16)).abs().amax(-1).repeat_interleave(16, -1) / 448 * 2**-6  # normal number
    assert ((back - x).abs() <= torch.maximum(x.abs(), smallest) * 2**-4 * (1 + 2**-8)).all()


@pytest.mark.parametrize("width", [1, 63])
def test_tokens_stand_for_themselves(width: int) -> None:
    """One token, an odd number of bytes, has in a slice of a cache what it had when it was stored."""
    x = torch.randn(2, 1, 5, width, generator=torch.Generator().manual_seed(2))
    for dtype in EIGHT_BITS:
        stored = store(x, dtype, 16)
        for part in (stored[1:, :, 3:4], store(x[1:, :, 3:4], dtype, 16)):
            assert torch.equal(load(part, dtype, 16), load(stored, dtype, 16)[1:, :, 3:4])


def test_numbers_in_half_precision_are_rounded_as_in_fp32() -> None:
    x = torch.randn(1000, 48, generator=torch.Generator().manual_seed(3))
    for half in (x.bfloat16(), x.half()):
        assert torch.equal(store(half, torch.int8, 16), store(half.float(), torch.int8, 16))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_no_number_stays_none(dtype: torch.dtype) -> None:
    x = torch.ones(1, 1, 1, 16)
    x[..., 3] = torch.nan
    assert load(store(x, dtype, 16), dtype, 16).isnan().all()
    of_gpus = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # which arithmetic here does not make
    assert cached_numbers._rounded(of_gpus).isnan().all()


@pytest.mark.parametrize("width", [1, 16, 130, 512, 1000, 1024, 4096])
def test_tokens_of_wide_groups_can_be_copied_by_16_bytes(width: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(4))
    for dtype in EIGHT_BITS:
        stored = store(x, dtype, 128)
        assert stored.shape[-1] == stored_bytes(width, dtype, 128)
        assert (stored.shape[-1] - width) % 16 == 0
        numbers, scales = views(stored, dtype, 128)
        assert (numbers.shape[-1], scales.shape[-1]) == (width, 2 * math.ceil(width / 128))
        first = load(store(x[:, :128], dtype, 128), dtype, 128)  # groups stand for themselves
        assert torch.equal(load(stored, dtype, 128)[:, :128], first)


def test_zeros_of_a_static_cache_are_zeros() -> None:
    for dtype in EIGHT_BITS:
        assert not load(torch.zeros(3, 36, dtype=torch.uint8), dtype, 16).any()


def test_no_numbers_have_no_scales() -> None:
    """V-coordinates of a cache of keys alone."""
    for dtype in EIGHT_BITS:
        stored = store(torch.empty(2, 1, 5, 0), dtype, 16)
        assert stored.shape == load(stored, dtype, 16).shape == (2, 1, 5, 0)
        assert stored_bytes(0, dtype, 16) == 0


@pytest.mark.skipif(which("g++") is None, reason="inductor compiles for the CPU with g++")
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_compiled_code_rounds_alike(dtype: torch.dtype) -> None:
    """torch.compile leaves out conversions whose result is converted back, as of the scales that are divided by."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.compile(lambda x: store(x, dtype, 32))(x), store(x, dtype, 32))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_are_stored_as_the_bytes_of_bf16(dtype: torch.dtype) -> None:
    """Kernels read them so, whatever the strides of what is stored."""
    numbers = torch.randn(7, 3, 96) * torch.logspace(-42, 36, 7)[:, None, None]
    numbers[0, 0, 0], numbers[1, 1, 40], numbers[2, 2] = math.nan, math.inf, 0
    for given in (numbers, numbers.transpose(0, 1), numbers[:, :1].transpose(1, 2).contiguous().transpose(1, 2)):
        stored = store(given, dtype, 32)
        scales = stored[..., 96:].contiguous().view(torch.bfloat16).float()
        largest = given.unflatten(-1, (3, 32)).abs().amax(-1) / cached_numbers._LARGEST[dtype]
        expected = largest.clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16).float()
        torch.testing.assert_close(scales, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_compiled_steps_store_and_load_alike(rows: int) -> None:
    """torch 2.11 gave scales strides that no view as bytes takes."""
    weight = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        product = (x @ weight)[:, None]
        return product, load(store(product, torch.int8, 64), torch.int8, 64)

    x = torch.randn(rows, 1, 256, device="cuda", dtype=torch.bfloat16)
    product, loaded = torch.compile(step, fullgraph=True, dynamic=False)(x)
    assert torch.equal(loaded, load(store(product, torch.int8, 64), torch.int8, 64))  # products may round otherwise
