"""Operators for attention of runs of queries over runs of keys, and their gradients as parts of a larger attention.

A forward call returns a partial, ``(out, lse)``. A backward call is given the ``out`` and ``lse`` of the *whole*
attention, of which it computes a part: the weights ``exp(scores - lse)`` are then those of the whole softmax, so that
the gradient of the queries is the sum over parts, as in Ring Attention (Liu et al., section 3).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..attention.kv import Partial, Scoring
from ..attention.torch_operators.operators import product
from ..kernels.failures import KernelFailedError
from ..kernels.prefill.api import prefill_attention, prefill_partial, refusal

_HALF: Final = torch.float16, torch.bfloat16
_MOST_QUERIES: Final = 512
_MOST_SCORES: Final = 2**25
"""Queries, and scores of all heads (128 MiB in fp32, of which a few exist), that products compute at a time."""

_TILE: Final = 64
"""Queries that short runs on a CPU make up together: for fewer, starting an operator takes longer than it runs."""


@dataclass(frozen=True)
class Call:
    """Runs of queries, each of which attends to a run of keys."""

    queries: slice | Tensor  # which of the queries it takes, in this order: a slice, or indices int64
    keys: slice | Tensor  # which of the keys
    lengths: list[tuple[int, int]]  # of each run of those queries, and of the keys that it attends to; either may be 0
    # Whether a run's last query is its last key, and each sees the keys up to itself; otherwise it sees all.
    causal: bool
    window: int | None  # with `causal`: the last so many of these keys; None for all
    device: torch.device  # of the indices

    @cached_property
    def runs(self) -> list[tuple[slice, slice]]:
        """The runs of queries and keys that are not empty."""
        found, query, key = [], 0, 0
        for queries, keys in self.lengths:
            if queries and keys:
                found.append((slice(query, query + queries), slice(key, key + keys)))
            query, key = query + queries, key + keys
        return found

    @cached_property
    def tiles(self) -> list[tuple[slice, slice, Tensor | None]]:
        """The runs, on the CPU, where short ones of a causal call, of as many keys as queries, are taken together.

        Those have what is added to their scores, ``[queries, keys]`` fp32, to hide the keys of each other.
        """
        found: list[list[tuple[slice, slice]]] = []
        for run in self.runs:
            tile = [*found[-1], run] if found else []
            is_one = all(one.stop == other.start for pair in pairwise(tile) for one, other in zip(*pair, strict=True))
            if tile and self.causal and is_one and run[0].stop - tile[0][0].start <= _TILE:
                found[-1] = tile
            else:
                found.append([run])
        return [
            (slice(tile[0][0].start, tile[-1][0].stop), slice(tile[0][1].start, tile[-1][1].stop), _hiding(tile))
            for tile in found
        ]

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """Where runs of queries, and of keys, begin and the last ends: ``[runs + 1]`` int32 each."""
        lengths = torch.tensor([(0, 0), *self.lengths], dtype=torch.int32, device="cpu")
        queries, keys = lengths.cumsum(0, dtype=torch.int32).T.contiguous().to(self.device)
        return queries, keys

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Longest run of queries, and of keys."""
        return max(queries for queries, _ in self.lengths), max(keys for _, keys in self.lengths)

    @cached_property
    def no_random_state(self) -> Tensor:
        """Seed and offset of a dropout of 0."""
        return torch.zeros(2, dtype=torch.uint64, device=self.device)


def _hiding(tile: Sequence[tuple[slice, slice]]) -> Tensor | None:
    """0 where a query of these runs sees a key of its run up to itself, ``-inf`` elsewhere; None for a single run."""
    if len(tile) == 1:
        return None
    lengths = [rows.stop - rows.start for rows, _ in tile]
    seen = torch.block_diag(*[torch.ones(length, length, device="cpu").tril() for length in lengths])
    return torch.where(seen > 0, 0.0, -torch.inf)


