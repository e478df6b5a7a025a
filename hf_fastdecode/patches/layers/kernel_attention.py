"""Attention of slim layers by kernels: `slim_decode` averages cached keys without copies of them.

It reads the suffixes of a shared-context cache, and all tokens of transformers' caches.

Captured steps have few launches, where kernels serve the projections too. Queries and keys are one product of the
layer's inputs, in fp32, and V-coordinates another, a parallel branch of the graph. One launch rotates the queries and
appends to the cache, `slim_decode` averages it, and a product with M makes values in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, float32
from torch.utils.weak import WeakTensorKeyDictionary

from ...attention.kv import Partial, Segment, merge
from ...attention.overrides import no_autocast
from ...cache.captured import CapturedCache
from ...conversion.fit.attention import Tables
from ...conversion.fit.cached_numbers import EIGHT_BITS, views
from ...errors import Unsupported
from ...instance_methods import is_linear, is_unchanged
from ...kernels.device import counters, stream_for
from ...kernels.failures import Kernel, KernelFailedError, failure
from ...kernels.row_products.config import MOST_PORTABLE_ROWS, fuses_products
from ...kernels.row_products.config import refusal as products_refusal
from ...kernels.slim_decode.inputs import RotaryTables, Scales, refusal
from .rotation import OF_SLOTS, Rotation, takes_kernels
from .slim_attention import KeyProjection, SlimTokens, cache_dtype


def _suffix(layer: SlimTokens, stored: Segment) -> tuple[Tensor, Tensor, Scales | None]:
    """Views of cached tokens for `slim_decode`: keys, V-coordinates, and scales if it is in 8 bits."""
    keys, coordinates = (part[:, 0] for part in stored)
    dtype = cache_dtype(layer.k_proj.weight.dtype, layer.layer)
    if dtype not in EIGHT_BITS:
        return keys, coordinates, None
    (keys, of_keys), (coordinates, of_coordinates) = (
        views(part, dtype, layer.head_dim) for part in (keys, coordinates)
    )
    return keys, coordinates, Scales(of_keys, of_coordinates)


def layer_refusal(layer: SlimTokens) -> str | None:
    """Why `slim_decode` never attends to a layer's suffixes; None when it may."""
    if layer.layer.plan == "x":
        return "it reads keys, and the layer caches inputs"
    if layer.config.unrotates:
        return "it reads keys of before RoPE, and slim_rope is 'unrotate'"
    if layer.normalizes:
        return "keys are normalised when they are read"
    if layer.config.rotary and layer.interleaved:
        return "RoPE pairs neighbouring coordinates"
    return None


def kernel_refusal(layer: SlimTokens, query: Tensor, suffix: Segment) -> str | None:
    """Why `slim_decode` does not attend to suffixes with this query, as `averages_by_kernel` takes them, or None."""
    return layer_refusal(layer) or refusal(query, *_suffix(layer, suffix)[:2])


