"""Projections of a slim layer in a captured step: of queries, keys and V-coordinates, concurrently.

Each takes as long as reading its weights, plus some microseconds in which memory is idle, as `FusedProjections` of
ordinary layers has it. The three are one operator, which compiled code leaves as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.branches import concurrently
from .projections import KeyProjection, wide_linear
from .slim_tokens import SlimTokens
from .stored_products import Product, sum_of_products


def step_projections(layer: SlimTokens, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Projected queries of inputs ``[rows, tokens, d]``, and what `SlimTokens.to_cache` makes of them."""
    if not _are_plain(layer, inputs):
        return layer.q_proj(inputs), layer.to_cache(inputs)
    stored = layer.slim.from_inputs
    query, keys, *coordinates = torch.ops.hf_fastdecode.slim_projections(
        inputs,
        layer.q_proj.weight,
        layer.q_proj.bias,
        layer.k_proj.weight,
        layer.k_proj.bias,
        None if stored is None else stored.values,
        None if stored is None else stored.scales,
    )
    cached = keys - layer.slim.key_offset
    return query, (cached[:, None], (coordinates[0] if coordinates else cached[..., :0])[:, None])


def _are_plain(layer: SlimTokens, inputs: Tensor) -> bool:
    """Whether projections are products with their weights alone, and no gradients or autocast change them."""
    if layer.layer.plan == "x" or torch.is_grad_enabled() or torch.is_autocast_enabled(inputs.device.type):
        return False
    kinds = ((layer.q_proj, nn.Linear), (layer.k_proj, KeyProjection), (layer.slim.from_inputs, None))
    if any(kind is not None and type(module) is not kind for module, kind in kinds):
        return False
    modules = [module for module, _ in kinds if module is not None]
    return not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@torch.library.custom_op(
    "hf_fastdecode::slim_projections",
    mutates_args=(),
    schema="(Tensor inputs, Tensor query, Tensor? query_bias, Tensor key, Tensor? key_bias, Tensor? matrix, "
    "Tensor? scales) -> Tensor[]",
)
def _slim_projections(
    inputs: Tensor,
    query: Tensor,
    query_bias: Tensor | None,
    key: Tensor,
    key_bias: Tensor | None,
    matrix: Tensor | None,
    scales: Tensor | None,
) -> list[Tensor]:
    """Queries, keys in fp32, and V-coordinates in fp32 where there is a matrix that makes them."""
    tasks = [lambda: F.linear(inputs, query, query_bias), lambda: wide_linear(inputs, key, key_bias)]
    if matrix is not None and scales is not None:
        product = Product(inputs, matrix, scales)
        tasks.append(lambda: sum_of_products([product]))
    return concurrently(tasks, inputs.device)


@_slim_projections.register_fake
def _traced_slim_projections(
    inputs: Tensor,
    query: Tensor,
    query_bias: Tensor | None,
    key: Tensor,
    key_bias: Tensor | None,
    matrix: Tensor | None,
    scales: Tensor | None,
) -> list[Tensor]:
    wide = torch.promote_types(inputs.dtype, torch.float32)
    outputs = [inputs.new_empty(*inputs.shape[:-1], len(query))]
    outputs.append(inputs.new_empty(*inputs.shape[:-1], len(key), dtype=wide))
    if matrix is not None:
        outputs.append(inputs.new_empty(*inputs.shape[:-1], matrix.shape[1], dtype=wide))
    return outputs
