"""Products of few rows with weights, against fp64 and PyTorch's own."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from hf_fastdecode.kernels.device import MOST_COUNTERS, counters
from hf_fastdecode.kernels.pointwise import reference
from hf_fastdecode.kernels.pointwise.api import Activation
from hf_fastdecode.kernels.row_products.api import gated_product, row_products
from hf_fastdecode.kernels.row_products.config import (
    BOX,
    MOST_PORTABLE_ROWS,
    MOST_ROWS,
    Config,
    HopperConfig,
    choose_config,
    choose_hopper_config,
    refusal,
)

from .operator_runs import DEVICE, PRODUCT_DTYPES, assert_as_exact, random

COLUMNS = (300, 64, 33)
"""Of several blocks, of one, and of one that ends early."""
WIDTH = 640


def config(rows: int, parts: int) -> Config:
    return Config(max(16, 1 << (rows - 1).bit_length()), 64, 128, 3, parts)


def hopper_config(rows: int, programs: int, at_once: int) -> HopperConfig:
    return HopperConfig(64 if rows <= 64 else 128, at_once, 2, 3, programs)


PORTABLE = [(1, 1), (3, 2), (17, 3), (32, 5)]  # rows and parts
# Rows, programs and elements at once: programs of several tiles, of parts of two and of one; 10 iterations and 5.
HOPPER = [(33, 1, 64), (64, 7, 128), (65, 20, 64), (100, 5, 128), (128, 20, 128), (50, 23, 128)]
CONFIGS = [pytest.param(how[0], config(*how), id=str(how)) for how in PORTABLE]
CONFIGS += [pytest.param(how[0], hopper_config(*how), id=f"hopper{how}", marks=pytest.mark.gpu) for how in HOPPER]


def check_products(inputs: Tensor, weights: list[Tensor], biases: list[Tensor | None], found: list[Tensor]) -> None:
    for one, weight, bias in zip(found, weights, biases, strict=True):
        exact = F.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
        assert_as_exact(one, F.linear(inputs, weight, bias), exact)


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weights", [1, 2, 3])
@pytest.mark.parametrize(("rows", "how"), CONFIGS)
def test_row_products(rows: int, how: Config | HopperConfig, weights: int, biased: bool, dtype: torch.dtype) -> None:
    """Several launches count in the same memory, which is zero again after each."""
    inputs, arrived = random(rows, 1, WIDTH, seed=1, dtype=dtype), counters(torch.device(DEVICE))
    given = [random(columns, WIDTH, seed=columns, dtype=dtype) for columns in COLUMNS[:weights]]
    biases = [random(columns, seed=columns, dtype=dtype) if biased else None for columns in COLUMNS[:weights]]
    first, second = (row_products(inputs, given, biases, arrived, how) for _ in range(2))
    assert not arrived.any()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    check_products(inputs, given, biases, first)


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "how"), CONFIGS)
def test_gated_product(
    rows: int, how: Config | HopperConfig, biased: bool, activation: Activation, dtype: torch.dtype
) -> None:
    inputs = random(rows, WIDTH, seed=1, dtype=dtype)
    weights = [random(COLUMNS[0], WIDTH, seed=seed, dtype=dtype) / 16 for seed in (2, 3)]
    biases = [random(COLUMNS[0], seed=seed, dtype=dtype) if biased else None for seed in (4, 5)]
    found = gated_product(inputs, *weights, (biases[0], biases[1]), activation, None, how)

    def computed(dtype: torch.dtype) -> Tensor:
        gate, up = (
            F.linear(inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
            for weight, bias in zip(weights, biases, strict=True)
        )
        return reference.gated(gate, up, activation)

    assert_as_exact(found, computed(dtype), computed(torch.float64))


def test_inputs_with_gaps() -> None:
    inputs = random(3, 2 * WIDTH, seed=1, dtype=torch.float16)[:, :WIDTH]
    weight = random(64, WIDTH, seed=2, dtype=torch.float16)
    check_products(inputs, [weight], [None], row_products(inputs, [weight], [None], config=config(3, 1)))


@pytest.mark.parametrize(("rows", "given"), [(MOST_PORTABLE_ROWS + 1, None), (1, HopperConfig)])
def test_sums_of_many_rows_are_not_kept_in_fp32(rows: int, given: type[HopperConfig] | None) -> None:
    """The kernel for Hopper GPUs reads weights in the dtype of its results."""
    inputs, weight = torch.ones(rows, WIDTH).half(), torch.ones(64, WIDTH).half()
    config = given and hopper_config(rows, 2, 64)
    with pytest.raises(ValueError, match=rf"up to {MOST_PORTABLE_ROWS} rows.* got {rows} rows of torch.float16"):
        row_products(inputs, [weight], [None], config=config, dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 32, 33, 64, 65, 128])
@pytest.mark.parametrize(
    ("columns", "width"),
    [
        ((4096, 4096, 4096), 4096),
        ((4096, 1024, 1024), 4096),
        ((4096,), 11008),
        ((2880,), 2880),
        ((32016,), 4096),
        ((8192, 4096, 32), 2560),
    ],
)
def test_chosen_configurations(columns: tuple[int, ...], width: int, rows: int) -> None:
    """Shapes of 7B and 8B models, and those of a width and of columns that are no multiples of 128."""
    inputs = random(rows, 1, width, seed=1, dtype=torch.bfloat16)
    weights = [random(own, width, seed=own, dtype=torch.bfloat16) / 64 for own in columns]
    biases = [random(own, seed=own, dtype=torch.bfloat16) for own in columns]
    gains = rows <= MOST_PORTABLE_ROWS or len(columns) > 1 or columns[0] < width
    assert (refusal(inputs, weights, biases) is None) == gains
    check_products(inputs, weights, biases, row_products(inputs, weights, biases))


SHAPES = list(
    product(
        (64, 896, 2880, 4096, 14336),  # width
        ((64,), (4096,), (4096, 1024, 1024), (4096,) * 3, (128256,)),  # columns
        (False, True),  # gated
    )
)


@pytest.mark.parametrize("rows", [1, 16, 17, MOST_PORTABLE_ROWS])
@pytest.mark.parametrize(("width", "columns", "gated"), SHAPES)
def test_configurations(width: int, columns: tuple[int, ...], gated: bool, rows: int) -> None:
    """Tiles hold all rows, iterations divide the width, no part is empty, and parts have something to count in."""
    chosen = choose_config(rows, columns, width, 132, gated=gated)
    assert chosen.block_rows >= max(rows, 16)
    assert width % chosen.at_once == 0
    iterations = width // chosen.at_once
    assert (chosen.parts - 1) * -(-iterations // chosen.parts) < iterations
    assert chosen.parts == 1 or sum(-(-own // chosen.columns) for own in columns) <= MOST_COUNTERS


@pytest.mark.parametrize("rows", [33, 64, 65, MOST_ROWS])
@pytest.mark.parametrize(("width", "columns", "gated"), SHAPES)
def test_hopper_configurations(width: int, columns: tuple[int, ...], gated: bool, rows: int) -> None:
    """Every program has a share, and a counter for each of its warpgroups; stages fit in shared memory."""
    chosen = choose_hopper_config(rows, columns, width, 132, gated=gated)
    assert chosen.block_rows >= rows
    assert width % chosen.at_once == 0
    tiles = sum(-(-own // BOX) for own in columns)
    assert 1 <= chosen.programs <= min(132, tiles * width // chosen.at_once)
    assert 2 * chosen.programs <= MOST_COUNTERS
    assert 2 <= chosen.x_stages <= chosen.w_stages
    stages = chosen.x_stages * chosen.block_rows + chosen.w_stages * BOX * (2 if gated else 1)
    assert 2 * chosen.at_once * stages <= 224 << 10


class Stored(Tensor):
    """As of quantized or distributed weights, whose memory is not that of their numbers."""


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_refused() -> None:
    inputs, weight = torch.ones(2, 128), torch.ones(64, 128)
    many = inputs.expand(MOST_ROWS + 1, 2, 128)
    for given, reason in (
        ((many, [weight], [None]), f"up to {MOST_ROWS} rows and 3 weights, got {2 * MOST_ROWS + 2} and 1"),
        ((inputs, [weight] * 4, [None] * 4), "and 3 weights, got 2 and 4"),
        ((inputs.expand(20, 2, 128), [torch.ones(128, 128)], [None]), "single weights with as many columns"),
        ((torch.ones(65 * 128)[1:8193].view(64, 128), [weight], [None]), "multiples of 16 bytes"),
        ((torch.ones(0, 128), [weight], [None]), "got 0 and 1"),
        ((inputs[:, :100], [weight[:, :100]], [None]), "widths in multiples of 64, got 100"),
        ((inputs, [weight.half()], [None]), "plain tensors of one dtype"),
        ((inputs, [weight], [torch.ones(64).double()]), "plain tensors of one dtype"),
        ((inputs, [weight.mT.contiguous().mT], [None]), "contiguous weights"),
        ((inputs, [weight.to_sparse_csr()], [None]), "plain tensors"),
        ((inputs, [weight.as_subclass(Stored)], [None]), "plain tensors"),
        ((inputs, [weight, weight], [None, torch.ones(64)]), "a bias for each weight or for none"),
        ((inputs, [weight], [torch.ones(1)]), "contiguous biases [columns]"),  # which PyTorch adds to every column
        ((inputs, [weight], [torch.tensor(1.0)]), "contiguous biases [columns]"),
        ((inputs, [weight], [torch.ones(1).expand(64)]), "contiguous biases [columns]"),
        ((inputs, [weight], [torch.ones(63)]), "contiguous biases [columns]"),
        ((inputs, [torch.nn.Parameter(weight)], [None]), "no gradients"),
        ((inputs, [weight], [None]), "CUDA devices in half precision"),
    ):
        assert reason in (refusal(*given) or "")
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in (refusal(inputs, [weight], [None]) or "")
        assert "CUDA devices" in (refusal(inputs.bfloat16(), [weight.bfloat16()], [None]) or "")
