"""Attention with a number added to each score by how far the key is before the query (T5), by PyTorch's products.

No fused operator adds it with a log-sum-exp. Nodes are read once for all of their rows here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import Unsupported
from ..forest import Node
from ..kv import ForestKV, Segment
from ..partial import Partial, merge
from ..runs import Run
from .operators import causal_mask, plain_partial


def biases_at(biases: Tensor, distances: Tensor) -> Tensor:
    """Biases of pairs of tokens: ``[heads, ...]``; distances, int64 ``[...]``, below 0 are of keys that are hidden."""
    return biases[:, distances.clamp(0, biases.shape[1] - 1)]


def biased_forest_attention(query: Tensor, kv: ForestKV, scale: float, biases: Tensor) -> Partial:
    """As `decode_ops.forest_attention`, with biases by distance.

    Args:
        query: ``[rows, heads, queries, head_dim]``; as many heads as keys have.
        biases: ``[heads, distances]`` fp32, the last for all tokens that are farther.
    """
    _, heads, queries, _ = query.shape
    if heads != kv.suffix.keys.shape[1]:
        raise Unsupported("biases by distance are for layers with as many KV heads as query heads")
    seen = kv.seen_by(queries)
    contexts = torch.tensor(kv.forest.context_lengths, dtype=torch.long, device="cpu")
    ends = (contexts[:, None] + seen - 1).to(query.device)  # [rows, queries]: the queries' positions in their rows
    merged = _suffix_partial(query, kv, scale, biases, seen.to(query.device))
    for starts, level in zip(kv.forest.starts, kv.forest.levels, strict=True):
        parts = Partial(torch.zeros_like(merged.out), torch.full_like(merged.lse, -torch.inf))
        for node in level:
            own = slice(node.row_start, node.row_stop)
            part = _node_partial(query[own], kv.node(node.span), node, scale, biases, ends[own] - starts[own.start])
            parts.out[own], parts.lse[own] = part
        merged = merge(merged, parts)
    return merged


def _suffix_partial(query: Tensor, kv: ForestKV, scale: float, biases: Tensor, seen: Tensor) -> Partial:
    _, longest = kv.suffix_bounds
    keys, values = (part[:, :, :longest] for part in kv.suffix)
    ages = seen[..., None] - 1 - torch.arange(longest, device=query.device)  # [rows, queries, longest]
    visible = ages >= 0
    # Values past a row's length are undefined, and 0 * NaN is NaN.
    values = values.masked_fill(~visible.any(1)[:, None, :, None], 0.0)
    bias = biases_at(biases, ages).transpose(0, 1)
    return plain_partial(query, keys, values, scale, visible=visible[:, None], bias=bias)


def _node_partial(query: Tensor, node_kv: Segment, node: Node, scale: float, biases: Tensor, ends: Tensor) -> Partial:
    """Attention of the node's rows; `ends` are their queries' positions, counted from the node's first token."""
    rows, _, queries, _ = query.shape
    ages = ends[..., None] - torch.arange(node.span.length, device=query.device)
    bias = biases_at(biases, ages).flatten(1, 2)  # [heads, rows * queries, length]
    packed = query.transpose(0, 1).flatten(1, 2)
    part = plain_partial(packed, *node_kv, scale, bias=bias)
    return Partial(
        part.out.unflatten(1, (rows, queries)).transpose(0, 1), part.lse.unflatten(1, (rows, queries)).transpose(0, 1)
    )


def biased_causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, biases: Tensor, *, runs: Sequence[Run]
) -> Tensor:
    """As `prefill_ops.causal_attention`, with biases by distance, for runs without a context.

    Args:
        query: ``[heads, tokens, head_dim]``, all runs concatenated, as keys and values are.
    """
    outs, start = [], 0
    for run in runs:
        if run.context or query.shape[0] != keys.shape[0]:
            raise Unsupported("biases by distance are for whole prompts, and layers with as many KV heads as heads")
        own = slice(start, start + run.length)
        start = own.stop
        if run.length == 1:  # which sees itself alone
            outs.append(values[:, own])
            continue
        tokens = torch.arange(run.length, device=query.device)
        bias = biases_at(biases, tokens[:, None] - tokens)
        visible = causal_mask(run.length, query.device)
        outs.append(plain_partial(query[:, own], keys[:, own], values[:, own], scale, visible=visible, bias=bias).out)
    return torch.cat(outs, 1).to(query.dtype)
