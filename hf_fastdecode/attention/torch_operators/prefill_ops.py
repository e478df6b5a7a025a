"""Prefill attention by PyTorch's operators: runs of tokens over their contexts and, causally, over themselves.

A *run* is a sequence's consecutive tokens; a pass concatenates many. Causal attention of all runs of one length is one
batched call. The queries of all runs that share a context are packed, so that the context is read once, as in a decode
step.

A prefill pass captured in a CUDA graph computes a row of fixed length that ends in padding: shapes and operators
depend on that length only, so that one capture serves every number of real tokens. Padding comes last, where causal
attention hides it from the tokens before it. Several runs in one row are separated by a bias, and stored contexts come
as a partial, both computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kv import Partial, Scoring, merge
from .operators import DenseAttention, causal_mask, plain_partial, with_sinks

Name = TypeVar("Name", bound=Hashable)

Place = slice | Tensor
"""Indices of tokens in a forward pass."""

Stored = Callable[[Hashable], tuple[Tensor, Tensor]]
"""Keys and values of a context by its name, each ``[kv_heads, length, head_dim]``."""


class Intervals(NamedTuple):
    """An interval of keys for each token of a pass, which sees these, as the prefill kernel takes them.

    Attributes:
        own: ``[3, tokens]`` int32: every token, and the first and the last of the pass's own tokens that it sees.
        contexts: Likewise by the name of a context, for the tokens that see any of its tokens.
    """

    own: Tensor
    contexts: list[tuple[Hashable, Tensor]]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence.

    Attributes:
        length: Number of tokens, at least 1.
        context: Names of the stored contexts before them, in order.
    """

    length: int
    context: tuple[Hashable, ...] = ()


class PackedRuns:
    """The runs of a forward pass, and where their tokens lie in it: the same for all layers.

    Args:
        runs: At least one, in the order of their tokens.

    Attributes:
        contexts: The names of all their contexts.
    """

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        self.contexts = list(dict.fromkeys(name for run in runs for name in run.context))
        self._starts = list(accumulate((run.length for run in runs), initial=0))
        self._by_length: dict[torch.device, list[tuple[Place, tuple[int, int]]]] = {}
        self._by_context: dict[torch.device, list[tuple[Hashable, Place]]] = {}
        self._intervals: dict[tuple[torch.device, int | None], Intervals] = {}

    def by_length(self, device: torch.device) -> list[tuple[Place, tuple[int, int]]]:
        """Place, count and length of the runs of each length."""
        if device not in self._by_length:
            alike = _grouped((run.length, index) for index, run in enumerate(self.runs))
            self._by_length[device] = [
                (self._place_of(found, device), (len(found), length)) for length, found in alike.items()
            ]
        return self._by_length[device]

    def by_context(self, device: torch.device) -> list[tuple[Hashable, Place]]:
        """Each context's name, with the positions of the runs that it comes before."""
        if device not in self._by_context:
            readers = _grouped((name, index) for index, run in enumerate(self.runs) for name in run.context)
            self._by_context[device] = [(name, self._place_of(found, device)) for name, found in readers.items()]
        return self._by_context[device]

    def outgrow(self, window: int, stored: Stored) -> bool:
        """Whether a window hides any token of a run or its context from a token of the run."""
        return any(run.length + sum(_lengths(run, stored)) > window for run in self.runs)

    def intervals(self, device: torch.device, window: int | None, stored: Stored) -> Intervals:
        """The keys that each token sees, under a window if given."""
        if (device, window) not in self._intervals:
            self._intervals[device, window] = self._make_intervals(device, window, stored)
        return self._intervals[device, window]

    def _make_intervals(self, device: torch.device, window: int | None, stored: Stored) -> Intervals:
        own, contexts = [], dict[Hashable, list[Tensor]]()
        for run, start in zip(self.runs, self._starts, strict=False):
            token = torch.arange(start, start + run.length, dtype=torch.int32, device="cpu")
            reach = run.length if window is None else window
            own.append(torch.stack([token, (token - reach + 1).clamp_min(start), token]))
            lengths = _lengths(run, stored)
            for index, (name, length) in enumerate(zip(run.context, lengths, strict=True)):
                distance = sum(lengths[index:])  # from the context's first token to the run's
                reach = distance + run.length if window is None else window
                seeing = token[: max(0, length + reach - 1 - distance)]  # the run's first tokens, or all
                first = (seeing - start + distance - reach + 1).clamp_min(0)
                contexts.setdefault(name, []).append(torch.stack([seeing, first, torch.full_like(first, length - 1)]))
        joined = {name: torch.cat(parts, 1) for name, parts in contexts.items()}
        return Intervals(
            torch.cat(own, 1).to(device), [(name, part.to(device)) for name, part in joined.items() if part.shape[1]]
        )

    def _place_of(self, indices: Sequence[int], device: torch.device) -> Place:
        """Token indices of some runs, in order; a slice where they are adjacent."""
        if all(after == before + 1 for before, after in pairwise(indices)):
            return slice(self._starts[indices[0]], self._starts[indices[-1] + 1])
        places = [torch.arange(self._starts[index], self._starts[index + 1], device="cpu") for index in indices]
        return torch.cat(places).to(device)