class Gradients(NamedTuple):
    """Gradients of a call's queries, keys and values."""

    query: Tensor
    keys: Tensor
    values: Tensor


class Operator(ABC):
    """Attention of a call's queries, keys and values, which are already selected.

    Args of the methods:
        query: ``[tokens, heads, head_dim]``.
        keys: ``[length, kv_heads, head_dim]``.
        values: ``[length, kv_heads, value_dim]``.
        whole: ``out`` ``[tokens, heads, value_dim]`` in the query's dtype, like its gradient `grad`, and ``lse``
            ``[heads, tokens]`` in at least fp32, contiguous.

    Attributes:
        copies: Keys that may be copied per query, where a copy for each run that attends to them makes calls fewer.
    """

    copies: float = 0.0

    @abstractmethod
    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call, scoring: Scoring) -> Partial:
        """The call's partial: ``out`` in any dtype, ``lse`` ``[heads, tokens]``."""

    @abstractmethod
    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, whole: Partial, call: Call, scoring: Scoring
    ) -> Gradients:
        """The call's part of the gradients, given the whole attention's partial and the gradient of its ``out``."""


class Flash(Operator):
    """PyTorch's flash attention for runs of different lengths (signatures of torch 2.11 and 2.13)."""

    copies = 0.25  # a copy's gradient is added up in fp32

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call, scoring: Scoring) -> Partial:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *(query, keys, values, *call.bounds, *call.longest, 0.0, call.causal, False),
            scale=scoring.scale,
            **_window(call),
        )
        return Partial(out, lse.masked_fill_(lse == torch.inf, -torch.inf))  # of queries without keys

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, whole: Partial, call: Call, scoring: Scoring
    ) -> Gradients:
        random = call.no_random_state
        return Gradients(
            *torch.ops.aten._flash_attention_backward(
                *(grad, query, keys, values, *whole, *call.bounds, *call.longest, 0.0, call.causal, random, random),
                scale=scoring.scale,
                **_window(call),
            )
        )


def _window(call: Call) -> dict[str, int]:
    """Keys before a query's own that it sees, and after it."""
    return {} if call.window is None else {"window_size_left": call.window - 1, "window_size_right": 0}


