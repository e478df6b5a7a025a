"""Reference (the specification): attention over a forest in fp64, one row at a time.

`torch_operators.decode_ops` computes the same by a function of the same name and arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kv import ForestKV


def forest_attention(
    query: Tensor,
    kv: ForestKV,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each row's queries to its path of nodes and its suffix, in fp64.

    Query ``j`` of ``queries`` stands at the suffix position ``suffix_length - queries + j``: it sees all nodes on its
    row's path, and its suffix up to and including that position; or as much of it as ``kv.seen`` says.

    Args:
        query: ``[rows, heads, queries, head_dim]``; query head ``i`` uses KV head ``i // (heads / kv_heads)``.
        kv: Keys and values, any dtype.
        scale: Factor on the scores; ``head_dim ** -0.5`` when None.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        window: When given, a query sees only the last ``window`` tokens up to and including its own.
        sinks: ``[heads]``: when given, the score of one more key per query head, with value 0.

    Returns:
        ``out`` ``[rows, heads, queries, value_dim]`` and ``lse`` ``[rows, heads, queries]``, both fp64.
    """
    rows, heads, queries, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    suffix_lengths = kv.lengths()
    outs, lses = [], []
    for row in range(rows):
        own = suffix_lengths[row]
        parts = [kv.node(span) for span in kv.forest.paths[row]]
        keys = torch.cat([part.keys for part in parts] + [kv.suffix.keys[row, :, :own]], dim=1).double()
        values = torch.cat([part.values for part in parts] + [kv.suffix.values[row, :, :own]], dim=1).double()
        heads_per_kv_head = heads // keys.shape[0]
        every_key = keys.repeat_interleave(heads_per_kv_head, 0)
        scores = query[row].double() @ every_key.mT * scale  # [heads, queries, context + own]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        context = keys.shape[1] - own
        last_seen = context + kv.seen_by(queries)[row].to(query.device) - 1
        position = torch.arange(keys.shape[1], device=query.device)
        hidden = position > last_seen[:, None]
        if window is not None:
            hidden = hidden | (position <= last_seen[:, None] - window)
        scores = scores.masked_fill(hidden, -torch.inf)
        sees_nothing = hidden.all(-1, keepdim=True) if sinks is None else torch.zeros_like(hidden[:, :1])
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], dim=-1)
            values = torch.cat([values, values.new_zeros(values.shape[0], 1, values.shape[2])], dim=1)
        weights = torch.softmax(scores, -1).masked_fill(sees_nothing, 0.0)  # where that is 0 / 0
        outs.append(weights @ values.repeat_interleave(heads_per_kv_head, 0))
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outs), torch.stack(lses)
