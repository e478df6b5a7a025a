"""Attention of a slim layer over a shared-context cache.

Nodes hold rotated keys and values, as for ordinary layers; suffixes are stored slim. Both give partials, which merge
by their log-sum-exp. In a captured step, kernels read lengths and nodes on the device.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...attention.active_passes import no_autocast
from ...attention.kv import ForestKV, Scoring, Segment
from ...attention.partial import Partial, merge
from ...attention.placeholders import SlidingWindow
from ...attention.torch_operators.operators import cannot_run
from ...cache.captured import CapturedCache
from ...cache.handles import DecodeKV, PrefillKV
from ...cache.layers.attention import require_dtype
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ...kernels.failures import KernelFailedError
from .captured_step import attend_in_few_launches
from .rotation import OF_SLOTS, Rotation, Tables, takes_kernels
from .slim_attention import attention_scores, cache_dtype
from .slim_tokens import CachedTokens, SlimTokens
from .suffix_kernel import averages_by_kernel, kernel_refusal, partial_of


def shared_attention(
    layer: SlimTokens,
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    cache: SharedContextCache,
    rotation: Rotation | None,
    mask: Tensor | SlidingWindow | None,
) -> Tensor:
    """Append a pass's tokens to the cache, and attend to each row's path of nodes and suffix.

    Args:
        layer: The attention layer.
        query: ``[rows, tokens, heads * head_dim]`` as projected.
        keys: ``[rows, 1, tokens, heads * head_dim]``, or inputs, not yet rounded to the cache's dtype.
        coordinates: ``[rows, 1, tokens, r]``, likewise.
        cache: The cache.
        rotation: Tables of the pass; None without RoPE.
        mask: As the model's mask function returned it.

    Returns:
        ``[rows, tokens, heads * value_dim]`` in the query's dtype.

    Raises:
        Unsupported: A sliding window hides tokens, or a threshold skips small attention weights.
        ValueError: The cache holds another dtype or number of rows.
        BackendError: The backend ``triton`` is forced, and the kernel cannot attend to the suffixes.
    """
    check_shared(layer.config, mask)
    dtype = query.dtype
    # Prefill of nodes stores nothing slim: the layout alone is needed.
    new = slice(0 if cache.state.current.items and not cache.state.suffix_rows else None)
    with no_autocast(query.device):
        stored_dtype = cache_dtype(dtype, layer.layer)
        stored = layer.stored(keys[:, :, new], coordinates[:, :, new], stored_dtype, rotation)
        to_nodes = layer.scored_query(query, rotation and rotation.tokens).to(dtype)
        if cache.state.current.items:
            nodes = layer.keys_and_values(CachedTokens(keys, coordinates, rotation and rotation.keys), dtype)
            handle, _ = cache.update(nodes.keys, nodes.values, layer.layer_idx, suffix_parts=stored)
            return cast(PrefillKV, handle).attend(to_nodes, Scoring(layer.scaling, None, None, None)).flatten(2)
        handle, _ = cache.update(stored.keys, stored.values, layer.layer_idx)
        require_dtype(dtype, handle.layer.storage.node_example)  # suffixes may have another one
        kv = cast(DecodeKV, handle).append()
        to_suffix = layer.scored_query(query, rotation and rotation.own_tokens)
        by_kernel = _by_kernel(layer, to_suffix, kv, rotation, cache)
        merged = by_kernel or _suffix_partial(layer, to_suffix, kv, rotation and rotation.keys)
        if kv.forest.nodes:
            merged = merge(merged, handle.layer.attend_nodes(to_nodes, layer.scaling))
        merged = handle.layer.of_all_processes(merged)
    count, pytorch = f"{len(kv.forest.nodes)} node(s)", "PyTorch's operators"
    did = f"{count} and slim suffixes by {pytorch}"
    if by_kernel is not None:
        did = f"{count} by {pytorch}, slim suffixes by slim_decode"
    handle.layer.report("decode", did)
    return merged.out.transpose(1, 2).flatten(2).to(dtype)


def check_shared(config: Any, mask: object) -> None:
    """Raise Unsupported where attention to nodes and to suffixes does not merge: with a window or a threshold."""
    if isinstance(mask, SlidingWindow):
        raise Unsupported(f"slim layers do not share context where a window of {mask.size} tokens hides some")
    if threshold := config.slim_sparsity_threshold:
        raise Unsupported(f"a sparsity threshold ({threshold:g}) is for weights of nodes and suffix together")


def _by_kernel(
    layer: SlimTokens, query: Tensor, kv: ForestKV, rotation: Rotation | None, cache: SharedContextCache
) -> Partial | None:
    """Attention to the suffixes by `slim_decode`; None where it cannot run and the backend is not forced."""
    if not takes_kernels(cache.state.backend, query.device):
        return None
    reason = kernel_refusal(layer, query, kv.suffix)
    if reason is None:
        _, longest = kv.suffix_bounds
        used = Segment(*(part[:, :, :longest] for part in kv.suffix))
        lengths = torch.tensor(kv.lengths(), dtype=torch.int32, device=query.device)
        try:
            return partial_of(layer, averages_by_kernel(layer, query, used, lengths, rotation and rotation.kernel))
        except KernelFailedError as error:  # from now on a reason
            reason = str(error)
    if cache.state.backend == "triton":
        raise cannot_run("triton", reason)
    return None


def _suffix_partial(layer: SlimTokens, query: Tensor, kv: ForestKV, tables: Tables | None) -> Partial:
    """Attention of each row's queries, ``[rows, heads, queries, head_dim]``, to its suffix, causal among them."""
    shortest, longest = kv.suffix_bounds
    keys, coordinates = (part[:, :, :longest] for part in kv.suffix)
    if tables is not None:  # longer than needed, where only the device knew the lengths
        tables = tables[0][:, :longest], tables[1][:, :longest]
    seen = kv.seen_by(query.shape[2]).to(query.device)
    slot = torch.arange(longest, device=query.device)
    if shortest < longest:  # slots behind a suffix are undefined, and 0 * NaN is NaN
        lengths = torch.tensor(kv.lengths(), device=query.device)
        used = (slot < lengths[:, None])[:, None, :, None]
        keys, coordinates = keys.where(used, 0), coordinates.where(used, 0)
    tokens = layer.read(keys, coordinates, tables)
    scores = attention_scores(*layer.score_operands(query, tokens), layer.scaling)
    scores = scores.masked_fill(slot >= seen[:, None, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None]).exp()  # of a query without a token, 0
    return Partial(layer.values.averaged(weights, tokens.keys, tokens.coordinates), lse)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def captured_in_few_launches(
    layer: SlimTokens,
    inputs: Tensor,
    cache: CapturedCache,
    rotation: Rotation | None,
    mask: Tensor | SlidingWindow | None,
) -> Tensor | None:
    """`captured_attention` of a layer's inputs ``[rows, 1, d]``, where kernels serve its projections; else None."""
    check_shared(layer.config, mask)
    return attend_in_few_launches(layer, inputs, cache, rotation)