class FusedOnCpu(Operator):
    """PyTorch's flash attention on CPUs, run by run; half precision is computed in fp32, and rounded once."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call, scoring: Scoring) -> Partial:
        query, keys, values = _at_least_fp32(query, keys, values)
        part = _no_keys(query, values)
        for rows, columns, hiding in call.tiles:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_in_groups(query[rows], keys[columns], values[columns]),
                *(0.0, call.causal and hiding is None),
                attn_mask=None if hiding is None else hiding.to(query.dtype),
                scale=scoring.scale,
            )
            part.out[rows] = _by_token(out)
            part.lse[:, rows] = lse.flatten(0, 1)
        return part

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, whole: Partial, call: Call, scoring: Scoring
    ) -> Gradients:
        grad, query, keys, values, out = _at_least_fp32(grad, query, keys, values, whole.out)
        total = _zeros(query, keys, values)
        for rows, columns, hiding in call.tiles:
            inputs = _in_groups(query[rows], keys[columns], values[columns])
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(_by_group(grad[rows], keys), *inputs, _by_group(out[rows], keys)),
                *(whole.lse[:, rows].unflatten(0, (keys.shape[1], -1)), 0.0, call.causal and hiding is None),
                attn_mask=None if hiding is None else hiding.to(query.dtype),
                scale=scoring.scale,
            )
            total.query[rows] = _by_token(grads[0])
            total.keys[columns] += grads[1].sum(1).transpose(0, 1)
            total.values[columns] += grads[2].sum(1).transpose(0, 1)
        return total


class Products(Operator):
    """Matrix products by blocks of queries: any device, dtype and widths, windows and soft caps."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, call: Call, scoring: Scoring) -> Partial:
        part = _no_keys(query, values)
        for block in _blocks(query, keys, values, call, scoring):
            lse = torch.logsumexp(block.scores, -1)
            weights = torch.exp(block.scores - lse.unsqueeze(-1))
            out = product(_operand(weights, values), block.values)
            part.out[block.rows] = _by_token(out.unflatten(1, (query.shape[1] // keys.shape[1], -1)))
            part.lse[:, block.rows] = lse.view(query.shape[1], -1)
        return part

    def backward(
        self, grad: Tensor, query: Tensor, keys: Tensor, values: Tensor, whole: Partial, call: Call, scoring: Scoring
    ) -> Gradients:
        total, group = _zeros(query, keys, values), query.shape[1] // keys.shape[1]
        for block in _blocks(query, keys, values, call, scoring):
            incoming, out = (_by_group(part[block.rows], keys).flatten(1, 2) for part in (grad, whole.out))
            weights = torch.exp(block.scores - whole.lse[:, block.rows].reshape(len(out), -1, 1))
            mean = (incoming.to(weights.dtype) * out).sum(-1, keepdim=True)
            of_scores = (product(incoming, block.values.mT) - mean) * weights * block.slope
            of_scores = _operand(of_scores, query)
            total.query[block.rows] = _by_token(product(of_scores, block.keys).unflatten(1, (group, -1)))
            total.keys[block.columns] += product(of_scores.mT, block.query).transpose(0, 1)
            total.values[block.columns] += product(_operand(weights, values).mT, incoming).transpose(0, 1)
        return total


class _Block(NamedTuple):
    """Scores of some queries of a run (`rows`) for the keys that any of them sees (`columns`)."""

    rows: slice
    columns: slice
    query: Tensor  # [kv_heads, heads_per_kv_head * rows, head_dim]
    keys: Tensor  # [kv_heads, columns, head_dim]
    values: Tensor
    scores: Tensor  # [kv_heads, heads_per_kv_head * rows, columns] in at least fp32; -inf for keys not seen
    slope: Tensor | float  # their derivative by the products of queries and keys


def _blocks(query: Tensor, keys: Tensor, values: Tensor, call: Call, scoring: Scoring) -> Iterator[_Block]:
    group = query.shape[1] // keys.shape[1]
    for queries, seen in call.runs:
        before = seen.stop - queries.stop  # index of the key of a query, less that of the query
        reach = min(seen.stop - seen.start, (call.window or seen.stop) + _MOST_QUERIES)
        step = max(16, min(_MOST_QUERIES, _MOST_SCORES // (query.shape[1] * reach)))
        for first in range(queries.start, queries.stop, step):
            rows, columns = slice(first, min(first + step, queries.stop)), seen
            if call.causal:
                oldest = seen.start if call.window is None else first + before - call.window + 1
                columns = slice(max(seen.start, oldest), rows.stop + before)
            mine = _by_group(query[rows], keys).flatten(1, 2)
            some_keys, some_values = (part[columns].transpose(0, 1) for part in (keys, values))
            scores = product(mine, some_keys.mT).mul_(scoring.scale)
            slope: Tensor | float = scoring.scale
            if scoring.softcap is not None:
                share = torch.tanh(scores / scoring.softcap)
                scores, slope = share * scoring.softcap, (1 - share.square()) * scoring.scale
            if call.causal:
                own = torch.arange(rows.start, rows.stop, device=query.device)[:, None] + before
                key = torch.arange(columns.start, columns.stop, device=query.device)
                hidden = key > own if call.window is None else (key > own) | (key <= own - call.window)
                scores.unflatten(1, (group, -1)).masked_fill_(hidden, -torch.inf)
            yield _Block(rows, columns, mine, some_keys, some_values, scores, slope)


def _operand(x: Tensor, like: Tensor) -> Tensor:
    """A factor of a product with tensors such as `like`: GPUs multiply half precision with each other."""
    return x.to(like.dtype) if like.is_cuda and like.dtype in _HALF else x


def _no_keys(query: Tensor, values: Tensor) -> Partial:
    """Memory for a partial, which is that of no keys: ``lse`` ``[heads, tokens]``."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = query.new_zeros(*query.shape[:2], values.shape[2], dtype=dtype)
    return Partial(out, query.new_full((query.shape[1], query.shape[0]), -torch.inf, dtype=dtype))


def _zeros(*inputs: Tensor) -> Gradients:
    """Memory for their gradients, in at least fp32."""
    return Gradients(
        *(part.new_zeros(part.shape, dtype=torch.promote_types(part.dtype, torch.float32)) for part in inputs)
    )


def _at_least_fp32(*parts: Tensor) -> tuple[Tensor, ...]:
    return tuple([part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts])


def _by_group(x: Tensor, keys: Tensor) -> Tensor:
    """``[tokens, heads, width]`` as ``[kv_heads, heads_per_kv_head, tokens, width]``."""
    return x.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)


def _in_groups(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Queries `_by_group`, and views of keys and values in that shape."""
    query = _by_group(query, keys)
    expanded = [part.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1) for part in (keys, values)]
    return query, *expanded


def _by_token(x: Tensor) -> Tensor:
    """``[kv_heads, heads_per_kv_head, tokens, width]`` as ``[tokens, heads, width]``."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def kernel_serves(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the prefill kernel serves such tensors: not off a GPU, nor other dtypes than half precision."""
    return query.is_cuda and query.dtype in _HALF and refusal(*_by_head(query, keys, values)) is None


def attend_by_kernel(
    query: Tensor, keys: Tensor, values: Tensor, intervals: Sequence[Tensor], scoring: Scoring, sinks: Tensor | None
) -> Partial | None:
    """Attention of all queries by the prefill kernel, which merges nodes in fp32 and copies no keys.

    Flash attention would round each node's part to half precision, or need a copy of each path's keys: on an H200 the
    kernel takes 0.6 to 0.95 of the time of that.

    Args:
        intervals: Disjoint keys that queries see, as `prefill_attention` takes them; all queries are in the last.

    Returns:
        ``out`` in the query's dtype and ``lse`` ``[heads, tokens]`` fp32; None after a failure.
    """
    by_head = _by_head(query, keys, values)
    earlier: tuple[Tensor, Tensor] | None = None
    scores: dict[str, Any] = {"scale": scoring.scale, "soft_cap": scoring.softcap}
    # A stride that is a multiple of 16, whatever the tokens: others would be another kernel to compile.
    lse = query.new_empty(query.shape[1], len(query) + 15 & ~15, dtype=torch.float32)[:, : len(query)]
    try:
        for part in intervals[:-1]:
            if earlier is None:
                earlier = query.new_empty(query.shape, dtype=torch.float32).transpose(0, 1), lse.fill_(-torch.inf)
            prefill_partial(*by_head, part, earlier=earlier, **scores)
        out = prefill_attention(*by_head, intervals[-1], sinks=sinks, earlier=earlier, lse=lse, **scores)
    except KernelFailedError:
        return None
    return Partial(out.transpose(0, 1), lse)


def _by_head(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)


def choose_operator(query: Tensor, values: Tensor, scoring: Scoring) -> Operator:
    """The operator for queries and values of these shapes and scores whose window, if given, hides keys."""
    head_dim, half = query.shape[-1], query.dtype in _HALF
    if scoring.softcap is not None or values.shape[-1] != head_dim:
        return Products()
    if query.is_cuda and half and head_dim % 8 == 0 and head_dim <= _widest_flash(query.device):
        return Flash()
    if query.device.type == "cpu" and scoring.window is None:
        return FusedOnCpu()
    return Products()


@lru_cache
def _widest_flash(device: torch.device) -> int:
    """Largest head_dim of flash attention with gradients on a GPU; 0 where there is none."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None or capability < (8, 0):
        return 0
    return 256 if capability in ((8, 0), (9, 0), (10, 0)) else 192
