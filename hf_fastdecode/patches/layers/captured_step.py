"""A slim layer's captured step in few launches, where kernels serve its projections.

Queries and keys are one product of the layer's inputs, in fp32, and V-coordinates another, a parallel branch of the
graph. One launch rotates the queries and appends to the cache, `slim_decode` averages it, and a product with M makes
values in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...attention.partial import Partial, merge
from ...cache.captured import CapturedCache
from ...conversion.fit.cached_numbers import EIGHT_BITS
from ...errors import Unsupported
from ...instance_methods import is_linear, is_unchanged
from ...kernels.device import counters
from ...kernels.failures import Kernel, KernelFailedError, failure
from ...kernels.row_products.config import MOST_PORTABLE_ROWS, fuses_products, refusal
from .projections import KeyProjection
from .rotation import OF_SLOTS, Rotation, Tables
from .slim_attention import cache_dtype
from .slim_tokens import SlimTokens
from .suffix_kernel import averages_by_kernel, kernel_refusal

_ARRIVED = "arrival counters"
"""Name of a captured step's constant: counters of products whose width is cut into parts, of each branch."""


def step_refusal(layer: SlimTokens, inputs: Tensor) -> str | None:
    """Why a layer's captured step takes PyTorch's operators for projections; None when kernels serve them.

    Args:
        layer: The attention layer.
        inputs: ``[rows, 1, d]``.
    """
    query, keys = layer.q_proj, layer.k_proj
    if not fuses_products():
        return "fuse_projections leaves products to PyTorch's operators"
    if layer.normalizes_queries or layer.interleaved:
        return "they rotate queries by halves, without a norm"
    if not is_linear(query) or type(keys) is not KeyProjection or not is_unchanged(keys):
        return "they take plain projections, without hooks"
    if len(inputs) > MOST_PORTABLE_ROWS:
        return f"products in fp32 are of up to {MOST_PORTABLE_ROWS} rows"
    if cache_dtype(inputs.dtype, layer.layer) in EIGHT_BITS or layer.slim.from_keys.values.dtype != torch.float16:
        return "they store 16 bits, and multiply by matrices in fp16"
    for kernel in (Kernel.PRODUCT, Kernel.APPEND):
        if (reason := failure(kernel, inputs.device)) is not None:
            return reason
    return refusal(inputs, [query.weight, keys.weight], [query.bias, keys.bias])


def attend_in_few_launches(
    layer: SlimTokens, inputs: Tensor, cache: CapturedCache, rotation: Rotation | None
) -> Tensor | None:
    """Attention of one token per row; None where kernels do not serve the layer.

    Args:
        layer: The attention layer.
        inputs: ``[rows, 1, d]``.
        cache: The cache, to which the tokens are appended.
        rotation: Tables of the pass.

    Returns:
        ``[rows, 1, heads * value_dim]`` in the dtype of `inputs`.

    Raises:
        Unsupported: `slim_decode` does not take these tensors.
        ValueError: The cache holds another dtype.
    """
    if rotation is None or rotation.own_tokens is None or step_refusal(layer, inputs) is not None:
        return None
    try:
        return _attend(layer, inputs, cache, rotation, rotation.own_tokens)
    except KernelFailedError:  # from now on a reason
        return None


@lru_cache
def _branch_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream of the branch, for all captures: there is one at a time."""
    return torch.cuda.Stream(device)


@contextmanager
def _branch(device: torch.device) -> Iterator[AbstractContextManager[Any]]:
    """Context that gives another, whose launches may run beside all others; they are joined at the end, and in errors.

    Memory that is allocated in the branch is reused only there, after all earlier work of the current stream.
    """
    if device.type != "cuda":
        yield nullcontext()
        return
    current, branch = torch.cuda.current_stream(device), _branch_stream(device)
    branch.wait_stream(current)
    try:
        yield torch.cuda.stream(branch)
    finally:
        current.wait_stream(branch)


def _attend(layer: SlimTokens, inputs: Tensor, cache: CapturedCache, rotation: Rotation, own_tokens: Tables) -> Tensor:
    from ...kernels.row_products.api import row_products
    from ...kernels.slim_append.api import append_token
    from ...kernels.stored_product.api import Term, stored_product

    dtype, rows, slim = inputs.dtype, len(inputs), layer.slim
    stored_dtype = cache_dtype(dtype, layer.layer)
    arrived, beside = cache.constant(_ARRIVED, lambda: (counters(inputs.device), counters(inputs.device)))
    projections = layer.q_proj, layer.k_proj
    weights, biases = [one.weight for one in projections], [one.bias for one in projections]
    coordinates = inputs.new_empty(rows, 0, dtype=torch.float32)
    with ExitStack() as joined:
        if slim.from_inputs is not None:
            with joined.enter_context(_branch(inputs.device)):
                coordinates = stored_product([Term(*slim.from_inputs.product(inputs))], arrived=beside)
        query, keys = row_products(inputs, weights, biases, arrived, dtype=torch.float32)
    suffix = cache.suffix(layer.layer_idx, stored_dtype)
    cos, sin = (table[:, 0].contiguous() for table in own_tokens)
    heads = query.view(rows, layer.heads, layer.head_dim)
    rotated = append_token(
        heads,
        keys.view(rows, -1),
        coordinates,
        slim.key_offset,
        (cos, sin),
        cache.new.slots,
        (suffix.keys[:, 0], suffix.values[:, 0]),
    )[:, :, None]
    if reason := kernel_refusal(layer, rotated, suffix):
        raise Unsupported(reason)
    found = averages_by_kernel(layer, rotated, suffix, cache.new.lengths, cache.constants[OF_SLOTS])
    averages, of_coordinates, lse = found
    terms = [Term(*slim.from_keys.product(averages))]
    if slim.directions is not None:
        terms.append(Term(*slim.directions.product(of_coordinates)))
    in_range, has_nodes = stored_dtype == torch.float16, cache.has_nodes
    merges = has_nodes or cache.is_divided
    product_dtype = torch.float32 if merges else dtype
    out = stored_product(terms, slim.constant, in_range=in_range, arrived=arrived, dtype=product_dtype)
    if not merges:
        return out[:, None]
    merged = Partial(out.view(rows, layer.heads, 1, -1), lse[..., None])
    if has_nodes:
        to_nodes = layer.scored_query(query.to(dtype), rotation.tokens).to(dtype)
        merged = merge(merged, cache.attend_nodes(layer.layer_idx, to_nodes, layer.scaling))
    return cache.of_all_processes(merged).out.transpose(1, 2).flatten(2).to(dtype)
