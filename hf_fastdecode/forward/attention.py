"""Attention of the packed row of a tree's distinct tokens: each token attends to its own path, with gradients.

Attention is a merge of partials over disjoint keys (`attention.kv`): those of a token's own node, and those of each of
its ancestors. On a GPU the prefill kernel computes it, which merges by itself. Otherwise, and for all gradients, the
descendants of a node attend to it together, in one run of all their queries. Where copying its keys is cheaper than
one more call, and where a window cuts paths anywhere, its keys are copied before those of each node below it instead,
so that one causal run attends to both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..attention.kv import Partial, Scoring, merge
from ..attention.overrides import no_autocast
from ..errors import Unsupported
from .operators import Call, Operator, attend_by_kernel, choose_operator, kernel_serves
from .trie import Numbers, Tree


def attend(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scoring: Scoring) -> Tensor:
    """Attend each token to its own node up to itself, and to the node's ancestors; differentiable, in `sinks` too.

    Args:
        query: ``[tokens, heads, head_dim]``: of the tree's tokens, in order, without those kept. The last dimension of
            all inputs is contiguous.
        key: ``[kept + tokens, kv_heads, head_dim]``; query head ``i`` uses KV head ``i // (heads / kv_heads)``.
        value: ``[kept + tokens, kv_heads, value_dim]``.

    Returns:
        ``[tokens, heads, value_dim]`` in the query's dtype.
    """
    if scoring.distances is not None:
        raise Unsupported("attention with biases by distance has no operator over tokens that rows share")
    scores = scoring.scale, scoring.softcap, scoring.window
    name = scores, query.dtype, query.device, query.shape[1:], key.shape[1:], value.shape[1:]
    plan: _Plan | None = tree.plans.get(name)
    if plan is None:
        plan = tree.plans[name] = _Plan.of(tree, Scoring(*scores), query, key, value)
    inputs = query, key, value, scoring.sinks
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in inputs):
        return cast(Tensor, _Attention.apply(plan, *inputs))
    return plan.attend(*inputs).out


class _Paths:
    """What the new nodes of a tree attend to, in paths of up to `longest` tokens, found once for all layers."""

    def __init__(self, tree: Tree):
        self._kept = tree.kept
        self._found: dict[Hashable, Any] = {}
        self._runs = [range(node.start, node.start + node.length) for node in tree.nodes]
        self._ancestors: list[list[int]] = []  # of each node, from the root down
        for node in tree.nodes:
            self._ancestors.append([] if node.parent < 0 else [*self._ancestors[node.parent], node.parent])
        self._new = [number for number, run in enumerate(self._runs) if run.start >= tree.kept]
        self._readers: dict[int, list[int]] = defaultdict(list)  # new nodes below a node, in order
        for number in self._new:
            for ancestor in self._ancestors[number]:
                self._readers[ancestor].append(number)
        self.longest = max(sum(len(self._runs[one]) for one in [*self._ancestors[new], new]) for new in self._new)

    def calls(self, window: int | None, copies: float, device: torch.device) -> list[Call]:
        """Calls over disjoint keys, which are together those that tokens see; the first has all queries, as a slice.

        So many keys may be copied per query; all that a window shows are.
        """
        if (name := (window, copies, device)) not in self._found:
            self._found[name] = self._calls(*name)
        return cast(list[Call], self._found[name])

    def _calls(self, window: int | None, copies: float, device: torch.device) -> list[Call]:
        copied = set(self._readers) if window is not None else self._worth_copying(copies)
        own = []
        for number in self._new:
            before = [self._runs[one] for one in self._ancestors[number] if one in copied]
            if window is not None:
                before = _last(before, window - 1)
            own.append(([self._queries(number)], [*before, self._runs[number]]))
        shared: dict[int, list[_Run]] = defaultdict(list)
        for number in sorted(self._readers.keys() - copied):
            queries = _joined(self._queries(reader) for reader in self._readers[number])
            shared[len(self._ancestors[number])].append((queries, [self._runs[number]]))
        return [_call(own, device, window, causal=True), *(_call(runs, device) for runs in shared.values())]

    def _worth_copying(self, copies: float) -> set[int]:
        """Nodes whose keys are to be copied for each node below."""
        runs = self._runs
        return {
            number
            for number, readers in self._readers.items()
            if len(runs[number]) * len(readers) <= copies * sum(len(runs[one]) for one in readers)
        }

    def intervals(self, window: int | None, device: torch.device) -> list[Tensor]:
        """The keys that queries see, as the prefill kernel takes them: two intervals, of nodes that lie end to end.

        ``[5, queries]`` int32 each: the last is that of all queries, others are of those with longer paths.
        """
        if (name := (window, device)) not in self._found:
            self._found[name] = [part.to(device) for part in self._intervals(window)]
        return cast(list[Tensor], self._found[name])

    def _intervals(self, window: int | None) -> list[Tensor]:
        launches: dict[int, list[Numbers]] = defaultdict(list)  # the last launch is 0
        for number in self._new:
            runs = _joined(self._runs[one] for one in [*self._ancestors[number], number])
            queries = self._queries(number)
            query = np.arange(queries.start, queries.stop)
            position = query - queries.stop + sum(map(len, runs))
            before, seen = 0, []
            for run in runs:
                last = np.minimum(run.start + position - before, run.stop - 1)
                oldest = 0 if window is None else np.maximum(position - before - window + 1, 0)
                if (first := run.start + oldest + 0 * last)[0] <= last[0]:  # later queries see no more of it
                    seen.append((first, last))
                before += len(run)
            if len(seen) % 2:
                seen.append((0 * query, 0 * query - 1))
            for pair in range(0, len(seen), 2):
                two = *seen[pair], *seen[pair + 1]
                launches[len(seen) // 2 - 1 - pair // 2].append(np.stack([query, *two]))
        tables = (np.concatenate(launches[one], 1) for one in sorted(launches, reverse=True))
        return [torch.from_numpy(table.astype(np.int32)) for table in tables]

    def _queries(self, number: int) -> range:
        run = self._runs[number]
        return range(run.start - self._kept, run.stop - self._kept)


_Run = tuple[list[range], list[range]]
"""Queries, and the keys that they attend to."""


def _last(runs: Sequence[range], count: int) -> list[range]:
    """The last tokens of runs."""
    found = []
    for run in reversed(runs):
        found.append(run[max(0, len(run) - count) :])
        count -= len(found[-1])
    return [run for run in reversed(found) if run]


def _joined(runs: Iterable[range]) -> list[range]:
    """The same tokens in fewer runs, if some follow each other."""
    found: list[range] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            run = range(found.pop().start, run.stop)
        found.append(run)
    return found


def _call(runs: Sequence[_Run], device: torch.device, window: int | None = None, causal: bool = False) -> Call:
    """The call for some runs of queries and keys, of views if they are in the order of all tokens."""
    lengths = [(sum(map(len, queries)), sum(map(len, keys))) for queries, keys in runs]
    queries, keys = ([run for side in sides for run in side] for sides in zip(*runs, strict=True))
    if not len(queries) == len(keys) == len(runs) or not _ascend(queries) or not _ascend(keys):
        return Call(_selection(queries, device), _selection(keys, device), lengths, causal, window, device)
    lengths, query, key = [], queries[0].start, keys[0].start
    for mine, seen in zip(queries, keys, strict=True):
        gaps = (mine.start - query, 0), (0, seen.start - key)
        lengths += [gap for gap in gaps if any(gap)] + [(len(mine), len(seen))]
        query, key = mine.stop, seen.stop
    return Call(slice(queries[0].start, query), slice(keys[0].start, key), lengths, causal, window, device)


def _ascend(runs: Sequence[range]) -> bool:
    return all(one.stop <= other.start for one, other in pairwise(runs))


def _selection(runs: Sequence[range], device: torch.device) -> slice | Tensor:
    """The tokens of these runs, in this order."""
    runs = _joined(runs)
    if len(runs) == 1:
        return slice(runs[0].start, runs[0].stop)
    return torch.cat([torch.arange(run.start, run.stop, device="cpu") for run in runs]).to(device)


@dataclass(frozen=True)
class _Plan:
    """Attention of layers of one kind, without their sinks."""

    paths: _Paths
    operator: Operator
    scoring: Scoring
    device: torch.device
    by_kernel: bool

    @classmethod
    def of(cls, tree: Tree, scoring: Scoring, query: Tensor, key: Tensor, value: Tensor) -> _Plan:
        if (paths := tree.plans.get("paths")) is None:
            paths = tree.plans["paths"] = _Paths(tree)
        if scoring.window is not None and paths.longest <= scoring.window:
            scoring = replace(scoring, window=None)
        operator, device = choose_operator(query, value, scoring), query.device
        with torch.no_grad():  # gradients are the operator's
            return cls(paths, operator, scoring, device, kernel_serves(query, key, value))

    @property
    def calls(self) -> list[Call]:
        """The operator's calls."""
        return self.paths.calls(self.scoring.window, self.operator.copies, self.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Partial:
        """Attention of all tokens: ``out`` in the query's dtype, ``lse`` ``[heads, tokens]``."""
        if self.by_kernel:
            intervals, scoring = self.paths.intervals(self.scoring.window, self.device), self.scoring
            if (found := attend_by_kernel(query, key, value, intervals, scoring, sinks)) is not None:
                return found
        out, lse = self._merged(query, key, value)
        if sinks is not None:
            of_keys, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * torch.exp(of_keys - lse).T.unsqueeze(-1)
        return Partial(out.to(query.dtype), lse)

    def _merged(self, query: Tensor, key: Tensor, value: Tensor) -> Partial:
        """The partial of all keys, of those that the operator computes."""
        whole = None
        for call in self.calls:
            inputs = _at(call.queries, query), _at(call.keys, key), _at(call.keys, value)
            part = self.operator.forward(*inputs, call, self.scoring)
            if whole is None:
                whole = part
                continue
            out, lse = whole.out.to(part.lse.dtype), whole.lse.T
            merged = merge(
                Partial(_at(call.queries, out), _at(call.queries, lse)), Partial(part.out.to(lse.dtype), part.lse.T)
            )
            out[call.queries], lse[call.queries] = merged
            whole = Partial(out, lse.T)
        assert whole is not None
        return whole

    def gradients(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Partial) -> list[Tensor]:
        """Gradients of queries, keys and values, in their dtypes, by that of ``whole.out``."""
        sums = [_Sum(part, len(self.calls)) for part in (query, key, value)]
        for call in self.calls:
            mine = _at(call.queries, grad), _at(call.queries, query)
            of_mine = Partial(_at(call.queries, whole.out), _at(call.queries, whole.lse.T).T.contiguous())
            seen = _at(call.keys, key), _at(call.keys, value)
            parts = self.operator.backward(*mine, *seen, of_mine, call, self.scoring)
            for total, part, where in zip(sums, parts, (call.queries, call.keys, call.keys), strict=True):
                total.add(where, part)
        return [total.value for total in sums]


def _at(tokens: slice | Tensor, x: Tensor) -> Tensor:
    """The given tokens of ``[tokens, ...]``; a view if they follow each other."""
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)


