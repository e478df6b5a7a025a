"""Keys and values of one layer over a forest: what attention takes, returns and merges, and placeholders for tensors.

Attention of a query over a set of keys is a *partial* ``(out, lse)``: the softmax-weighted mean of the values and the
natural logarithm of the softmax denominator. Partials over disjoint key sets merge into the partial over their union,
in any order and grouping, up to rounding (Hydragen, section 3.1; LeanAttention, section 4; Tree Attention, section 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import Unsupported
from .forest import Forest, Span


class Partial(NamedTuple):
    """Attention over a set of keys, with the log-sum-exp by which it merges.

    Attributes:
        out: ``[..., head_dim]``, fp32 (fp64 for fp64 inputs): the weighted mean of the values; 0 for an empty set.
        lse: ``[...]``, the same dtype: natural log of the sum of exponentiated scores; ``-inf`` for an empty set.
    """

    out: Tensor
    lse: Tensor


def empty_partial(
    shape: tuple[int, ...], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Partial:
    """The identity of `merge`: attention over no keys, ``(0, -inf)``, for an ``out`` of the given shape."""
    out = torch.zeros(shape, device=device, dtype=dtype)
    return Partial(out, torch.full(shape[:-1], -torch.inf, device=device, dtype=dtype))


def unwritten_partial(query: Tensor, value_dim: int) -> Partial:
    """Memory for attention of queries ``[..., head_dim]``, contiguous: ``out`` in their dtype, ``lse`` in fp32."""
    out = torch.empty(*query.shape[:-1], value_dim, dtype=query.dtype, device=query.device)
    return Partial(out, torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device))


def merge(first: Partial, *rest: Partial) -> Partial:
    """Merge partials over disjoint key sets, of broadcastable shapes and one dtype, into the partial over their union.

    ``lse = logaddexp(lse_a, lse_b)`` and ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``, where an
    empty part (``lse = -inf``) has weight 0, and the union of empty sets stays empty. One alone is returned as it is.
    """
    merged = first
    for part in rest:
        # exp(lse_b - lse) is sigmoid(lse_b - lse_a), and the weights add up to 1. Where both sets are empty,
        # -inf - (-inf) would be nan; the clamp makes it -inf, and changes no other weight.
        lse = merged.lse
        weight = torch.sigmoid(part.lse - lse.clamp_min(torch.finfo(lse.dtype).min))
        merged = Partial(torch.lerp(merged.out, part.out, weight.unsqueeze(-1)), torch.logaddexp(lse, part.lse))
    return merged


@dataclass(frozen=True)
class Scoring:
    """Score options of a layer.

    Attributes:
        scale: Factor on the scores.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        window: When given, a query sees only the last ``window`` tokens up to and including its own.
        sinks: ``[heads]`` fp32: when given, one more score per query head in the softmax's denominator, without
            a value.
        distances: ``[heads, distances]`` fp32: when given, what is added to the score of a key by how many tokens it
            is before the query; the last for all farther ones.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    distances: Tensor | None = None

    @property
    def report_note(self) -> str:
        """Text for reports: what there is beyond causal attention; empty if nothing."""
        window = "" if self.window is None else f", within a window of {self.window} tokens"
        softcap = "" if self.softcap is None else f", with a soft cap of {self.softcap:g}"
        biases = "" if self.distances is None else ", with biases by distance"
        return window + softcap + ("" if self.sinks is None else ", with sinks") + biases


class Segment(NamedTuple):
    """Keys and values of stored tokens, of equal strides, the last dimension contiguous.

    Those of a run of tokens are ``[kv_heads, tokens, head_dim]`` each; those of all rows' suffixes are
    ``[rows, kv_heads, capacity, head_dim]`` each, and have no `view`.
    """

    keys: Tensor
    values: Tensor

    def view(self, span: Span) -> Segment:
        """A view of the span's tokens."""
        if span.start == 0 and span.stop == self.keys.shape[1]:
            return self
        return Segment(self.keys[:, span.start : span.stop], self.values[:, span.start : span.stop])


@dataclass(frozen=True, eq=False)
class SuffixLengths:
    """Tokens in each row's suffix, with bounds that the host knows.

    Attributes:
        longest: At least the longest suffix's tokens.
        per_row: ``[rows]`` int32, on the CPU if the host knows them; None while all suffixes have `longest` tokens.
            Other lengths are always another tensor, so equal lengths are recognized without reading it.
        shortest: At most the shortest suffix's tokens.
    """

    longest: int = 0
    per_row: Tensor | None = None
    shortest: int = 0

    @classmethod
    def of(cls, length: int) -> SuffixLengths:
        """All suffixes of one length."""
        return cls(length, None, length)

    @classmethod
    def known(cls, per_row: Tensor) -> SuffixLengths:
        """Lengths that the host knows, ``[rows]`` int32 on the CPU."""
        lengths = per_row.tolist()
        shortest, longest = min(lengths, default=0), max(lengths, default=0)
        return cls(longest, None if shortest == longest else per_row, shortest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SuffixLengths):
            return NotImplemented
        return self.longest == other.longest and self.per_row is other.per_row

    def plus(self, tokens: int) -> SuffixLengths:
        """These with `tokens` more in every suffix."""
        per_row = None if self.per_row is None else self.per_row + tokens
        return SuffixLengths(self.longest + tokens, per_row, self.shortest + tokens)

    def on_host(self) -> int | list[int]:
        """These lengths for `ForestKV`; synchronizes with the device if `per_row` is given."""
        return self.longest if self.per_row is None else self.per_row.tolist()


