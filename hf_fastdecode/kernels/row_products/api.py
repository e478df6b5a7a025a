"""`row_products` and `gated_product`: a few rows times weights as they lie in a model, in one launch.

A product of few rows takes as long as reading its weight. Weights of the same input are read in one launch, in which
memory is never idle, and no second launch adds up parts. Beyond `MOST_PORTABLE_ROWS` rows a kernel for Hopper GPUs
computes. Sums are in fp32, and results bitwise reproducible. There is no backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..ahead import launch
from ..device import counters, interpreted, multiprocessors, overlap_options
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

    Raises:
        ValueError: `dtype` is another than that of `inputs`, of more rows than it says.
        KernelFailedError: The kernel cannot be compiled or launched here.
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

    Raises:
        KernelFailedError: The kernel cannot be compiled or launched here.
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
    if config is None:
        choose = choose_config if rows <= MOST_PORTABLE_ROWS else choose_hopper_config
        columns = [out.shape[-1] for out in outs]
        config = choose(rows, columns, width, multiprocessors(device), gated=activation is not None)
    arrived = counters(device) if arrived is None else arrived
    if isinstance(config, HopperConfig):
        _launch_hopper(inputs.contiguous(), weights, biases, outs, arrived, config, activation)
    else:
        _launch(inputs.contiguous(), weights, biases, outs, arrived, config, activation)


def _launch(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    arrived: Tensor,
    config: Config,
    activation: Activation | None,
) -> None:
    width, device = inputs.shape[-1], inputs.device
    columns = [out.shape[-1] for out in outs]
    tiles = sum(-(-own // config.columns) for own in columns)
    partials = inputs
    if config.parts > 1:
        of_tile = config.block_rows * config.columns * (1 if activation is None else 2)
        partials = torch.empty(tiles * config.parts * of_tile, dtype=torch.float32, device=device)
    iterations = width // config.at_once
    with launching(Kernel.ROWS, device):
        launch(
            kernel,
            (tiles, config.parts),
            inputs,
            *_three(weights),
            *_three([outs[0] if bias is None else bias for bias in biases]),
            *_three(outs),
            partials,
            arrived,
            inputs.numel() // width,
            width,
            *columns,
            *[0] * (3 - len(columns)),
            config.parts,
            -(-iterations // config.parts) * config.at_once,
            GATED=activation is not None,
            ACTIVATION=0 if activation is None else activation.value,
            BIAS=biases[0] is not None,
            BLOCK_M=config.block_rows,
            BLOCK_N=config.columns,
            BLOCK_K=config.at_once,
            STAGES=config.stages if not interpreted() else 1,
            **overlap_options(device),
        )


def _launch_hopper(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    arrived: Tensor,
    config: HopperConfig,
    activation: Activation | None,
) -> None:
    width, device = inputs.shape[-1], inputs.device
    columns = [out.shape[-1] for out in outs]
    of_program = config.block_rows * BOX * (1 if activation is None else 2)
    with launching(Kernel.WIDE_ROWS, device):
        from .hopper import hopper_row_products  # needs Gluon

        launch(
            hopper_row_products,
            (config.programs,),
            _boxes(inputs.view(-1, width), config.block_rows, config.at_once),
            *_three([_boxes(weight, BOX, config.at_once) for weight in weights]),
            *_three([outs[0] if bias is None else bias for bias in biases]),
            *_three(outs),
            torch.empty(config.programs * of_program, dtype=torch.float32, device=device),
            arrived,
            inputs.numel() // width,
            width,
            *columns,
            *[0] * (3 - len(columns)),
            GATED=activation is not None,
            ACTIVATION=0 if activation is None else activation.value,
            BIAS=biases[0] is not None,
            BLOCK_M=config.block_rows,
            AT_ONCE=config.at_once,
            X_STAGES=config.x_stages,
            W_STAGES=config.w_stages,
            REGISTERS=REGISTERS,
            num_warps=4,
            maxnreg=REGISTERS,
            **overlap_options(device),
        )


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
