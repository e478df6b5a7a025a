"""Prefill attention by PyTorch's operators: runs of tokens over their contexts and, causally, over themselves.

Many runs are concatenated in one forward pass. Runs of one length attend to themselves as one batch, and the queries
of all runs that share a context are packed, so that it is read once, as in a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..partial import Partial, merge
from .operators import DenseScores, dense_partial, plain_partial, with_sinks

_WINDOWED_QUERIES = 512
"""Queries of a windowed prefill per call, over the keys that any of them sees."""

Place = slice | Tensor
"""Indices of tokens in a forward pass."""


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence.

    Attributes:
        length: Number of tokens, at least 1.
        context: Names of the stored contexts before them, in order.
    """

    length: int
    context: tuple[Hashable, ...] = ()


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    runs: Sequence[Run],
    stored: Callable[[Hashable], tuple[Tensor, Tensor]],
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of each run of tokens over its context and, causally, over itself.

    Args:
        query: ``[heads, tokens, head_dim]``, all runs concatenated.
        keys: ``[kv_heads, tokens, head_dim]``.
        values: ``[kv_heads, tokens, head_dim]``.
        scale: Factor on the scores.
        runs: At least one; their lengths add up to ``tokens``.
        stored: Keys and values of a context by its name, each ``[kv_heads, length, head_dim]``.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        window: When given, a query sees only so many tokens, of which it is itself the last; else all before it.
        sinks: ``[heads]``: when given, the score of one more key per query head, with value 0.
        backend: One of `BACKENDS`.

    Returns:
        ``[heads, tokens, head_dim]`` in the query's dtype.
    """
    scores = DenseScores(scale, softcap, backend)
    if window is not None:
        longest = max(_tokens_before(run, stored) + run.length for run in runs)
        if longest > window:
            return _windowed_runs(query, keys, values, runs, stored, window, sinks, scores)
    heads, tokens, _ = query.shape
    kv_heads = keys.shape[0]
    grouped = query.reshape(kv_heads, heads // kv_heads, tokens, -1)
    starts = list(accumulate((run.length for run in runs), initial=0))
    fused = softcap is None and sinks is None and backend == "auto" and not any(run.context for run in runs)
    attend = _fused_causal if fused else _causal_partial
    parts = [
        (place, attend(grouped[:, :, place].unflatten(2, shape), keys[:, place], values[:, place], scores))
        for place, shape in _by_length(runs, starts, query.device)
    ]
    own = _put_together(parts, tokens)
    behind: dict[Hashable, list[int]] = {}  # the runs after each named context
    for index, run in enumerate(runs):
        for name in run.context:
            behind.setdefault(name, []).append(index)
    for name, indices in behind.items():
        own = _with_context(own, grouped, _place_of(indices, starts, query.device), stored(name), scores)
    if sinks is not None:
        own = with_sinks(own, sinks.view(kv_heads, -1, 1))
    return own.out.to(query.dtype).reshape(heads, tokens, -1)


def _tokens_before(run: Run, stored: Callable[[Hashable], tuple[Tensor, Tensor]]) -> int:
    return sum(stored(name)[0].shape[1] for name in run.context)


def _by_length(
    runs: Sequence[Run], starts: Sequence[int], device: torch.device
) -> list[tuple[Place, tuple[int, int]]]:
    """Place, count and length of the runs of each length."""
    alike: dict[int, list[int]] = {}
    for index, run in enumerate(runs):
        alike.setdefault(run.length, []).append(index)
    return [(_place_of(found, starts, device), (len(found), length)) for length, found in alike.items()]


def _place_of(indices: Sequence[int], starts: Sequence[int], device: torch.device) -> Place:
    """Token indices of some runs, in order; a slice where they are adjacent."""
    if all(after == before + 1 for before, after in pairwise(indices)):
        return slice(starts[indices[0]], starts[indices[-1] + 1])
    places = [torch.arange(starts[index], starts[index + 1], device="cpu") for index in indices]
    return torch.cat(places).to(device)


def _fused_causal(query: Tensor, keys: Tensor, values: Tensor, scores: DenseScores) -> Partial:
    """`_causal_partial` without the log-sum-exp, where nothing is merged."""
    kv_heads, group, count, length, _ = query.shape
    keys, values = (part.unflatten(1, (count, length)).transpose(0, 1) for part in (keys, values))
    out = F.scaled_dot_product_attention(
        query.flatten(0, 1).transpose(0, 1), keys, values, is_causal=True, scale=scores.scale, enable_gqa=group > 1
    )
    out = out.transpose(0, 1).unflatten(0, (kv_heads, group)).flatten(2, 3)
    return Partial(out, out.new_empty(()).expand(out.shape[:-1]))


def _causal_partial(query: Tensor, keys: Tensor, values: Tensor, scores: DenseScores) -> Partial:
    """Causal attention of runs of one length, each over itself.

    Args:
        query: ``[kv_heads, group, runs, length, head_dim]``.
        keys: ``[kv_heads, runs * length, head_dim]``.
        values: The same.
        scores: Score options and backend.

    Returns:
        ``[kv_heads, group, runs * length]``.
    """
    _, group, count, length, _ = query.shape
    keys, values = (part.unflatten(1, (count, length)) for part in (keys, values))
    if scores.softcap is not None:
        scores.need_plain("a soft cap")
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        keys_and_values = keys[:, None], values[:, None]
        part = plain_partial(query, *keys_and_values, scores.scale, visible=visible, softcap=scores.softcap)
    elif count == 1:
        # The query heads of a group become the batch: their keys are one stride-0 view, not a copy.
        one = query[:, :, 0].transpose(0, 1)
        keys, values = (own[:, 0].expand(group, -1, -1, -1) for own in (keys, values))
        part = dense_partial(one, keys, values, scores.scale, causal=True, backend=scores.backend)
        part = Partial(part.out.transpose(0, 1)[:, :, None], part.lse.transpose(0, 1)[:, :, None])
    else:
        # The runs become the batch, for one query head of each group at a time.
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        heads = [
            dense_partial(
                query[:, head].transpose(0, 1), keys, values, scores.scale, causal=True, backend=scores.backend
            )
            for head in range(group)
        ]
        part = Partial(
            torch.stack([head.out.transpose(0, 1) for head in heads], 1),
            torch.stack([head.lse.transpose(0, 1) for head in heads], 1),
        )
    return Partial(part.out.flatten(2, 3), part.lse.flatten(2, 3))


def _put_together(parts: Sequence[tuple[Place, Partial]], tokens: int) -> Partial:
    """Join the partials of all tokens: ``[kv_heads, group, tokens]``."""
    (_, first), *others = parts
    if not others:
        return first
    kv_heads, group, _, head_dim = first.out.shape
    out = first.out.new_empty(kv_heads, group, tokens, head_dim)
    lse = first.lse.new_empty(kv_heads, group, tokens)
    for place, part in parts:
        out[:, :, place], lse[:, :, place] = part.out, part.lse
    return Partial(out, lse)


def _with_context(
    own: Partial, grouped: Tensor, place: Place, context: tuple[Tensor, Tensor], scores: DenseScores
) -> Partial:
    """Merge the attention of some tokens over their common context into `own`."""
    keys, values = context
    some = grouped[:, :, place]  # [kv_heads, group, some tokens, head_dim]
    part = scores.partial(some.flatten(1, 2)[None], keys[None], values[None])
    part = Partial(part.out.reshape(*some.shape[:3], -1), part.lse.reshape(some.shape[:3]))
    if some.shape[2] == grouped.shape[2]:
        return merge(own, part)
    merged = merge(Partial(own.out[:, :, place], own.lse[:, :, place]), part)
    own.out[:, :, place], own.lse[:, :, place] = merged.out, merged.lse
    return own


def _windowed_runs(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    runs: Sequence[Run],
    stored: Callable[[Hashable], tuple[Tensor, Tensor]],
    window: int,
    sinks: Tensor | None,
    scores: DenseScores,
) -> Tensor:
    """Attention of runs under a window that hides tokens from at least one of them: one run at a time."""
    outs, start = [], 0
    for run in runs:
        place = slice(start, start + run.length)
        start = place.stop
        parts = [*(stored(name) for name in run.context), (keys[:, place], values[:, place])]
        outs.append(_windowed_causal_attention(query[:, place], parts, window, sinks, scores))
    return torch.cat(outs, 1)


def _windowed_causal_attention(
    query: Tensor, parts: Sequence[tuple[Tensor, Tensor]], window: int, sinks: Tensor | None, scores: DenseScores
) -> Tensor:
    """Windowed causal attention of ``[heads, length, head_dim]``, the last tokens of `parts`.

    Blocks of queries: keys that no query of a block sees are left out, and a mask hides the rest.
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
    """Tokens ``first .. stop - 1`` of the concatenated `parts`; a view where one part holds them all."""
    keys, values = [], []
    start = 0
    for part_keys, part_values in parts:
        own = slice(max(0, first - start), max(0, stop - start))
        if own.start < min(own.stop, part_keys.shape[1]):
            keys.append(part_keys[:, own])
            values.append(part_values[:, own])
        start += part_keys.shape[1]
    return (torch.cat(keys, 1), torch.cat(values, 1)) if len(keys) > 1 else (keys[0], values[0])
