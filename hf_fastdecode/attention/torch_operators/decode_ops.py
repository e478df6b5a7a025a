"""Forest attention by PyTorch's fused operators that return the log-sum-exp.

A node is attended to by *dense* attention, without a mask: the queries of all its rows, and of all query heads of a KV
head, are packed as the queries of one sequence, so that the node's keys are read once (Bifurcated attention, section
4.2; Hydragen, section 3.2). Nodes of equal shape and spacing are one batched call, as are suffixes of equal length.
Only keys at the edge of a window, the causal square among the queries of one step, and suffixes of unequal length
need masks.

Shared keys are never repeated over rows or heads, and fused operators read them in place. The plain path, for what
those cannot compute, casts a node to fp32 first.

Biases by distance (T5) are added to the scores by PyTorch's products, as no fused operator adds them with a
log-sum-exp; nodes are read once for all of their rows here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import Unsupported
from ..forest import Forest, Node
from ..kv import ForestKV, Partial, Segment, merge
from .operators import DenseAttention, biases_at, causal_mask, choose_operator, plain_partial, with_sinks
from .prefill_ops import Run

Segments = Sequence[Segment] | Mapping[int, Segment]


def forest_attention(
    query: Tensor,
    kv: ForestKV,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    distances: Tensor | None = None,
    backend: str = "auto",
) -> Partial:
    """Attend each row's queries to its path of nodes and its suffix, as `reference.forest_attention` specifies.

    That has the same arguments, without `distances`, see `Scoring`, and `backend`, one of `TORCH_BACKENDS`. Keys and
    values are in the query's dtype, on its device.

    Returns:
        ``out`` ``[rows, heads, queries, value_dim]`` and ``lse`` ``[rows, heads, queries]``, fp32 (fp64 for fp64).

    Raises:
        BackendError: `backend` is unknown, or a forced one cannot compute this.
        Unsupported: There are biases by distance, and fewer KV heads than query heads.
        ValueError: Query, forest and suffixes differ in the number of rows; a suffix is shorter than the number of
            queries, or longer than its storage; or a node lies outside its segment.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = kv.suffix.keys.shape[1]
    dense = DenseAttention(head_dim**-0.5 if scale is None else scale, softcap, backend, window, distances)
    if distances is not None and heads != kv_heads:
        raise Unsupported("biases by distance are for layers with as many KV heads as query heads")
    shortest, longest = kv.suffix_bounds
    if kv.forest.rows != rows or kv.suffix.keys.shape[0] != rows:
        raise ValueError(
            f"got queries of {rows} rows, a forest of {kv.forest.rows}, suffixes of {len(kv.suffix.keys)}"
        )
    if rows and not (queries if kv.seen is None else 0) <= shortest <= longest <= kv.suffix.keys.shape[2]:
        raise ValueError(
            f"suffixes must hold at least their {queries} queries' own tokens and at most their capacity of "
            f"{kv.suffix.keys.shape[2]}, got {shortest} to {longest}"
        )
    queries_per_kv_head = heads // kv_heads * queries
    packed = query.reshape(rows, kv_heads, queries_per_kv_head, head_dim)
    positions = None if window is None and distances is None else _positions(kv, queries, queries_per_kv_head)
    in_suffix = None if positions is None else _relative_to_starts(positions, kv.forest.context_lengths)
    parts = [_suffix_partial(packed, queries, kv, (shortest, longest), dense, in_suffix)]
    for starts, batches in zip(kv.forest.starts, kv.forest.batches, strict=True):
        in_level = None if positions is None else _relative_to_starts(positions, starts)
        parts.append(_level_partial(packed, batches, kv.segments, dense, in_level))
    merged = _per_head(merge(*parts), heads, queries)
    return merged if sinks is None else with_sinks(merged, sinks[:, None])