def averages_by_kernel(
    layer: SlimTokens,
    query: Tensor,
    suffix: Segment,
    lengths: Tensor,
    tables: RotaryTables | None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Average each row's suffix; `partial_of` makes values of the averages.

    Of queries ``[rows, heads, 1, head_dim]``, normalised and rotated, over suffixes as cached, ``[rows, 1, slots,
    width]`` each, which begin at `starts`, or 0, and have `lengths` tokens, ``[rows]`` int32 each on the device.
    Tables are of at least the suffixes' slots; None without RoPE.

    Returns averages of keys ``[rows, heads, e]`` and V-coordinates ``[rows, heads, r]``, and the log-sum-exp
    ``[rows, heads]``.
    """
    from ...kernels.slim_decode.api import slim_decode

    keys, coordinates, scales = _suffix(layer, suffix)
    if tables is not None:
        slots = keys.shape[1]
        tables = tables._replace(cos=tables.cos[:, :slots], sin=tables.sin[:, :slots])
    return slim_decode(
        query.float(),
        keys,
        coordinates,
        lengths,
        scale=layer.scaling,
        key_offset=layer.slim.key_offset if tables is not None else None,
        rotary=tables,
        starts=starts,
        scales=scales,
    )


def partial_of(layer: SlimTokens, averages: tuple[Tensor, Tensor, Tensor]) -> Partial:
    keys, coordinates, lse = averages
    dtype = cache_dtype(layer.k_proj.weight.dtype, layer.layer)
    out = layer.slim.of_averages(keys[:, :, None], coordinates[:, :, None], float32 if dtype in EIGHT_BITS else dtype)
    return Partial(out, lse[..., None])


class VisibleSlots(NamedTuple):
    """Slots that the query of each row sees, ``[rows]`` int32 on the device: from `starts`, or 0, up to `lengths`."""

    starts: Tensor | None
    lengths: Tensor


def cached_attention(
    layer: SlimTokens, query: Tensor, cached: Segment, rotation: Rotation | None, mask: Tensor | None
) -> Tensor | None:
    """Attention of a decode step over one of transformers' caches; None where PyTorch's operators compute it.

    They do for several queries per row, gradients, masks that hide tokens between others or add to scores, devices
    without the kernel, and code that torch.compile traces. The query is ``[rows, heads, queries, head_dim]``,
    normalised and rotated; what is cached ``[rows, 1, slots, width]`` each; the mask as `slim_attention` takes it.
    Returns ``[rows, heads, 1, head_dim]`` in fp32.
    """
    tables = None if rotation is None else rotation.kernel
    if torch.compiler.is_compiling() or not takes_kernels("auto", query.device):
        return None
    if (layer.config.rotary and tables is None) or kernel_refusal(layer, query, cached) is not None:
        return None
    rows, slots = cached.keys.shape[0], cached.keys.shape[2]
    if (visible := _visible_slots(mask, rows, slots, query.device)) is None:
        return None
    try:
        averages = averages_by_kernel(layer, query, cached, visible.lengths, tables, visible.starts)
    except KernelFailedError:  # from now on a reason
        return None
    return partial_of(layer, averages).out


_visible: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Version of each mask in use, and the `_visible_slots` in it: all layers of a pass have one mask."""


def _visible_slots(mask: Tensor | None, rows: int, slots: int, device: torch.device) -> VisibleSlots | None:
    """Slots that one query per row sees; None where a mask adds to scores, or a row sees none or with gaps."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if mask is None:
        all_slots = _all_slots.__wrapped__ if capturing else _all_slots
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return VisibleSlots(None, all_slots(rows, slots, device, stream))
    if mask.dtype != torch.bool or capturing or mask.dim() != 4 or mask.shape[1:] != (1, 1, slots):
        return None  # while a graph is captured, the host cannot look at a mask
    version = None if mask.is_inference() else mask._version  # inference tensors have none, and may be changed
    known, found = _visible.get(mask, (None, None))
    if version is None or known != version:
        found = _range_of(mask[:, 0, 0].expand(rows, -1))
        _visible[mask] = version, found
    return found


@lru_cache(maxsize=4)  # for all layers of a pass, whose stream has made it
def _all_slots(rows: int, slots: int, device: torch.device, stream: int) -> Tensor:
    return torch.full((rows,), slots, dtype=torch.int32, device=device)


def _range_of(visible: Tensor) -> VisibleSlots | None:
    """The range of True in each row ``[rows, slots]``; None where one has none or several."""
    first = visible.byte().argmax(-1)
    end = visible.shape[1] - visible.flip(-1).byte().argmax(-1)
    if not bool((visible.sum(-1) == end - first).all()):  # a row without any has all slots from first to end
        return None
    return VisibleSlots(first.int(), end.int())


_ARRIVED = "arrival counters"
"""Name of a captured step's constant: counters of products whose width is cut into parts, of each branch."""


def step_refusal(layer: SlimTokens, inputs: Tensor) -> str | None:
    """Why a captured step over inputs ``[rows, 1, d]`` projects by PyTorch's operators; None when by kernels."""
    query, keys = layer.q_proj, layer.k_proj
    if not fuses_products():
        return "fuse_projections leaves products to PyTorch's operators"
    if layer.normalizes or layer.interleaved:
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
    return products_refusal(inputs, [query.weight, keys.weight], [query.bias, keys.bias])


def attend_in_few_launches(
    layer: SlimTokens, inputs: Tensor, cache: CapturedCache, rotation: Rotation | None
) -> Tensor | None:
    """Append one token per row, inputs ``[rows, 1, d]``, and attend; None where kernels do not serve the layer.

    Returns ``[rows, 1, heads * value_dim]`` in the dtype of `inputs`. Raises Unsupported where `slim_decode` does not
    take these tensors, ValueError where the cache holds another dtype.
    """
    if rotation is None or rotation.own_tokens is None or step_refusal(layer, inputs) is not None:
        return None
    try:
        return _attend(layer, inputs, cache, rotation, rotation.own_tokens)
    except KernelFailedError:  # from now on a reason
        return None


@contextmanager
def _branch(device: torch.device) -> Iterator[AbstractContextManager[Any]]:
    """Context whose launches may run beside all others, with memory of their own; joined at its end."""
    if device.type != "cuda":
        yield nullcontext()
        return
    current, branch = torch.cuda.current_stream(device), stream_for(device, "branch of a slim layer")
    branch.wait_stream(current)
    try:
        yield torch.cuda.stream(branch)
    finally:
        current.wait_stream(branch)


def _attend(layer: SlimTokens, inputs: Tensor, cache: CapturedCache, rotation: Rotation, own_tokens: Tables) -> Tensor:
    from ...kernels.row_products.api import row_products
    from ...kernels.slim_append import append_token
    from ...kernels.stored_product import Term, stored_product

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
    in_range, merges = stored_dtype == torch.float16, cache.has_nodes or cache.division.is_divided
    product_dtype = torch.float32 if merges else dtype
    out = stored_product(terms, slim.constant, in_range=in_range, arrived=arrived, dtype=product_dtype)
    if not merges:
        return out[:, None]
    part = Partial(out.view(rows, layer.heads, 1, -1), lse[..., None])
    return _merge_with_nodes(layer, cache, part, query.to(dtype), rotation)


def captured_attention(
    layer: SlimTokens, query: Tensor, exact: tuple[Tensor, Tensor], cache: CapturedCache, rotation: Rotation | None
) -> Tensor:
    """Attention of a captured step with PyTorch's projections; arguments and errors as of `attend_in_few_launches`."""
    with no_autocast(query.device):
        stored = layer.stored(*exact, cache_dtype(query.dtype, layer.layer), rotation)
        suffix = cache.append_in_place(layer.layer_idx, stored)
        to_suffix = layer.scored_query(query, rotation and rotation.own_tokens)
        if reason := kernel_refusal(layer, to_suffix, suffix):
            raise Unsupported(reason)
        tables = cache.constants[OF_SLOTS] if layer.config.rotary else None
        part = partial_of(layer, averages_by_kernel(layer, to_suffix, suffix, cache.new.lengths, tables))
        return _merge_with_nodes(layer, cache, part, query, rotation)


def _merge_with_nodes(
    layer: SlimTokens, cache: CapturedCache, part: Partial, query: Tensor, rotation: Rotation | None
) -> Tensor:
    """Attention to suffixes and nodes, of all processes: ``[rows, 1, heads * value_dim]``."""
    if cache.has_nodes:
        to_nodes = layer.scored_query(query, rotation and rotation.tokens).to(query.dtype)
        part = merge(part, cache.attend_nodes(layer.layer_idx, to_nodes, layer.scaling))
    return cache.division.merge(part).out.transpose(1, 2).flatten(2).to(query.dtype)
