"""Random forests in poisoned storage, PyTorch's own attention as the yardstick, and the error rule.

Whatever an operator must not read is NaN: storage between the nodes and suffix positions behind a row's length. An
operator that reads it, or multiplies it by zero, shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Node, Path, Span
from hf_fastdecode.attention.kv import ForestKV, Partial, Segment

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
DTYPE_NAMES |= {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
LOW_AND_FULL = (torch.float32, torch.bfloat16, torch.float16)

_GAP = 3  # poisoned tokens between nodes and behind suffixes


@dataclass(frozen=True)
class Case:
    """A workload: `prompts` prompts of `context` tokens, `samples` rows each, `suffix` own tokens per row.

    `depth` counts the levels of nodes: 0 has no nodes, 1 the prompts, 2 a system prompt over all of them, 3 in
    addition a node below each prompt for about two thirds of its rows. `sinks` gives every query head one.
    """

    prompts: int = 2
    context: int = 63
    samples: int = 5
    suffix: int = 17
    ragged: bool = False
    queries: int = 1
    depth: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False

    def __str__(self) -> str:
        parts = [f"B{self.prompts}", f"m{self.context}", f"n{self.samples}", f"s{self.suffix}"]
        parts += ["ragged"] if self.ragged else []
        parts += [f"q{self.queries}"] if self.queries != 1 else []
        parts += [f"depth{self.depth}"] if self.depth != 1 else []
        parts += [f"softcap{self.softcap:g}"] if self.softcap is not None else []
        parts += [f"w{self.window}"] if self.window is not None else []
        parts += ["sinks"] if self.sinks else []
        parts += [f"h{self.heads}g{self.kv_heads}", f"d{self.head_dim}", DTYPE_NAMES[self.dtype]]
        return "-".join(parts)

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    def forest(self) -> Forest:
        storage = _Storage()
        nodes = []
        for prompt in range(self.prompts if self.depth else 0):
            first = prompt * self.samples
            nodes.append(Node(storage.span(self.context), first, self.samples, min(self.depth, 2) - 1))
            if self.depth == 3:
                nodes.append(Node(storage.span(5 + prompt, segment=1), first, -(-2 * self.samples // 3), 2))
        if self.depth >= 2:
            nodes.append(Node(storage.span(37, segment=1), 0, self.rows))
        return Forest(self.rows, nodes)

    def scoring(self, device: torch.device | str) -> dict[str, Any]:
        """What the operators and the oracle take beside queries and keys."""
        sinks = some_sinks(self.heads, device) if self.sinks else None
        return {"softcap": self.softcap, "window": self.window, "sinks": sinks}

    def suffix_lengths(self) -> int | list[int]:
        if not self.ragged:
            return self.suffix
        rng = random.Random(self.suffix)
        return [self.suffix, *(rng.randint(self.queries, self.suffix) for _ in range(self.rows - 1))]


def some_sinks(heads: int, device: torch.device | str) -> Tensor:
    """``[heads]`` fp32: small multiples of a quarter, which every dtype holds exactly."""
    return torch.arange(heads, device=device) / 4 - 0.5


class _Storage:
    """Hands out spans of segments, with a gap of unused tokens around each."""

    def __init__(self) -> None:
        self.used: dict[int, int] = {}

    def span(self, length: int, segment: int = 0, gap: int = _GAP) -> Span:
        start = self.used.get(segment, 0) + gap
        self.used[segment] = start + length
        return Span(segment, start, length)


def random_forest(rng: random.Random, rows: int, depth: int, longest: int = 20) -> Forest:
    """A forest of at most `depth` levels, some of whose rows have no node.

    Neighbours may be alike (as long, of as many rows, evenly spaced in one segment), which operators may batch, differ
    in one of these, or show the same span.
    """
    storage = _Storage()
    nodes: list[Node] = []

    def plant(row_start: int, row_stop: int, level: int) -> None:
        if level == depth:
            return
        length, count = rng.randint(1, longest), rng.randint(1, max(1, row_stop - row_start))
        while row_start < row_stop:
            if rng.random() < 0.3:
                length, count = rng.randint(1, longest), rng.randint(1, row_stop - row_start)
            count = min(count, row_stop - row_start)
            if rng.random() < 0.85:
                if nodes and rng.random() < 0.15:
                    span = rng.choice(nodes).span
                else:
                    span = storage.span(length, *rng.choice(((0, 0), (0, 0), (0, 2), (1, 1))))
                nodes.append(Node(span, row_start, count, level))
                plant(row_start, row_start + count, level + 1)
            row_start += count

    plant(0, rows, 0)
    return Forest(rows, nodes)


def make_inputs(
    forest: Forest,
    suffix_lengths: int | Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    queries: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, ForestKV]:
    """Random queries and poisoned keys and values for a forest; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    value_dim = head_dim if value_dim is None else value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    spans = [node.span for node in forest.nodes]
    segments = []
    for index in range(max((span.segment for span in spans), default=-1) + 1):
        own = [span for span in spans if span.segment == index]
        size = max((span.stop for span in own), default=0) + _GAP
        unused = torch.ones(size, dtype=torch.bool)
        for span in own:
            unused[span.start : span.stop] = False
        segments.append(poisoned(Segment(normal(kv_heads, size, head_dim), normal(kv_heads, size, value_dim)), unused))
    lengths = [suffix_lengths] * forest.rows if isinstance(suffix_lengths, int) else list(suffix_lengths)
    capacity = max(lengths, default=0) + _GAP
    suffix = Segment(
        normal(forest.rows, kv_heads, capacity, head_dim), normal(forest.rows, kv_heads, capacity, value_dim)
    )
    unused = torch.arange(capacity) >= torch.tensor(lengths, dtype=torch.long)[:, None]
    query = normal(forest.rows, heads, queries, head_dim)
    return query, ForestKV(forest, segments, poisoned(suffix, unused[:, None]), suffix_lengths)