def nodes_attention(
    query: Tensor, forest: Forest, segments: Segments, scale: float, *, softcap: float | None = None, backend: str
) -> Partial:
    """Attend each row's queries ``[rows, heads, queries, head_dim]`` to its path of nodes alone, with no causal rule.

    The forest has at least one node. Returns as `forest_attention`; the empty partial for rows without nodes.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = segments[forest.nodes[0].span.segment].keys.shape[0]
    dense = DenseAttention(scale, softcap, backend)
    packed = query.reshape(rows, kv_heads, heads // kv_heads * queries, head_dim)
    levels = [_level_partial(packed, batches, segments, dense, None) for batches in forest.batches]
    return _per_head(merge(*levels), heads, queries)


def _per_head(packed: Partial, heads: int, queries: int) -> Partial:
    """Partials of packed queries, ``[rows, kv_heads, queries_per_kv_head]``, as ``[rows, heads, queries]``."""
    out, lse = packed
    return Partial(out.reshape(len(out), heads, queries, out.shape[-1]), lse.reshape(len(lse), heads, queries))


def _positions(kv: ForestKV, queries: int, queries_per_kv_head: int) -> Tensor:
    """Position of each packed query in its row, ``[rows, queries_per_kv_head]`` int64.

    They are on the CPU, because they decide which keys are read.
    """
    host: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}
    ends = torch.tensor(kv.forest.context_lengths, **host) + torch.tensor(kv.lengths(), **host)
    return ends[:, None] - queries + torch.arange(queries, **host).repeat(queries_per_kv_head // queries)


def _relative_to_starts(positions: Tensor, starts: Sequence[int]) -> Tensor:
    """Positions counted from where the node or suffix of each row starts instead of from the row's first token."""
    return positions - torch.tensor(starts, dtype=torch.long, device="cpu")[:, None]


def _level_partial(
    packed: Tensor,
    batches: Sequence[tuple[Node, ...]],
    segments: Segments,
    dense: DenseAttention,
    positions: Tensor | None,
) -> Partial:
    """Attention of all rows over the nodes of one depth; the empty partial for rows without one."""
    outs, lses, row = [], [], 0
    for batch in batches:
        rows = slice(batch[0].row_start, batch[-1].row_stop)
        part = _nodes_partial(packed[rows], batch, segments, dense, None if positions is None else positions[rows])
        if gap := batch[0].row_start - row:
            outs.append(part.out.new_zeros(gap, *part.out.shape[1:]))
            lses.append(part.lse.new_full((gap, *part.lse.shape[1:]), -torch.inf))
        outs.append(part.out)
        lses.append(part.lse)
        row = rows.stop
    if gap := packed.shape[0] - row:
        outs.append(outs[0].new_zeros(gap, *outs[0].shape[1:]))
        lses.append(lses[0].new_full((gap, *lses[0].shape[1:]), -torch.inf))
    return Partial(torch.cat(outs), torch.cat(lses)) if len(outs) > 1 else Partial(outs[0], lses[0])


def _nodes_partial(
    packed: Tensor, nodes: tuple[Node, ...], segments: Segments, dense: DenseAttention, positions: Tensor | None
) -> Partial:
    """Attention of ``[rows, kv_heads, queries_per_kv_head, head_dim]`` over the rows' alike nodes, each read once."""
    keys, values = as_batch(segments[nodes[0].span.segment], nodes)
    rows, kv_heads, queries_per_kv_head, _ = packed.shape
    count, rows_per_node = len(nodes), rows // len(nodes)
    # Pack the queries of a node's rows as one sequence.
    side_by_side = (
        packed.view(count, rows_per_node, kv_heads, queries_per_kv_head, -1)
        .transpose(1, 2)
        .reshape(count, kv_heads, -1, packed.shape[-1])
    )
    positions = None if positions is None else positions.view(count, rows_per_node * queries_per_kv_head)
    out, lse = dense.partial_at(side_by_side, keys, values, positions)
    return Partial(
        out.view(count, kv_heads, rows_per_node, queries_per_kv_head, -1)
        .transpose(1, 2)
        .reshape(rows, kv_heads, queries_per_kv_head, -1),
        lse.reshape(count, kv_heads, rows_per_node, queries_per_kv_head)
        .transpose(1, 2)
        .reshape(rows, kv_heads, queries_per_kv_head),
    )


def as_batch(segment: Segment, nodes: Sequence[Node]) -> Segment:
    """Alike nodes of ``[kv_heads, tokens, head_dim]`` as one view ``[nodes, kv_heads, length, head_dim]``."""
    first, last = nodes[0].span, nodes[-1].span
    if last.start + last.length > segment.keys.shape[1]:
        raise ValueError(f"{last} lies outside its segment of {segment.keys.shape[1]} tokens")
    spacing = nodes[1].span.start - first.start if len(nodes) > 1 else 0
    parts = []
    for stored in segment:
        strides, (heads, _, head_dim) = stored.stride(), stored.shape
        shape, start = (len(nodes), heads, first.length, head_dim), stored.storage_offset() + first.start * strides[1]
        parts.append(stored.as_strided(shape, (spacing * strides[1], *strides), start))
    return Segment(*parts)


