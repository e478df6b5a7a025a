"""Products of few rows with stored matrices, against fp64."""

import contextlib
from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_fastdecode.kernels.stored_product import MOST_ROWS, ProductConfig, Term, choose_config, stored_product

from ..cases import exhaustive_but
from .operator_runs import DEVICE, random

GROUPS, COLUMNS = 3, 72
"""Columns of a group end within a tile of 32."""


def make_term(rows: int, width: int, dtype: torch.dtype, seed: int) -> Term:
    columns = GROUPS * COLUMNS
    factor = random(rows, GROUPS, width, seed=seed)
    powers = torch.exp2(random(columns, seed=seed + 1).round())
    return Term((100 * factor).to(dtype), random(width, columns, seed=seed + 2, dtype=torch.half), powers)


def oracle(terms: list[Term], constant: Tensor) -> Tensor:
    total = constant.double()
    for factor, matrix, scales in terms:
        by_group = (matrix.double() * scales).unflatten(1, (GROUPS, -1))
        total = total + torch.einsum("rgk,kgc->rgc", factor.double(), by_group).flatten(1)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parts", exhaustive_but([1, 3], [1, 2, 3, 16]))
def test_widths_divided_among_programs(parts: int, dtype: torch.dtype) -> None:
    """In parts that end within a tile, that have nothing of the second factor, or nothing at all."""
    terms = [make_term(5, width, dtype, seed=width) for width in (300, 40)]
    constant = random(GROUPS * COLUMNS, seed=1)
    exact = oracle(terms, constant)
    for in_range in (False, True):
        found = stored_product(terms, constant, ProductConfig(32, 32, parts=parts), in_range=in_range)
        assert found.shape == exact.shape
        assert (found - exact).norm() < 340**0.5 * torch.finfo(torch.float32).eps * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_of_any_size(parts: int, dtype: torch.dtype) -> None:
    """Far from fp16's range, and with one number far above the others: where a row ends, or in the second factor."""
    terms = [make_term(5, width, dtype, seed=width) for width in (300, 40)]
    sizes = torch.tensor([1e-30, 1e-4, 0.0, 1.0, 1e25], device=DEVICE)[:, None, None]
    for term, largest in zip(terms, (299, 39), strict=True):
        term.factor[..., largest] *= 1e6
        term.factor.mul_(sizes)
    found = stored_product(terms, None, ProductConfig(32, 32, parts=parts))
    exact = oracle(terms, torch.zeros(GROUPS * COLUMNS, device=DEVICE))
    assert not found[2].any()
    error, bound = (found - exact).norm(dim=1), 340**0.5 * torch.finfo(torch.float32).eps * exact.norm(dim=1)
    assert (error <= bound).all()


def test_refused() -> None:
    terms = [make_term(5, width, torch.float32, seed=width) for width in (64, 32, 40)]
    for wrong, reason in (
        (terms, "takes 1 to 2 terms, got 3"),
        ([], "takes 1 to 2 terms, got 0"),
        ([make_term(MOST_ROWS + 1, 64, torch.float32, seed=1)], f"at most {MOST_ROWS} rows, got {MOST_ROWS + 1}"),
        ([terms[0], make_term(4, 32, torch.float32, seed=1)], r"factors \[5, 3, width\].*got \(4, 3, 32\)"),
        ([terms[0]._replace(matrix=terms[1].matrix)], r"got \(5, 3, 64\), \(32, 216\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            stored_product(wrong)


def test_arrival_counters_are_enough() -> None:
    """Programs beyond them would count behind their end."""
    terms, config = [make_term(2, 256, torch.float32, seed=1)], ProductConfig(64, 64, parts=2)
    for count, refused in ((5, True), (6, False)):
        arrived = torch.zeros(count, dtype=torch.int32, device=terms[0].factor.device)
        with pytest.raises(ValueError, match=r"in 2 parts needs 6 .* got 5") if refused else contextlib.nullcontext():
            stored_product(terms, config=config, arrived=arrived)


@pytest.mark.parametrize("part", range(3))
def test_strided_operands(part: int) -> None:
    """Inputs of a row may be a transposed view, as those of an encoder that begins with convolutions."""
    term = make_term(5, 300, torch.float32, seed=1)
    strided = term[part].mT.contiguous().mT if part < 2 else torch.stack([term.scales, term.scales + 1], 1)[:, 0]
    assert strided.stride(-1) != 1
    found = stored_product([Term(*(strided if index == part else operand for index, operand in enumerate(term)))])
    assert torch.equal(found, stored_product([term]))


def test_widths_are_divided_where_columns_make_few_programs() -> None:
    assert choose_config(1, 1, 4096, 512, 2, 200_000).parts == 16  # V-coordinates of an input
    assert choose_config(1, 32, 4096, 4096, 4, 200_000).parts == 4  # values of averages
    assert choose_config(1, 128, 16384, 16384, 4, 200_000).parts == 1
    for rows, groups, width in product((1, MOST_ROWS), (1, 12), (16, 768, 8192)):
        config = choose_config(rows, groups, width, groups * 64, 4, 50_000)
        assert config.parts >= 1
        assert config.parts == 1 or config.parts * config.width <= width