@dataclass(frozen=True)
class ForestKV:
    """One layer's keys and values: each node's once, and each row's suffix.

    Attributes:
        forest: Which rows attend to which spans.
        segments: Storage that the forest's spans point into, by number.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each of keys and values; row ``i`` holds
            ``suffix_lengths[i]`` tokens from the start; the rest is undefined.
        suffix_lengths: Tokens in each row's suffix; one number when all are equal.
        seen: ``[rows or 1, queries]`` int64, on the CPU: how many tokens of its row's suffix each query of the step
            sees; None where suffixes end with the queries' own tokens, which then see those up to theirs. Given where
            suffixes are divided between processes.
    """

    forest: Forest
    segments: Sequence[Segment] | Mapping[int, Segment]
    suffix: Segment
    suffix_lengths: int | Sequence[int]
    seen: Tensor | None = None

    @property
    def suffix_bounds(self) -> tuple[int, int]:
        """The shortest and the longest suffix, in tokens."""
        if isinstance(self.suffix_lengths, int):
            return self.suffix_lengths, self.suffix_lengths
        return min(self.suffix_lengths, default=0), max(self.suffix_lengths, default=0)

    def lengths(self) -> list[int]:
        """Tokens in each row's suffix."""
        if isinstance(self.suffix_lengths, int):
            return [self.suffix_lengths] * self.forest.rows
        return list(self.suffix_lengths)

    def seen_by(self, queries: int) -> Tensor:
        """How many tokens of its row's suffix each of a row's last `queries` sees: ``[rows, queries]`` int64, CPU."""
        if self.seen is not None:
            return self.seen.expand(self.forest.rows, -1)
        lengths = torch.tensor(self.lengths(), dtype=torch.long, device="cpu")
        return lengths[:, None] - queries + 1 + torch.arange(queries, device="cpu")

    def node(self, span: Span) -> Segment:
        """Keys and values of a span, each ``[kv_heads, length, head_dim]``."""
        return self.segments[span.segment].view(span)


class ExpandedKV(Protocol):
    """Expanded nodes of one layer, as a step attends to them."""

    def attend(self, query: Tensor, scoring: Scoring, own: Partial) -> Tensor:
        """Attend to the nodes of each row, without a causal rule, and merge with its other keys.

        Takes queries ``[rows, heads, queries, key_dim]`` and the partial of the other keys, whose ``out`` is in the
        query's dtype; returns ``[rows, heads, queries, value_dim]`` in that dtype.
        """
        ...


class NotATensorError(Unsupported, AttributeError):
    """Code that expects tensors got the placeholder of a shared-context cache."""

    def __init__(self, what: str, whose: str):
        super().__init__(
            f"{what}: {whose} of a SharedContextCache are not tensors",
            "call the model itself (not a submodule) after hf_fastdecode.enable(model)",
        )


class _NotATensor:
    _what: ClassVar[str]  # the tensors that it replaces

    def __getattr__(self, name: str) -> Any:
        raise NotATensorError(repr(name), self._what)  # reached only for attributes that do not exist

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotATensorError(getattr(func, "__name__", repr(func)), cls._what)


class SharedKV(_NotATensor, ABC):
    """Returned by ``update`` of a shared-context cache layer instead of key and value tensors.

    Attributes:
        stored_window: Last tokens that transformers' cache keeps in this layer; None for all.
        device: Where keys and values are.
        reads_latents: Whether it attends to latents, by queries that `patches.architectures.latent_attention` makes.
        expanded: Nodes that it does not attend to, as keys and values; None if there are none.
    """

    _what = "keys and values"
    stored_window: int | None = None
    device: torch.device
    reads_latents: bool = False
    expanded: ExpandedKV | None = None

    def to(self, device: torch.device, **kwargs: Any) -> SharedKV:
        """Itself, for layers that read what others store, on the same device; raises `NotATensorError` for others."""
        if device != self.device:
            raise NotATensorError(f"to({device})", self._what)
        return self

    @abstractmethod
    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend ``query`` ``[batch, heads, queries, head_dim]``; returns ``[batch, queries, heads, head_dim]``."""

    def attend_as_stored(self, query: Tensor, scoring: Scoring) -> Partial:
        """`attend` with its log-sum-exp, in steps with `expanded` nodes: ``out`` in the query's dtype."""
        raise NotImplementedError


class CrossKV(SharedKV):
    """Keys and values of an encoder's output, returned by layers of a cache for cross-attention."""

    @abstractmethod
    def show(self, mask: Tensor | None) -> None:
        """Set the tokens of each input that queries see, ``[inputs, tokens]`` bool; all of them when None."""


@dataclass(frozen=True)
class SlidingWindow(_NotATensor):
    """Returned by `shared_context_mask` instead of a sliding-window mask tensor."""

    _what: ClassVar[str] = "masks"
    size: int


class CausalMask(_NotATensor):
    """Returned by `shared_context_mask` to code that computes with its mask even where nothing is hidden."""

    _what = "masks"
    ndim = 0

    def to(self, *args: Any, **kwargs: Any) -> CausalMask:
        """Itself."""
        return self


@dataclass(frozen=True)
class BidirectionalMask(_NotATensor):
    """Returned by `shared_context_mask` for attention without a causal rule, which cross-attention alone may compute.

    Decoders of the BART family make such a mask for an encoder also where they have none. `shown` are the tokens that
    it shows, ``[inputs, tokens]`` bool; all of them when None.
    """

    _what: ClassVar[str] = "masks"
    shown: Tensor | None