def poisoned(segment: Segment, unused: Tensor) -> Segment:
    """The segment with NaN at the tokens where `unused` (broadcastable to ``[..., tokens]``) is true."""
    keys, values = segment
    unused = unused.to(keys.device)[..., None]
    return Segment(keys.masked_fill(unused, torch.nan), values.masked_fill(unused, torch.nan))


def own_keys_and_values(kv: ForestKV, row: int) -> tuple[Tensor, Tensor]:
    """All keys and values of a row, each ``[kv_heads, context + suffix, head_dim]``: the physical copy."""
    length = kv.lengths()[row]
    parts = [kv.node(span) for span in kv.forest.paths[row]]
    parts.append(Segment(kv.suffix.keys[row, :, :length], kv.suffix.values[row, :, :length]))
    return torch.cat([part.keys for part in parts], 1), torch.cat([part.values for part in parts], 1)


def pytorch_attention(query: Tensor, kv: ForestKV, scale: float | None = None, **scoring: Any) -> Tensor:
    """PyTorch's own attention of each row over a physical copy of its keys, in the query's dtype: the yardstick."""
    outs = []
    for row, own in enumerate(query):  # own: [heads, queries, head_dim]
        keys, values = own_keys_and_values(kv, row)
        outs.append(pytorch_causal_attention(own, keys, values, scale, **scoring))
    return torch.stack(outs)


def pytorch_causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float | None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """PyTorch's own attention of the last ``query.shape[1]`` tokens over keys ``[kv_heads, length, head_dim]``.

    A window is a mask, and a sink one more key of zeros with a bias. Where there is a softcap, which the fused
    operator does not take, transformers' eager attention.
    """
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    plain = query.shape[1] == 1 and window is None and sinks is None
    visible = None if plain else last_queries_see(query.shape[1], keys.shape[1], query.device, window)
    if sinks is not None:
        assert visible is not None
        bias = torch.zeros(visible.shape, device=query.device).masked_fill(~visible, -torch.inf)
        visible = _beside(bias, sinks).to(query.dtype)
        keys, values = (F.pad(part, (0, 0, 0, 1)) for part in (keys, values))
    if softcap is None:
        return F.scaled_dot_product_attention(query[None], keys[None], values[None], visible, scale=scale)[0]
    scores = query @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = scores + visible
    elif visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ values


