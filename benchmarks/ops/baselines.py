"""Baselines in PyTorch of attention over a shared context.

- `attend_to_copies`: no sharing, each row with a copy of its whole context (plain flash decoding).
- `bifurcated`: the four einsums of Bifurcated attention, section 4.2, equations 3 and 4, with stored scores.
- `TwoCalls`: a fused call for each level of nodes and one for the suffixes, merged by their log-sum-exp: the method of
  Hydragen, sections 3.1 to 3.3, and with packed query heads or another operator a recipe that anyone can write today.

All take the suffixes with the new token in its place; writing it there is ours alone, which costs ours a little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_fastdecode.attention.kv import Segment

from .inputs import NodeBatch, OpInputs

OutAndLse = tuple[Tensor, Tensor]


def fused(query: Tensor, keys: Tensor, values: Tensor, scale: float, operator: str) -> OutAndLse:
    """PyTorch's fused attention without a mask, by the operator ``flash`` or ``cudnn``; on the CPU, by its own.

    Of queries ``[batch, heads, queries, head_dim]``, and keys and values ``[batch, kv_heads, length, head_dim]``, it
    returns the output in the query's dtype, and the log-sum-exp ``[batch, heads, queries]``, natural, fp32.
    """
    aten = torch.ops.aten
    if operator == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, False, scale=scale
        )
        return out, lse.view(out.shape[:-1])
    if query.device.type == "cuda":
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, False, scale=scale)
        return out, lse
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, 0.0, False, scale=scale)


def bifurcated(query: Tensor, context: Segment, own: Segment, scale: float) -> Tensor:
    """Bifurcated attention of one query a row (equations 3 and 4), with axes named as there: ``[b, h, 1, k]``.

    All rows share `context`, keys and values ``[g, m_c, k]``, and each has its `own`, ``[b, g, m_d, k]``. The
    equations leave out `scale`, the factor on the scores.
    """
    kv_heads, context_length = context.keys.shape[:2]
    grouped = query.unflatten(1, (kv_heads, -1)) * scale  # [b, g, p, 1, k]
    scores = torch.cat(
        [
            torch.einsum("bgpnk,gmk->bgpnm", grouped, context.keys),
            torch.einsum("bgpnk,bgmk->bgpnm", grouped, own.keys),
        ],
        dim=-1,
    )
    weights = torch.softmax(scores, -1)
    shared, rest = weights[..., :context_length], weights[..., context_length:]
    out = torch.einsum("bgpnm,gmk->bgpnk", shared, context.values)
    return (out + torch.einsum("bgpnm,bgmk->bgpnk", rest, own.values)).flatten(1, 2)


@dataclass(frozen=True)
class TwoCalls:
    """Attention over nodes and over suffixes in separate fused calls, merged."""

    operator: str  # for nodes, flash or cudnn; suffixes are flash's: cuDNN plans each length
    pack: bool  # lay the query heads of a group side by side as queries of their KV head; else the operator pairs them

    def __call__(self, query: Tensor, levels: Sequence[Sequence[NodeBatch]], own: Segment, scale: float) -> Tensor:
        """Attend one query a row: ``[rows, heads, 1, head_dim]``, as the queries.

        Each of `levels`, the nodes by depth, covers all rows; `own` are keys and values of the suffixes, each
        ``[rows, kv_heads, length, head_dim]``.
        """
        parts = [fused(query, own.keys, own.values, scale, "flash")]
        for level in levels:
            batches = [self._nodes(query[batch.row_start : batch.row_stop], batch, scale) for batch in level]
            outs, lses = zip(*batches, strict=True)
            parts.append((torch.cat(outs), torch.cat(lses)) if len(batches) > 1 else batches[0])
        return _merged(parts)

    def _nodes(self, query: Tensor, batch: NodeBatch, scale: float) -> OutAndLse:
        """Attention of the rows of alike nodes ``[rows, heads, 1, head_dim]``: the queries of a node, one sequence."""
        nodes, kv_heads = batch.keys.shape[:2]
        rows, heads, _, head_dim = query.shape
        # [nodes, rows of a node, call's heads, packed, head_dim]
        split = query.view(nodes, rows // nodes, kv_heads if self.pack else heads, -1, head_dim)
        together = split.transpose(1, 2).flatten(2, 3)  # [nodes, call's heads, queries, head_dim]
        out, lse = fused(together, batch.keys, batch.values, scale, self.operator)
        out = out.unflatten(2, split.shape[1:2] + split.shape[3:4]).transpose(1, 2)
        lse = lse.unflatten(2, split.shape[1:2] + split.shape[3:4]).transpose(1, 2)
        return out.reshape(rows, heads, 1, head_dim), lse.reshape(rows, heads, 1)


def _merged(parts: Sequence[OutAndLse]) -> Tensor:
    """Hydragen's equation 5, in as few PyTorch operations as it takes: ``exp(l) / (exp(l) + exp(k))`` is a sigmoid."""
    out, lse = parts[0]
    dtype = out.dtype
    for index, (other, other_lse) in enumerate(parts[1:], start=2):
        weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
        out = torch.lerp(out.float(), other.float(), weight)
        if index < len(parts):
            lse = torch.logaddexp(lse, other_lse)
    return out.to(dtype)


def attend_to_copies(inputs: OpInputs) -> Callable[[], Tensor]:
    """Copies each row's context (now), and returns a call that attends to them: one for each length of a context."""
    lengths = inputs.case.context_lengths
    calls = []
    for length in dict.fromkeys(lengths):
        start, count = lengths.index(length), lengths.count(length)
        if lengths[start : start + count] != [length] * count:
            raise ValueError(f"{inputs.case.name}: rows with {length} tokens of context must be neighbours")
        rows = slice(start, start + count)
        calls.append((inputs.query[rows], _copies(inputs, rows, length, 0), _copies(inputs, rows, length, 1)))
    if len(calls) == 1:
        return lambda: fused(*calls[0], inputs.scale, "flash")[0]
    return lambda: torch.cat([fused(*call, inputs.scale, "flash")[0] for call in calls])


def _copies(inputs: OpInputs, rows: slice, context: int, part: int) -> Tensor:
    """Keys (part 0) or values of neighbouring rows, ``[rows, kv_heads, context + suffix, head_dim]``."""
    own = inputs.suffix[part][rows]
    copy = own.new_empty(own.shape[0], own.shape[1], context + own.shape[2], own.shape[3])
    copy[:, :, context:] = own
    filled = [0] * len(own)
    for batch in (batch for level in inputs.levels() for batch in level):
        nodes = (batch.keys, batch.values)[part]
        each = (batch.row_stop - batch.row_start) // len(nodes)
        for index, node in enumerate(nodes):
            first = batch.row_start + index * each
            start, stop = max(first, rows.start) - rows.start, min(first + each, rows.stop) - rows.start
            if start < stop:
                at, length = filled[start], node.shape[1]
                copy[start:stop, :, at : at + length] = node
                filled[start:stop] = [at + length] * (stop - start)
    return copy