def _lengths(run: Run, stored: Stored) -> list[int]:
    """Tokens of each context of a run; those that know their length are not read for it."""
    known = (getattr(name, "length", None) for name in run.context)
    return [
        stored(name)[0].shape[1] if length is None else length for name, length in zip(run.context, known, strict=True)
    ]


def _grouped(pairs: Iterable[tuple[Name, int]]) -> dict[Name, list[int]]:
    found: dict[Name, list[int]] = {}
    for name, index in pairs:
        found.setdefault(name, []).append(index)
    return found


_MASKED_QUERIES = 512
"""Queries per call of a prefill under a window or a soft cap, which reads the keys that any of them sees."""


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    runs: Sequence[Run] | PackedRuns,
    stored: Callable[[Hashable], tuple[Tensor, Tensor]],
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of each run of tokens over its context and, causally, over itself.

    Args:
        query: ``[heads, tokens, head_dim]``, all runs concatenated, as the result, in the query's dtype.
        keys: ``[kv_heads, tokens, head_dim]``, as `values`.
        runs: At least one; their lengths add up to ``tokens``.
        stored: Keys and values of a context by its name, each ``[kv_heads, length, head_dim]``.
        sinks: As `softcap` and `window`, see `Scoring`.
        backend: One of `TORCH_BACKENDS`.
    """
    packed = runs if isinstance(runs, PackedRuns) else PackedRuns(runs)
    dense = DenseAttention(scale, softcap, backend)
    if window is not None and packed.outgrow(window, stored):
        return _windowed_runs(query, keys, values, packed.runs, stored, window, sinks, dense)
    heads, tokens, _ = query.shape
    kv_heads = keys.shape[0]
    contexts = packed.by_context(query.device)
    alone = softcap is None and sinks is None and backend == "auto" and not contexts
    if alone and len(packed.runs) == 1:
        return F.scaled_dot_product_attention(
            query[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=heads > kv_heads
        )[0]
    grouped = query.reshape(kv_heads, heads // kv_heads, tokens, -1)
    inputs = [
        (place, (grouped[:, :, place].unflatten(2, shape), keys[:, place], values[:, place]))
        for place, shape in packed.by_length(query.device)
    ]
    if alone:
        whole = _put_together([(place, _causal_out(*alike, scale)) for place, alike in inputs], tokens)
        return whole.reshape(heads, tokens, -1)
    parts = [(place, _causal_partial(*alike, dense)) for place, alike in inputs]
    own = Partial(
        _put_together([(place, part.out) for place, part in parts], tokens),
        _put_together([(place, part.lse) for place, part in parts], tokens),
    )
    for name, place in contexts:
        own = _with_context(own, grouped, place, stored(name), dense)
    if sinks is not None:
        own = with_sinks(own, sinks.view(kv_heads, -1, 1))
    return own.out.to(query.dtype).reshape(heads, tokens, -1)


def _causal_out(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """``out`` of `_causal_partial`, in the query's dtype: for runs without anything to merge."""
    kv_heads, heads_per_kv_head, count, length, _ = query.shape
    keys, values = (part.unflatten(1, (count, length)).transpose(0, 1) for part in (keys, values))
    query = query.flatten(0, 1).transpose(0, 1)
    out = F.scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scale, enable_gqa=heads_per_kv_head > 1
    )
    return out.transpose(0, 1).unflatten(0, (kv_heads, heads_per_kv_head)).flatten(2, 3)