class _Sum:
    """Sum of the gradients that several calls give to tokens of one tensor, rounded once where there are many."""

    def __init__(self, like: Tensor, terms: int):
        self._like, self._terms = like, terms
        self._total: Tensor | None = None

    def add(self, tokens: slice | Tensor, part: Tensor) -> None:
        """Add gradients of these tokens."""
        sums = torch.promote_types(part.dtype, torch.float32)
        if self._total is None and isinstance(tokens, slice) and len(part) == len(self._like):
            self._total = part if self._terms <= 2 else part.to(sums)
            return
        if self._total is None:
            self._total = torch.zeros_like(self._like, dtype=sums, memory_format=torch.contiguous_format)
        if isinstance(tokens, slice):
            self._total[tokens].add_(part)
        else:
            self._total.index_add_(0, tokens, part.to(self._total.dtype))

    @property
    def value(self) -> Tensor:
        """The sum, in the tensor's dtype."""
        assert self._total is not None
        return self._total.to(self._like.dtype)


class _Attention(torch.autograd.Function):
    """Attention whose gradient is computed by the operators again, from the merged result and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        ctx.plan, (out, lse) = plan, plan.attend(query, key, value, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse.contiguous())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, *whole = ctx.saved_tensors
        out, lse = whole
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        with no_autocast(query.device):
            grads = ctx.plan.gradients(grad, query, key, value, Partial(out, lse))
        of_sinks = None
        if sinks is not None:
            mean = (grad.to(lse.dtype) * out).sum(-1)  # [tokens, heads]
            of_sinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * mean.T).sum(1).to(sinks.dtype)
        return None, *grads, of_sinks
