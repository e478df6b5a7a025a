"""Limits of the kernels of row products, and their launch parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from torch import Tensor

from ..device import compute_capability, power_of_two, triton_is_installed
from ..failures import Kernel, failure
from ..limits import HALF_PRECISION, refusal_of_operands

MOST_ROWS: Final = 128
# Beyond, `hopper_row_products` computes: the other kernel, whose programs load and multiply by turns, is slower there
# than PyTorch.
MOST_PORTABLE_ROWS: Final = 32
MOST_WEIGHTS: Final = 3

_LEAST_ELEMENTS = 1 << 20  # of all weights: smaller products take as long as a launch in any case
_AT_ONCE = (128, 64)  # elements of a row per iteration
_LEAST_ITERATIONS = 4  # of a part

_fusing: ContextVar[bool] = ContextVar("hf_fastdecode_fusing_products", default=False)


@contextmanager
def fusing_products() -> Iterator[None]:
    """Context of a captured pass in which layers that attend by themselves may compute products by kernels."""
    token = _fusing.set(True)
    try:
        yield
    finally:
        _fusing.reset(token)


def fuses_products() -> bool:
    """Whether this thread is within `fusing_products`."""
    return _fusing.get()


class Config(NamedTuple):
    """Launch parameters."""

    block_rows: int  # rows of a tile, those of the input rounded up
    columns: int  # columns of a tile
    at_once: int  # elements of each row and column per iteration
    stages: int  # iterations whose loads are in flight
    parts: int  # parts of the width, each for a program


class HopperConfig(NamedTuple):
    """Launch parameters of `hopper_row_products`."""

    block_rows: int  # rows of a tile, 64 or 128
    at_once: int  # elements of each row and column per iteration, 64 or 128
    x_stages: int  # iterations whose rows are in flight, at most `w_stages`
    w_stages: int  # iterations whose weights are in flight
    programs: int  # of the launch, at most as many as there are iterations of all tiles


BOX: Final = 64  # columns of a tile of `hopper_row_products`, of each weight
REGISTERS: Final = 128  # of a thread of `hopper_row_products`: programs of a norm fit beside it, and start earlier
_STAGE_BYTES = 224 << 10


def choose_hopper_config(
    rows: int, widths: Sequence[int], width: int, multiprocessors: int, *, gated: bool
) -> HopperConfig:
    """As `choose_config`, for more than `MOST_PORTABLE_ROWS` rows."""
    block_rows = 64 if rows <= 64 else 128
    at_once = next(elements for elements in _AT_ONCE if width % elements == 0)
    x_stages = (3 if gated else 4) * 128 // at_once
    w_stages = (_STAGE_BYTES // (2 * at_once) - x_stages * block_rows) // (2 * BOX if gated else BOX)
    # Of a number with many divisors, more shares end where tiles do.
    programs = multiprocessors if gated else max(1, multiprocessors // 32 * 32)
    units = sum(-(-width_of_one // BOX) for width_of_one in widths) * (width // at_once)
    return HopperConfig(block_rows, at_once, x_stages, min(16, w_stages), min(programs, units))


def choose_config(rows: int, widths: Sequence[int], width: int, multiprocessors: int, *, gated: bool) -> Config:
    """Launch parameters, measured on an H200.

    Args:
        rows: Rows of the input.
        widths: Columns of each product, of one for a gate and what it opens.
        width: Of the input.
        multiprocessors: Of the device.
        gated: Whether each tile reads two weights.
    """
    block_rows = max(16, power_of_two(rows))
    columns = 32 if gated and block_rows > 16 else 64
    at_once = next(elements for elements in _AT_ONCE if width % elements == 0)
    tiles = sum(-(-width_of_one // columns) for width_of_one in widths)
    wanted = -(-3 * multiprocessors // (4 * tiles))
    iterations = width // at_once
    parts = max(1, min(wanted, iterations // _LEAST_ITERATIONS))
    parts = -(-iterations // -(-iterations // parts))  # none of which is empty
    return Config(block_rows, columns, at_once, 3 if gated else 4, parts)


def gains_of_many_rows(columns: Sequence[int], width: int) -> bool:
    """Whether weights of so many columns gain beyond `MOST_PORTABLE_ROWS` rows."""
    return len(columns) > 1 or columns[0] < width


def refusal(inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> str | None:
    """Why `row_products` does not serve these tensors, or would gain nothing; None when it does.

    Args:
        inputs: ``[..., width]``.
        weights: ``[columns, width]`` each.
        biases: ``[columns]`` each.
    """
    width = inputs.shape[-1]
    rows = inputs.numel() // max(1, width)
    if not 1 <= rows <= MOST_ROWS or len(weights) > MOST_WEIGHTS:
        return f"it takes up to {MOST_ROWS} rows and {MOST_WEIGHTS} weights, got {rows} and {len(weights)}"
    if rows > MOST_PORTABLE_ROWS and not gains_of_many_rows([len(weight) for weight in weights], width):
        return f"beyond {MOST_PORTABLE_ROWS} rows, single weights with as many columns as their width gain nothing"
    if width % _AT_ONCE[-1]:
        return f"it takes widths in multiples of {_AT_ONCE[-1]}, got {width}"
    reason = refusal_of_operands(inputs, *weights, *(bias for bias in biases if bias is not None))
    return reason or _refusal_of_layout(inputs, weights, biases, rows) or _refusal_here(inputs, weights, rows)


def _refusal_of_layout(
    inputs: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: int
) -> str | None:
    width = inputs.shape[-1]
    if any(weight.dim() != 2 or weight.shape[1] != width or not weight.is_contiguous() for weight in weights):
        return "it takes contiguous weights [columns, width]"
    if rows > MOST_PORTABLE_ROWS and any(part.data_ptr() % 16 for part in (inputs, *weights)):
        return f"beyond {MOST_PORTABLE_ROWS} rows, it takes tensors that begin at multiples of 16 bytes"
    given = [(weight, bias) for weight, bias in zip(weights, biases, strict=True) if bias is not None]
    if len(given) not in (0, len(weights)):
        return "it takes a bias for each weight or for none"
    if any(bias.shape != weight.shape[:1] or not bias.is_contiguous() for weight, bias in given):
        return "it takes contiguous biases [columns]"
    return None


def _refusal_here(inputs: Tensor, weights: Sequence[Tensor], rows: int) -> str | None:
    """Why the kernel does not run on this device, in this dtype, or would gain nothing; None when it does."""
    device = inputs.device
    if not triton_is_installed() or inputs.dtype not in HALF_PRECISION or device.type != "cuda":
        return "it runs on CUDA devices in half precision"
    if compute_capability(device)[0] != 9:
        return "it was measured on Hopper GPUs only"
    if sum(weight.numel() for weight in weights) < _LEAST_ELEMENTS:
        return f"weights of fewer than {_LEAST_ELEMENTS} elements gain nothing"
    return failure(Kernel.ROWS if rows <= MOST_PORTABLE_ROWS else Kernel.WIDE_ROWS, device)