def captured_attention(
    layer: SlimTokens,
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    cache: CapturedCache,
    rotation: Rotation | None,
    mask: Tensor | SlidingWindow | None,
) -> Tensor:
    """As `shared_attention` in a captured step, of one token per row.

    Raises:
        Unsupported: As `shared_attention`; or the kernels do not take these tensors.
        ValueError: The cache holds another dtype.
    """
    check_shared(layer.config, mask)
    dtype = query.dtype
    with no_autocast(query.device):
        stored = layer.stored(keys, coordinates, cache_dtype(dtype, layer.layer), rotation)
        to_suffix = layer.scored_query(query, rotation and rotation.own_tokens)
        averages = _append_and_average(layer, cache, stored, to_suffix)
        merged = partial_of(layer, averages)
        if cache.has_nodes:
            to_nodes = layer.scored_query(query, rotation and rotation.tokens).to(dtype)
            merged = merge(merged, _attend_to_nodes(layer, cache, to_nodes))
        if cache.is_divided:
            merged = _of_all_processes(cache, merged)
    return merged.out.transpose(1, 2).flatten(2).to(dtype)


# Kernels and caches stay out of compiled code: they read and write fixed addresses, and nothing fuses with them.


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _append_and_average(
    layer: SlimTokens, cache: CapturedCache, stored: Segment, query: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    suffix = cache.append_in_place(layer.layer_idx, stored)
    if reason := kernel_refusal(layer, query, suffix):
        raise Unsupported(reason)
    # Read here rather than passed, because compiled code would be made again for each number of slots.
    tables = cache.constants[OF_SLOTS] if layer.config.rotary else None
    return averages_by_kernel(layer, query, suffix, cache.new.lengths, tables)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_to_nodes(layer: SlimTokens, cache: CapturedCache, query: Tensor) -> Partial:
    return cache.attend_nodes(layer.layer_idx, query, layer.scaling)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _of_all_processes(cache: CapturedCache, part: Partial) -> Partial:
    return cache.of_all_processes(part)
