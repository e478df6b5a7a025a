"""Reference (the specification): the operators of this folder in fp64, over whole scores."""

from __future__ import annotations

import torch
from torch import Tensor


def prefill_partial(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    intervals: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    earlier: tuple[Tensor, Tensor],
) -> None:
    """See `api.prefill_partial`."""
    tokens = intervals[0].long()
    scores, values = _scores(query, keys, values, intervals, scale, soft_cap)
    out, lse = _merged(scores, values, (earlier[0][:, tokens], earlier[1][:, tokens]))
    earlier[0][:, tokens], earlier[1][:, tokens] = out.to(earlier[0].dtype), lse.to(earlier[1].dtype)


def prefill_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    intervals: Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    earlier: tuple[Tensor, Tensor] | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """See `api.prefill_attention`."""
    tokens = intervals[0].long()
    scores, values = _scores(query, keys, values, intervals, scale, soft_cap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        values = torch.cat([values, values.new_zeros(len(values), 1, values.shape[2])], 1)
    before = None if earlier is None else (earlier[0][:, tokens], earlier[1][:, tokens])
    merged, total = _merged(scores, values, before)
    if lse is not None:
        lse[:, tokens] = total.to(lse.dtype)
    out = torch.empty_like(query)
    out[:, tokens] = merged.to(query.dtype)
    return out


def _scores(
    query: Tensor, keys: Tensor, values: Tensor, intervals: Tensor, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """Scores ``[heads, count, length]``, ``-inf`` where hidden, and values of every query head, 0 where unseen."""
    token, *bounds = intervals.long()
    group = len(query) // len(keys)
    key = torch.arange(keys.shape[1], device=query.device)
    spans = zip(bounds[::2], bounds[1::2], strict=True)
    visible = torch.stack([(key >= first[:, None]) & (key <= last[:, None]) for first, last in spans]).any(0)
    unseen = ~visible.any(0)[:, None]  # they may hold anything, and 0 * NaN is NaN
    keys, values = (part.double().masked_fill(unseen, 0.0).repeat_interleave(group, 0) for part in (keys, values))
    scores = query[:, token].double() @ keys.mT * scale
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    return scores.masked_fill(~visible, -torch.inf), values


def _merged(scores: Tensor, values: Tensor, earlier: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The partial of these scores merged with an earlier one, which is undefined where its log-sum-exp is ``-inf``."""
    lse = torch.logsumexp(scores, -1)
    if earlier is not None:
        lse = torch.logaddexp(lse, earlier[1].double())
    finite = lse.clamp_min(torch.finfo(torch.float64).min)[..., None]
    out = torch.exp(scores - finite) @ values
    if earlier is not None:
        weight = torch.exp(earlier[1].double()[..., None] - finite)
        out = out + torch.where(weight > 0, weight * earlier[0].double(), 0.0)
    return out, lse