def _causal_partial(query: Tensor, keys: Tensor, values: Tensor, dense: DenseAttention) -> Partial:
    """Causal attention of ``[kv_heads, heads_per_kv_head, runs, length, head_dim]``, each run over itself.

    Keys and values are ``[kv_heads, runs * length, head_dim]``, and ``out`` is laid out as these, by query head.
    """
    _, heads_per_kv_head, count, length, _ = query.shape
    keys, values = (part.unflatten(1, (count, length)) for part in (keys, values))
    if dense.softcap is not None:
        dense.raise_if_forced("a soft cap")
        part = _capped_causal_partial(query, keys[:, None], values[:, None], dense)
    elif count == 1:
        one = query[:, :, 0].transpose(0, 1)
        keys, values = (_batched_by_head(own[:, 0], heads_per_kv_head) for own in (keys, values))
        part = dense.partial(one, keys, values, causal=True)
        part = Partial(part.out.transpose(0, 1)[:, :, None], part.lse.transpose(0, 1)[:, :, None])
    else:
        # The runs become the batch, for one query head of each KV head at a time.
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        heads = [
            dense.partial(query[:, head].transpose(0, 1), keys, values, causal=True)
            for head in range(heads_per_kv_head)
        ]
        part = Partial(
            torch.stack([head.out.transpose(0, 1) for head in heads], 1),
            torch.stack([head.lse.transpose(0, 1) for head in heads], 1),
        )
    return Partial(part.out.flatten(2, 3), part.lse.flatten(2, 3))


def _capped_causal_partial(query: Tensor, keys: Tensor, values: Tensor, dense: DenseAttention) -> Partial:
    """Causal attention of ``[..., length, head_dim]`` with a soft cap, by blocks of queries.

    The keys before a block need no mask.
    """
    parts, length = [], query.shape[-2]
    for start in range(0, length, _MASKED_QUERIES):
        stop = min(start + _MASKED_QUERIES, length)
        some, mask = query[..., start:stop, :], causal_mask(stop - start, query.device)
        own = (keys[..., start:stop, :], values[..., start:stop, :])
        part = plain_partial(some, *own, dense.scale, visible=mask, softcap=dense.softcap)
        if start:
            part = merge(part, dense.partial(some, keys[..., :start, :], values[..., :start, :]))
        parts.append(part)
    return Partial(torch.cat([part.out for part in parts], -2), torch.cat([part.lse for part in parts], -1))


def _batched_by_head(stored: Tensor, heads_per_kv_head: int) -> Tensor:
    """Keys or values ``[kv_heads, tokens, head_dim]``, once for each query head of a KV head, as a batch.

    A stride-0 view ``[heads_per_kv_head, kv_heads, tokens, head_dim]``, not a copy.
    """
    return stored.expand(heads_per_kv_head, -1, -1, -1)


def _put_together(parts: Sequence[tuple[Place, Tensor]], tokens: int) -> Tensor:
    """Join ``[kv_heads, heads_per_kv_head, some tokens, ...]`` of all tokens."""
    (_, first), *others = parts
    if not others:
        return first
    joined = first.new_empty(*first.shape[:2], tokens, *first.shape[3:])
    for place, part in parts:
        joined[:, :, place] = part
    return joined


def _with_context(
    own: Partial, grouped: Tensor, place: Place, context: tuple[Tensor, Tensor], dense: DenseAttention
) -> Partial:
    """Merge the attention of some tokens over their common context into `own`."""
    keys, values = context
    some = grouped[:, :, place]  # [kv_heads, heads_per_kv_head, some tokens, head_dim]
    part = dense.partial(some.flatten(1, 2)[None], keys[None], values[None])
    part = Partial(part.out.reshape(*some.shape[:3], -1), part.lse.reshape(some.shape[:3]))
    if some.shape[2] == grouped.shape[2]:
        return merge(own, part)
    merged = merge(Partial(own.out[:, :, place], own.lse[:, :, place]), part)
    if own.lse.requires_grad:  # the merge has saved views of `own` for its gradient
        own = Partial(own.out.clone(), own.lse.clone())
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
    dense: DenseAttention,
) -> Tensor:
    """Attention of runs under a window that hides tokens from at least one of them: one run at a time."""
    outs, start = [], 0
    for run in runs:
        place = slice(start, start + run.length)
        start = place.stop
        parts = [*(stored(name) for name in run.context), (keys[:, place], values[:, place])]
        outs.append(_windowed_causal_attention(query[:, place], parts, window, sinks, dense))
    return torch.cat(outs, 1)


