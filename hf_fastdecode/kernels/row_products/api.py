"""`row_products` and `gated_product`: a few rows times weights as they lie in a model, in one launch.

A product of few rows takes as long as reading its weight. Weights of the same input are read in one launch, in which
memory is never idle, and no second launch adds up parts. Sums are in fp32, and results bitwise reproducible. There is
no backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ahead import launch
from ..failures import Kernel, launching
from ..forest_decode.limits import multiprocessors
from ..installed import interpreted
from ..pointwise.forms import Activation
from .config import Config, choose_config
from .kernel import row_products as kernel

MOST_TILES = 1024
"""Tiles whose width is cut into parts; more tiles keep every multiprocessor busy whole."""


def counters(device: torch.device) -> Tensor:
    """Arrival counters of tiles, ``[MOST_TILES]`` int32 zeros; successive launches on a stream may use the same."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def row_products(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arrived: Tensor | None = None,
    config: Config | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """`F.linear` of one input by up to `MOST_WEIGHTS` weights.

    Args:
        inputs: ``[..., width]``, up to `MOST_ROWS` rows; see `config.refusal` for what is served.
        weights: ``[columns, width]`` each.
        biases: ``[columns]`` each, or None for all.
        arrived: `counters`, which no launch uses at the same time; new ones when None.
        config: Launch parameters; those of `choose_config` when None.
        dtype: Dtype of the products, that of `inputs` when None; fp32 leaves sums as they are.

    Returns:
        ``[..., columns]`` each.

    Raises:
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    outs = [_output(inputs, len(weight), dtype) for weight in weights]
    config = config or _config(inputs, [len(weight) for weight in weights], gated=False)
    _launch(inputs, weights, biases, outs, arrived, config, None)
    return outs


def gated_product(
    inputs: Tensor,
    gate: Tensor,
    up: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    activation: Activation,
    arrived: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """``activation(F.linear(inputs, gate)) * F.linear(inputs, up)``, each step rounded to the dtype.

    Args:
        inputs: As of `row_products`.
        gate: ``[columns, width]``.
        up: Likewise.
        biases: Of both.
        activation: The function.
        arrived: As of `row_products`.
        config: Likewise.

    Returns:
        ``[..., columns]`` in the dtype of `inputs`.

    Raises:
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    out = _output(inputs, len(gate))
    config = config or _config(inputs, [len(gate)], gated=True)
    _launch(inputs, [gate, up], biases, [out], arrived, config, activation)
    return out


def _output(inputs: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(*inputs.shape[:-1], columns, dtype=dtype or inputs.dtype, device=inputs.device)


def _config(inputs: Tensor, columns: Sequence[int], *, gated: bool) -> Config:
    width = inputs.shape[-1]
    return choose_config(inputs.numel() // width, columns, width, multiprocessors(inputs.device), gated=gated)


def _launch(
    inputs: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    arrived: Tensor | None,
    config: Config,
    activation: Activation | None,
) -> None:
    inputs = inputs.contiguous()
    width, device = inputs.shape[-1], inputs.device
    columns = [out.shape[-1] for out in outs]
    tiles = sum(-(-own // config.columns) for own in columns)
    partials = inputs
    if config.parts > 1:
        arrived = counters(device) if arrived is None else arrived
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
            outs[0] if arrived is None else arrived,
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
        )


def _three(parts: Sequence[Tensor]) -> list[Tensor]:
    return [*parts, *[parts[0]] * (3 - len(parts))]
