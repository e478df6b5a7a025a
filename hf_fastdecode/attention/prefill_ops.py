"""Prefill attention with PyTorch's own operators: a run of tokens over itself and over what lies before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .partial import Partial, merge
from .torch_ops import ForestScores, dense_partial, plain_partial, with_sinks

_WINDOWED_QUERIES = 512
"""Queries of a windowed prefill that attend at once, to the keys that any of them sees."""


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    context: Sequence[tuple[Tensor, Tensor]],
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Prefill: attention of a run of tokens over what lies before it and, causally, over itself.

    Args:
        query: ``[heads, length, head_dim]``.
        keys: ``[kv_heads, length, head_dim]``.
        values: ``[kv_heads, length, head_dim]``.
        scale: Factor on the scores.
        context: Keys and values before the run, each ``[kv_heads, tokens, head_dim]``, in the order of their tokens.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        window: When given, a query sees only so many tokens, of which it is itself the last; else all before it.
        sinks: ``[heads]``: when given, the score of one more key for each query head, whose value is 0.
        backend: One of `BACKENDS`.

    Returns:
        ``[heads, length, head_dim]`` in the query's dtype.
    """
    heads, length, _ = query.shape
    kv_heads = keys.shape[0]
    if window is not None and sum(part[0].shape[1] for part in context) + length > window:
        scores = ForestScores(scale, softcap, backend)
        return _windowed_causal_attention(query, [*context, (keys, values)], window, sinks, scores)
    if not context and softcap is None and sinks is None and backend == "auto":
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )[0]
    scores = ForestScores(scale, softcap, backend)
    grouped = query.reshape(kv_heads, heads // kv_heads, length, -1)
    if softcap is None:
        # The query heads of a group become the batch: their keys are one stride-0 view, not a copy.
        one, group = grouped.transpose(0, 1), heads // kv_heads
        each = keys.expand(group, -1, -1, -1), values.expand(group, -1, -1, -1)
        own = dense_partial(one, *each, scale, causal=True, backend=backend)
        own = Partial(own.out.transpose(0, 1), own.lse.transpose(0, 1))
    else:
        scores.need_plain("a soft cap")
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        own = plain_partial(grouped, keys[:, None], values[:, None], scale, visible=visible, softcap=softcap)
    packed = grouped.reshape(1, kv_heads, -1, grouped.shape[-1])
    for earlier_keys, earlier_values in context:
        part = scores.partial(packed, earlier_keys[None], earlier_values[None])
        own = merge(own, Partial(part.out.view(own.out.shape), part.lse.reshape(own.lse.shape)))
    if sinks is not None:
        own = with_sinks(own, sinks.view(kv_heads, -1, 1))
    return own.out.to(query.dtype).reshape(heads, length, -1)


def _windowed_causal_attention(
    query: Tensor, parts: Sequence[tuple[Tensor, Tensor]], window: int, sinks: Tensor | None, scores: ForestScores
) -> Tensor:
    """Attention of ``[heads, length, head_dim]``, the last tokens of `parts`, each to the last `window` up to itself.

    Some queries at a time: what all of them do not see is left out, for the rest there is a mask.
    """
    heads, length, head_dim = query.shape
    kv_heads = parts[0][0].shape[0]
    before = sum(keys.shape[1] for keys, _ in parts) - length
    grouped = query.reshape(kv_heads, heads // kv_heads, length, head_dim)
    scores.need_plain("a sliding window in prefill")
    outs = []
    for start in range(0, length, _WINDOWED_QUERIES):
        some = grouped[:, :, start : start + _WINDOWED_QUERIES]
        stop = start + some.shape[2]
        first = max(0, before + start - window + 1)
        keys, values = _between(parts, first, before + stop)  # [kv_heads, tokens, head_dim]
        age = torch.arange(before + start, before + stop, device=query.device)[:, None]
        age = age - torch.arange(first, before + stop, device=query.device)
        visible = (age >= 0) & (age < window)
        if scores.softcap is None and sinks is None and scores.backend == "auto":
            # The query heads of a group become the batch: their keys are one stride-0 view, not a copy.
            all_keys, all_values = (part.expand(heads // kv_heads, -1, -1, -1) for part in (keys, values))
            out = F.scaled_dot_product_attention(
                some.transpose(0, 1), all_keys, all_values, visible, scale=scores.scale
            ).transpose(0, 1)
        else:
            part = plain_partial(
                some, keys[:, None], values[:, None], scores.scale, visible=visible, softcap=scores.softcap
            )
            part = part if sinks is None else with_sinks(part, sinks.view(kv_heads, -1, 1))
            out = part.out.to(query.dtype)
        outs.append(out)
    return torch.cat(outs, dim=2).reshape(heads, length, -1)


def _between(parts: Sequence[tuple[Tensor, Tensor]], first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Tokens ``first .. stop - 1`` of what `parts` hold end to end; a view where one part holds them all."""
    keys, values = [], []
    start = 0
    for part_keys, part_values in parts:
        own = slice(max(0, first - start), max(0, stop - start))
        if own.start < min(own.stop, part_keys.shape[1]):
            keys.append(part_keys[:, own])
            values.append(part_values[:, own])
        start += part_keys.shape[1]
    return (torch.cat(keys, 1), torch.cat(values, 1)) if len(keys) > 1 else (keys[0], values[0])