def _beside(bias: Tensor, sinks: Tensor) -> Tensor:
    """A bias ``[queries, length]`` for every head, with its sink behind: ``[heads, queries, length + 1]``."""
    heads, queries = len(sinks), len(bias)
    return torch.cat([bias.expand(heads, -1, -1), sinks[:, None, None].expand(-1, queries, 1)], dim=2)


def _fused_lse(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The log-sum-exp of PyTorch's fused operator on CUDA for this dtype, of one query that sees all keys."""
    if query.dtype.itemsize == 2:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, scale=scale)[1]
    lse = torch.ops.aten._scaled_dot_product_efficient_attention(query, keys, values, None, True, scale=scale)[1]
    return lse[..., :1]  # it pads queries to a multiple of 32


def pytorch_lse(
    query: Tensor,
    kv: ForestKV,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The log-sum-exp of `pytorch_attention` from PyTorch's fused operators, or else from fp32 scores."""
    queries, head_dim = query.shape[2:]
    scale = head_dim**-0.5 if scale is None else scale
    lses = []
    for row, own in enumerate(query):
        keys, values = (
            part.repeat_interleave(query.shape[1] // part.shape[0], 0) for part in own_keys_and_values(kv, row)
        )
        visible = last_queries_see(queries, keys.shape[1], query.device, window)
        if softcap is None and query.device.type == "cpu":
            bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
            lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                own[None], keys[None], values[None], attn_mask=bias, scale=scale
            )[1][0]
        elif softcap is None and query.dtype != torch.float64:  # it sees all keys that it gets: one query at a time
            ends = [keys.shape[1] - queries + 1 + index for index in range(queries)]
            starts = [max(0, end - (window or end)) for end in ends]
            each = [
                _fused_lse(
                    own[None, :, index : index + 1], keys[None, :, first:end], values[None, :, first:end], scale
                )
                for index, (first, end) in enumerate(zip(starts, ends, strict=True))
            ]
            lse = torch.cat(each, -1)[0]
        else:
            scores = own.float() @ keys.float().mT * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            lse = torch.logsumexp(scores.masked_fill(~visible, -torch.inf), -1)
        lses.append(lse if sinks is None else torch.logaddexp(lse, sinks[:, None]))
    return torch.stack(lses)


def last_queries_see(queries: int, length: int, device: torch.device | str, window: int | None = None) -> Tensor:
    """The causal mask ``[queries, length]`` of the last `queries` of `length` tokens, within a window if given."""
    visible = torch.ones(queries, length, dtype=torch.bool, device=device).tril(length - queries)
    return visible if window is None else visible.triu(length - queries - window + 1)


class Problem(NamedTuple):
    """A case's inputs, the fp64 oracle over these same low-precision inputs, and PyTorch's own answer."""

    query: Tensor
    kv: ForestKV
    oracle: Tensor
    oracle_lse: Tensor
    pytorch: Tensor
    pytorch_lse: Tensor


@lru_cache(maxsize=4)
def make_problem(case: Case, device: str) -> Problem:
    query, kv = make_inputs(
        case.forest(),
        case.suffix_lengths(),
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        queries=case.queries,
        dtype=case.dtype,
        device=device,
    )
    scoring = case.scoring(device)
    oracle, oracle_lse = reference.forest_attention(query, kv, **scoring)
    yardstick = pytorch_attention(query, kv, **scoring)
    return Problem(query, kv, oracle, oracle_lse, yardstick, pytorch_lse(query, kv, **scoring))


class Errors(NamedTuple):
    """How far a tensor lies from the oracle."""

    max_abs: float
    relative_frobenius: float


def errors(actual: Tensor, oracle: Tensor) -> Errors:
    difference = actual.double() - oracle
    tiny = torch.finfo(torch.float64).tiny
    return Errors(difference.abs().max().item(), (difference.norm() / oracle.norm().clamp_min(tiny)).item())


def assert_error_rule(actual: Tensor, pytorch: Tensor, oracle: Tensor, lse: Tensor | None = None) -> None:
    """`actual`, rounded to the dtype of `pytorch`, errs at most twice as much as `pytorch` does, against the oracle.

    The floor is there only for cases so small that PyTorch is right to the last bit: one unit in the last place of
    the largest value, and, where `lse` is given, what a log-sum-exp of that size loses as an exponent in fp32 (a
    weight of a merge has two of them). NaN never passes.
    """
    assert actual.shape == oracle.shape == pytorch.shape
    ours, theirs = errors(actual.to(pytorch.dtype), oracle), errors(pytorch, oracle)
    floor = torch.finfo(pytorch.dtype).eps
    if lse is not None:
        floor += 2 * torch.finfo(torch.float32).eps * lse.abs().max().item()
    for name, error, yardstick, least in (
        ("max abs error", ours.max_abs, theirs.max_abs, floor * oracle.abs().max().item()),
        ("relative Frobenius error", ours.relative_frobenius, theirs.relative_frobenius, floor / 2),
    ):
        bound = max(2 * yardstick, least)
        assert error <= bound, f"{name} {error:.3g} > {bound:.3g}; PyTorch's own is {yardstick:.3g}"


def tokens(path: Path | Span) -> list[tuple[int, int]]:
    """A path as the stored tokens it shows, ``(segment, position)`` each."""
    spans = (path,) if isinstance(path, Span) else path
    return [(span.segment, span.start + offset) for span in spans for offset in range(span.length)]


def with_every_dtype(cases: Iterable[Case]) -> list[Case]:
    return [replace(case, dtype=dtype) for case in cases for dtype in LOW_AND_FULL]


def one_context(rows: int, length: int) -> Forest:
    return Forest(rows, [Node(Span(0, 0, length), 0, rows)])


PROPERTY = settings(deadline=None, database=None, max_examples=60)
FP64 = {"rtol": 1e-11, "atol": 1e-12}


def assert_partials_close(actual: Partial | tuple[Tensor, Tensor], expected: Partial | tuple[Tensor, Tensor]) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, other, **FP64)


