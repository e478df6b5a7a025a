"""Values from averaged keys, against each token's values in fp64, with TF32 as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_fastdecode.patches.values.slim_values import SlimValues, in_two_parts, of_two_parts
from hf_fastdecode.patches.values.wide_products import StoredMatrix

from .slim_models import relative


def tf32(x: Tensor) -> Tensor:
    """Rounded to 11 bits, as TF32's products take their factors."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def random_values() -> SlimValues:
    generator = torch.Generator().manual_seed(0)
    values = SlimValues(48, 48, 48, 4, torch.float16)
    for name, buffer in values.named_buffers():
        if "scales" in name:
            buffer.copy_(torch.exp2(torch.randint(-3, 9, buffer.shape, generator=generator)))
        else:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return values


def test_averages_of_keys_give_averages_of_values() -> None:
    values, generator = random_values(), torch.Generator().manual_seed(1)
    keys = torch.randn(2, 1, 30, 48, generator=generator).half()
    coordinates = torch.randn(2, 1, 30, 4, generator=generator).half()
    probabilities = torch.randn(2, 4, 3, 30, generator=generator, dtype=torch.float64).softmax(-1)
    per_token = values.per_token(keys.double(), coordinates.double())
    assert per_token.dtype == torch.float64
    expected = probabilities @ per_token.unflatten(-1, (4, 12)).transpose(1, 2)
    exact = values.averaged(probabilities, keys.double(), coordinates.double())
    assert relative(exact, expected) < torch.finfo(torch.float32).eps
    found = values.averaged(probabilities.float(), keys, coordinates)
    assert relative(found, expected) < 48 * torch.finfo(torch.float32).eps  # of a product of 48 terms


def test_averages_in_two_parts_withstand_tf32() -> None:
    """Whole they would be rounded to 11 bits, as coarsely as cached keys."""
    generator = torch.Generator().manual_seed(2)
    matrix = StoredMatrix(48, 48, torch.float16)
    matrix.values.copy_(torch.randn(48, 48, generator=generator))
    average = torch.randn(2, 4, 3, 48, generator=generator) * 100
    oracle = matrix(average.double(), 4)
    whole = relative(matrix(tf32(average), 4), oracle)
    parts = of_two_parts(matrix(tf32(in_two_parts(average)), 4))
    assert relative(parts, oracle) < 2 * torch.finfo(torch.float32).eps * 48**0.5 < whole / 10


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_small_averages_in_two_parts(size: float) -> None:
    """What rounding leaves of them is below fp16's normal numbers, unless it is scaled."""
    x = size * torch.randn(2, 4, 3, 48, generator=torch.Generator().manual_seed(3))
    assert relative(of_two_parts(in_two_parts(x).float()), x) < 2.0**-20


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [None, 4])
@torch.no_grad()
def test_products_of_halves_keep_their_accumulators(heads: int | None) -> None:
    generator = torch.Generator().manual_seed(4)
    matrix = StoredMatrix(256, 128, torch.float16)
    matrix.values.copy_(torch.randn(256, 128, generator=generator))
    matrix.scales.copy_(torch.exp2(torch.randint(-3, 9, (128,), generator=generator)))
    x = torch.randn(2, 4, 3, 256, generator=generator).half()
    found, oracle = matrix.cuda()(x.cuda(), heads), matrix.cpu()(x.double(), heads)
    assert found.dtype == torch.float32
    assert relative(found.cpu(), oracle) < 256**0.5 * torch.finfo(torch.float32).eps