def _suffix_partial(
    packed: Tensor,
    queries: int,
    kv: ForestKV,
    bounds: tuple[int, int],
    dense: DenseAttention,
    positions: Tensor | None,
) -> Partial:
    """Attention of each row over its own suffix, causal among its last `queries` tokens.

    `bounds` are the shortest and the longest suffix.
    """
    shortest, longest = bounds
    keys, values = kv.suffix.keys[:, :, :longest], kv.suffix.values[:, :, :longest]
    if longest == shortest and queries == 1 and kv.seen is None:  # of a step, which need not make `seen` on the CPU
        return dense.partial_at(packed, keys, values, positions)
    seen = kv.seen_by(queries)
    if longest == shortest and (not seen.numel() or int(seen.min()) == longest):
        return dense.partial_at(packed, keys, values, positions)
    earlier = None
    if longest == shortest:
        # Only the queries' own tokens need a causal mask, on a small square.
        old = max(0, longest - queries)
        earlier = dense.partial_at(packed, keys[:, :, :old], values[:, :, :old], positions)
        positions = None if positions is None else positions - old
        keys, values, seen = keys[:, :, old:], values[:, :, old:], seen - old
    else:
        dense.raise_if_forced("suffixes of unequal length")
    # [rows, queries_per_kv_head]
    seen = seen.to(packed.device).repeat(1, packed.shape[2] // queries)
    token = torch.arange(keys.shape[2], device=packed.device)
    visible = token < seen[..., None]
    if dense.window is not None and positions is not None:
        visible &= token > positions.to(packed.device)[..., None] - dense.window
    # Values past a row's length are undefined, and 0 * NaN is NaN.
    values = values.masked_fill(~visible.any(1)[:, None, :, None], 0.0)
    options: dict[str, Any] = {"softcap": dense.softcap, "bias": dense.bias(positions, keys)}
    own = plain_partial(packed, keys, values, dense.scale, visible=visible[:, None], **options)
    return own if earlier is None else merge(own, earlier)


def describe(query: Tensor, kv: ForestKV, *, softcap: float | None = None, backend: str = "auto") -> str:
    """One line for reports: the operator of each part of `forest_attention` with these arguments."""
    rows, heads, queries, _ = query.shape
    queries_per_kv_head = heads // kv.suffix.keys.shape[1] * queries
    shortest, longest = kv.suffix_bounds

    def operator(packed: int, keys: Tensor, values: Tensor) -> str:
        if softcap is not None:
            return "plain (soft cap)"
        alike = query.new_empty(1, 1, packed, query.shape[-1]).requires_grad_(query.requires_grad)
        return choose_operator(backend, alike, keys, values)

    parts = []
    for depth, level in enumerate(kv.forest.levels):
        names = sorted({operator(node.row_count * queries_per_kv_head, *kv.node(node.span)) for node in level})
        tokens = sum(node.span.length for node in level)
        parts.append(f"{len(level)} node(s) of {tokens} tokens at depth {depth} by {'/'.join(names)}")
    own = [part[:, :, :longest] for part in kv.suffix]
    suffix = operator(queries_per_kv_head, *own) if shortest == longest else "plain (unequal lengths)"
    parts.append(f"{rows} suffixes by {suffix}")
    return ", ".join(parts) + ", merged by log-sum-exp"


class AlikeInputs(NamedTuple):
    """Inputs of one length, each read by as many neighbouring rows: ``[inputs, kv_heads, tokens, head_dim]``."""

    rows: slice
    stored: Segment

    @classmethod
    def of(cls, segment: Segment, nodes: Sequence[Node]) -> AlikeInputs:
        """The inputs of neighbouring nodes of a segment."""
        rows = slice(nodes[0].row_start, nodes[-1].row_stop)
        return cls(rows, as_batch(segment, nodes))


def attend_alike(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of ``[rows, heads, queries, head_dim]`` to alike inputs; returns ``[rows, queries, heads, head_dim]``.

    All queries of an input are those of one sequence, which reads it once. Nothing is merged, so that no log-sum-exp
    is needed.
    """
    rows, heads, queries, head_dim = query.shape
    inputs, kv_heads = keys.shape[:2]
    per_kv_head = heads // kv_heads
    packed = query.reshape(inputs, rows // inputs, kv_heads, per_kv_head * queries, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(packed.flatten(2, 3), keys, values, scale=scale)
    width = values.shape[-1]
    by_head = out.reshape(inputs, kv_heads, rows // inputs, per_kv_head, queries, width)
    return by_head.permute(0, 2, 4, 1, 3, 5).reshape(rows, queries, heads, width)


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