@st.composite
def fp64_inputs(draw: st.DrawFn, device: str = "cpu") -> tuple[Tensor, ForestKV]:
    """Any forest of up to four levels, any suffixes, any grouping of heads, and one to four queries a row."""
    rows, queries = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    forest = random_forest(draw(st.randoms(use_true_random=False)), rows, draw(st.integers(0, 4)))
    length = st.integers(queries, queries + 6)
    lengths = draw(
        st.one_of(length, length.map(lambda same: [same] * rows), st.lists(length, min_size=rows, max_size=rows))
    )
    kv_heads = draw(st.integers(1, 3))
    return make_inputs(
        forest,
        lengths,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 8, 20])),
        value_dim=draw(st.sampled_from([None, None, 12])),
        queries=queries,
        dtype=torch.float64,
        device=device,
        seed=draw(st.integers(0, 1000)),
    )


class Reads(TorchDispatchMode):
    """Counts the operators that read each watched tensor's storage, and fails one that spreads or copies it.

    To spread is to make more numbers of it than it has, even as a view; `may_copy` allows one copy, as wide as that.
    """

    def __init__(self, watched: Sequence[Tensor], may_copy: bool = False):
        super().__init__()
        self.limit = {_storage(tensor): tensor.numel() for tensor in watched}
        self.count = dict.fromkeys(self.limit, 0)
        self.may_copy = may_copy
        self.copies: list[Tensor] = []  # kept alive, so that nothing else takes their address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} & set(self.limit)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.numel()]
        for storage in read:
            for tensor in made:
                assert tensor.numel() <= self.limit[storage], f"{func} spreads shared keys or values: {tensor.shape}"
                if _storage(tensor) != storage and tensor.numel() == self.limit[storage]:
                    assert self.may_copy, f"{func} copies shared keys or values: {tensor.shape}"
                    self.copies.append(tensor)
                    self.limit[_storage(tensor)] = tensor.numel()
            if storage in self.count:
                self.count[storage] += not any(_storage(tensor) == storage for tensor in made)
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