def _windowed_causal_attention(
    query: Tensor, parts: Sequence[tuple[Tensor, Tensor]], window: int, sinks: Tensor | None, dense: DenseAttention
) -> Tensor:
    """Windowed causal attention of ``[heads, length, head_dim]``, the last tokens of `parts`.

    Blocks of queries: keys that no query of a block sees are left out, and a mask hides the rest.
    """
    heads, length, head_dim = query.shape
    kv_heads = parts[0][0].shape[0]
    before = sum(keys.shape[1] for keys, _ in parts) - length
    heads_per_kv_head = heads // kv_heads
    grouped = query.reshape(kv_heads, heads_per_kv_head, length, head_dim)
    dense.raise_if_forced("a sliding window in prefill")
    outs = []
    for start in range(0, length, _MASKED_QUERIES):
        some = grouped[:, :, start : start + _MASKED_QUERIES]
        stop = start + some.shape[2]
        first = max(0, before + start - window + 1)
        keys, values = _between(parts, first, before + stop)  # [kv_heads, tokens, head_dim]
        age = torch.arange(before + start, before + stop, device=query.device)[:, None]
        age = age - torch.arange(first, before + stop, device=query.device)
        visible = (age >= 0) & (age < window)
        if dense.softcap is None and sinks is None and dense.backend == "auto":
            all_keys, all_values = (_batched_by_head(part, heads_per_kv_head) for part in (keys, values))
            out = F.scaled_dot_product_attention(
                some.transpose(0, 1), all_keys, all_values, visible, scale=dense.scale
            ).transpose(0, 1)
        else:
            part = plain_partial(
                some, keys[:, None], values[:, None], dense.scale, visible=visible, softcap=dense.softcap
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


def separating_bias(runs: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias ``[tokens, tokens]``: 0 where a token (row) sees a key of its own run up to itself, else ``-inf``.

    `runs` are numbers of the tokens' runs, int64; padding has one of its own.
    """
    visible = (runs[:, None] == runs) & causal_mask(len(runs), runs.device)
    return torch.zeros(visible.shape, dtype=dtype, device=runs.device).masked_fill_(~visible, -torch.inf)


def padded_causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
    *,
    bias: Tensor | None = None,
    context: Partial | None = None,
) -> Tensor:
    """Attention of a row's tokens over the tokens up to themselves, merged with that over their stored contexts.

    Args:
        query: ``[heads, tokens, head_dim]``; the result is of value_dim, in its dtype, undefined for padding.
        keys: ``[kv_heads, tokens, head_dim]``; values may have another width.
        scoring: Without a window.
        bias: ``[tokens, tokens]`` in the query's dtype, see `separating_bias`; None if the row is a single run.
        context: ``out`` ``[heads, tokens, value_dim]``, if any tokens have a context.
    """
    kv_heads, softcap = keys.shape[0], scoring.softcap
    grouped = query.unflatten(0, (kv_heads, -1))  # [kv_heads, heads_per_kv_head, tokens, head_dim]
    if softcap is None and scoring.sinks is None and context is None:
        return _out(grouped, keys, values, scoring.scale, bias)
    if softcap is None:
        part = _partial(grouped, keys, values, scoring.scale, bias)
    else:
        visible = causal_mask(query.shape[1], query.device) if bias is None else bias == 0
        part = plain_partial(grouped, keys[:, None], values[:, None], scoring.scale, visible=visible, softcap=softcap)
    own = Partial(part.out.flatten(0, 1), part.lse.flatten(0, 1))
    if context is not None:
        own = merge(own, context)
    if scoring.sinks is not None:
        own = with_sinks(own, scoring.sinks[:, None])
    return own.out.to(query.dtype)


def _out(grouped: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Attention without anything to merge: ``[heads, tokens, value_dim]`` in the query's dtype."""
    heads_per_kv_head = grouped.shape[1]
    if bias is None:
        query = grouped.flatten(0, 1)[None]
        gqa = heads_per_kv_head > 1
        return F.scaled_dot_product_attention(
            query, keys[None], values[None], is_causal=True, scale=scale, enable_gqa=gqa
        )[0]
    keys, values = (_batched_by_head(part, heads_per_kv_head) for part in (keys, values))
    out = F.scaled_dot_product_attention(grouped.transpose(0, 1), keys, values, bias, scale=scale)
    return out.transpose(0, 1).flatten(0, 1)


def _partial(grouped: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Partial:
    """Attention to merge with others: ``out`` ``[kv_heads, heads_per_kv_head, tokens, value_dim]``."""
    query = grouped.transpose(0, 1)
    keys, values = (_batched_by_head(part, grouped.shape[1]) for part in (keys, values))
    if bias is None:
        part = DenseAttention(scale).partial(query, keys, values, causal=True)
    elif query.is_cuda and not query.shape[-1] % 8 and not values.shape[-1] % 8:
        scores = bias.expand(*query.shape[:2], -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, scores, True, 0.0, False, scale=scale
        )
        part = Partial(out.float(), lse[..., : query.shape[-2]])  # the operator pads queries to a multiple of 32
    else:
        part = plain_partial(query, keys, values, scale, visible=bias == 0)
    return Partial(part.out.transpose(0, 1), part.lse.transpose(0, 1))
