"""`row_products` and `gated_product`: a few rows times weights as they lie in a model, in one launch.

A product of few rows takes as long as reading its weight. Weights of the same input are read in one launch, in which
memory is never idle, and no second launch adds up parts. Beyond `MOST_PORTABLE_ROWS` rows a kernel for Hopper GPUs
computes. Sums are in fp32, and results bitwise reproducible. There is no backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..ahead import launch
from ..device import counters, multiprocessors, overlap_options
from ..failures import Kernel, launching
from ..pointwise.api import Activation
from .config import (
    BOX,
    MOST_PORTABLE_ROWS,
    REGISTERS,
    Config,
    HopperConfig,
    choose_config,
    choose_hopper_config,
)
from .kernel import row_products as kernel

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def row_products(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arrived: Tensor | None = None,
    config: Config | HopperConfig | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """`F.linear` of one input by up to `MOST_WEIGHTS` weights.

    Args:
        inputs: ``[..., width]``, up to `MOST_ROWS` rows; see `config.refusal` for what is served.
        weights: ``[columns, width]`` each.
        biases: ``[columns]`` each, or None for all.
        arrived: `counters`, which no launch uses at the same time; new ones when None.
        config: Launch parameters; those of `choose_config` or `choose_hopper_config` when None.
        dtype: Dtype of the products, that of `inputs` when None; fp32 leaves sums as they are, of up to
            `MOST_PORTABLE_ROWS` rows.

    Returns:
        ``[..., columns]`` each.
    """
    outs = [_output(inputs, len(weight), dtype) for weight in weights]
    _run(inputs, weights, biases, outs, arrived, config, None)
    return outs


def gated_product(
    inputs: Tensor,
    gate: Tensor,
    up: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: Activation,
    arrived: Tensor | None = None,
    config: Config | HopperConfig | None = None,
) -> Tensor:
    """``activation(F.linear(inputs, gate)) * F.linear(inputs, up)``, each step rounded to the dtype.

    Args:
        inputs: As of `row_products`.
        gate: ``[columns, width]``.
        up: Likewise.
        arrived: As of `row_products`.

    Returns:
        ``[..., columns]`` in the dtype of `inputs`.
    """
    out = _output(inputs, len(gate))
    _run(inputs, [gate, up], biases, [out], arrived, config, activation)
    return out


def _output(inputs: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(*inputs.shape[:-1], columns, dtype=dtype or inputs.dtype, device=inputs.device)


def _run(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    arrived: Tensor | None,
    config: Config | HopperConfig | None,
    activation: Activation | None,
) -> None:
    width, device = inputs.shape[-1], inputs.device
    rows = inputs.numel() // width
    if outs[0].dtype != inputs.dtype and (rows > MOST_PORTABLE_ROWS or isinstance(config, HopperConfig)):
        raise ValueError(
            f"row_products keeps sums in {outs[0].dtype} of up to {MOST_PORTABLE_ROWS} rows, by its portable kernel, "
            f"got {rows} rows of {inputs.dtype}; call it for parts of them, without a HopperConfig"
        )
    widths = [out.shape[-1] for out in outs]
    if config is None:
        choose = choose_config if rows <= MOST_PORTABLE_ROWS else choose_hopper_config
        config = choose(rows, widths, width, multiprocessors(device), gated=activation is not None)
    inputs, arrived = inputs.contiguous(), counters(device) if arrived is None else arrived
    parameters = *_three([outs[0] if bias is None else bias for bias in biases]), *_three(outs)
    sizes = rows, width, *widths, *[0] * (3 - len(widths))
    products = 1 if activation is None else 2  # of a tile
    options: dict[str, Any] = {"GATED": activation is not None, "BIAS": biases[0] is not None}
    options |= {"ACTIVATION": 0 if activation is None else activation.value, "BLOCK_M": config.block_rows}
    options |= overlap_options(device)
    if isinstance(config, HopperConfig):
        of_program = config.block_rows * BOX * products
        partials = torch.empty(config.programs * of_program, dtype=torch.float32, device=device)
        options |= {"AT_ONCE": config.at_once, "X_STAGES": config.x_stages, "W_STAGES": config.w_stages}
        with launching(Kernel.WIDE_ROWS, device):
            from .hopper import hopper_row_products  # needs Gluon

            boxes = _boxes(inputs.view(-1, width), config.block_rows, config.at_once)
            of_weights = _three([_boxes(weight, BOX, config.at_once) for weight in weights])
            tensors = boxes, *of_weights, *parameters, partials, arrived
            registers = {"REGISTERS": REGISTERS, "maxnreg": REGISTERS, "num_warps": 4}
            launch(hopper_row_products, (config.programs,), *tensors, *sizes, **options, **registers)
        return
    tiles, iterations = sum(-(-weight_rows // config.columns) for weight_rows in widths), width // config.at_once
    # Without parts too, where none are added up: a pointer of another type would be another variant.
    of_tiles = tiles * config.block_rows * config.columns * products if config.parts > 1 else 0
    sums = torch.empty(of_tiles * config.parts, dtype=torch.float32, device=device)
    parts = config.parts, -(-iterations // config.parts) * config.at_once
    options |= {"BLOCK_N": config.columns, "BLOCK_K": config.at_once, "STAGES": config.stages}
    with launching(Kernel.ROWS, device):
        tensors_and_sizes = inputs, *_three(weights), *parameters, sums, arrived, *sizes
        launch(kernel, (tiles, config.parts), *tensors_and_sizes, *parts, **options)


def _boxes(rows: Tensor, count: int, at_once: int) -> TensorDescriptor:
    """TMA descriptor of ``[rows, width]``, in boxes of ``[count, at_once]``."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.float16: float16, torch.bfloat16: bfloat16}[rows.dtype]
    box = [count, at_once]
    layout = NVMMASharedLayout.get_default_for(box, element)
    return TensorDescriptor(rows, list(rows.shape), [rows.shape[1], 1], box, layout)


Part = TypeVar("Part")


def _three(parts: Sequence[Part]) -> list[Part]:
    return [*parts, *[parts[0]] * (3 - len(parts))]
