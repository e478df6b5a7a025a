"""One layer of a shared-context cache: node KV once, suffix KV preallocated and written in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention import triton_ops
from ..attention.autocast import cast
from ..attention.forest import Forest, Path, Span, joined
from ..attention.interface import SharedKV
from ..attention.kv import ForestKV, Segment
from .handles import DecodeKV, PrefillKV
from .origins import SuffixOrigins

_FIRST_CAPACITY = 256
"""Suffix tokens allocated at first when no bound is known or the bound is larger."""


_REMEDY = "make it with hf_fastdecode.prefill(model, ...) of this model"


@dataclass(frozen=True)
class PrefillItem:
    """A run of tokens whose keys and values one forward pass computes.

    Attributes:
        span: Where they are stored.
        context: What lies before them on their path.
    """

    span: Span
    context: Path = ()

    @property
    def position(self) -> int:
        """Position of the first token in its row."""
        return sum(span.length for span in self.context)


@dataclass
class SharedState:
    """What all layers of one cache share.

    Attributes:
        forest: Which rows attend to which spans; None while the number of rows is unknown.
        padding: By how much the rows' ``input_ids`` are wider than the longest row.
        origins: Where the tokens of suffixes lie once rows were reordered; None while each row holds its own.
        max_suffix: Most tokens a suffix will hold, if known: the bound of its allocation.
        backend: One of `backends.ALL_BACKENDS`.
        tables: What the kernels read beside keys and values.
        packed: While prefilling, the items whose tokens lie end to end in the forward pass.
        segment_lengths: Tokens of each storage segment.
    """

    forest: Forest | None = None
    padding: int = 0
    origins: SuffixOrigins | None = None
    max_suffix: int | None = None
    backend: str = "auto"
    tables: triton_ops.ForestTables = field(default_factory=triton_ops.ForestTables)
    packed: Sequence[PrefillItem] = ()
    segment_lengths: list[int] = field(default_factory=list)

    @property
    def torch_backend(self) -> str:
        """The backend for what PyTorch's operators compute, prefill always among it."""
        return "auto" if self.backend == "triton" else self.backend


class _NoTensor:
    """In the place of an attribute that holds all keys or values of other caches' layers."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: object, owner: type | None = None) -> Any:
        raise AttributeError(
            f"a SharedContextCache has no {self._name!r} of a layer: they lie in nodes and suffixes; for a decoding "
            "loop that reads them, pass past_key_values=transformers.DynamicCache() to generate"
        )

    def __set__(self, layer: object, value: object) -> None:
        """transformers' mixin sets None."""


class SharedContextLayer(CacheLayerMixin):
    """Keys and values of one layer over a forest.

    Outside prefill, ``update`` appends tokens to every row's suffix; during it, to the nodes being prefilled. Both
    return a `SharedKV` in the place of the key and value tensors.
    """

    is_sliding = False
    is_croppable = True
    keys = _NoTensor()
    values = _NoTensor()

    def __init__(self, state: SharedState):
        super().__init__()
        self.state = state
        self.segments: dict[int, Segment] = {}
        self.suffix: Segment | None = None
        self.suffix_length = 0
        # Addresses, which mean nothing once what they point at has moved.
        self.nodes: triton_ops.NodeTable | None = None
        self.own: triton_ops.SuffixTable | None = None
        self.window: int | None = None  # of the last pass, where it hid anything
        self.said = ""  # for reports: what of the last pass was not plain causal attention
        self.ran: dict[str, str] = {}  # for reports: phase -> what computed it

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[SharedKV, SharedKV]:
        """Store new keys and values.

        Args:
            key_states: ``[rows, kv_heads, queries, head_dim]``; during prefill ``[1, kv_heads, tokens, head_dim]``.
            value_states: The same shape.
            args: Ignored, as by every cache layer.
            kwargs: Ignored.

        Returns:
            The handle that the attention function attends with, twice.

        Raises:
            ValueError: What is stored is of another dtype, or of another number of rows.
        """
        key_states, value_states = cast(key_states), cast(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_dtype(key_states)
        handle: SharedKV
        if self.state.packed:
            handle = PrefillKV(self, key_states[0], value_states[0])
            self._store_nodes(key_states[0], value_states[0])
        else:
            handle = DecodeKV(self, key_states, value_states, before=self.suffix_length)
            self._make_room(key_states, value_states)
        return handle, handle

    def _check_dtype(self, keys: Tensor) -> None:
        stored = self.suffix or next(iter(self.segments.values()), None)
        if stored is not None and stored.keys.dtype != keys.dtype:
            raise ValueError(
                f"the cache holds keys in {stored.keys.dtype}, and this pass computes {keys.dtype}: the model was "
                "converted, or runs under another torch.autocast than when the cache was made; make it again"
            )

    def _store_nodes(self, keys: Tensor, values: Tensor) -> None:
        start = 0
        for span in joined(item.span for item in self.state.packed):
            stored = self.segment(span.segment, keys, values).view(span)
            stored.keys.copy_(keys[:, start : start + span.length])
            stored.values.copy_(values[:, start : start + span.length])
            start += span.length

    def segment(self, index: int, keys: Tensor, values: Tensor) -> Segment:
        """A storage segment; where it is new, made for keys and values like these ``[kv_heads, ..., head_dim]``."""
        segment = self.segments.get(index)
        if segment is None:
            length = self.state.segment_lengths[index]
            segment = _storage(keys, values, (keys.shape[0], length))
            self.segments[index] = segment
        return segment

    def _make_room(self, keys: Tensor, values: Tensor) -> None:
        """Lengthen the suffixes by the tokens of `keys`, which whatever attends writes."""
        rows, _, queries, _ = keys.shape
        if self.state.forest is None:
            self.state.forest = Forest(rows)
        if rows != self.state.forest.rows:
            raise ValueError(
                f"the cache holds {self.state.forest.rows} rows, got keys for {rows}; expand it with "
                "batch_repeat_interleave, or pass it to generate of a model that is enabled, which does"
            )
        self._check_shapes(keys, values)
        self._grow_suffix(rows, self.suffix_length + queries, keys[0], values[0])
        self.suffix_length += queries
        if self.state.origins is not None:
            self.state.origins.append(self.suffix_length)

    def _check_shapes(self, keys: Tensor, values: Tensor) -> None:
        """Refuse keys and values ``[rows, kv_heads, queries, head_dim]`` of other heads than the stored ones."""
        stored = next(iter(self.segments.values()), None) or self.suffix  # both end in [kv_heads, tokens, head_dim]
        if stored is None:
            if self.state.forest is not None and self.state.forest.nodes:
                raise ValueError(f"the model has more layers than the cache; {_REMEDY}")
            return
        for new, old in zip((keys, values), stored, strict=True):
            got, held = (new.shape[-3], new.shape[-1]), (old.shape[-3], old.shape[-1])
            if got != held:
                raise ValueError(
                    f"the cache holds {held[0]} KV heads of {held[1]} numbers, the model has {got[0]} of {got[1]}; "
                    f"{_REMEDY}"
                )

    def reserve(self, tokens: int) -> bool:
        """Make every row's suffix hold `tokens` tokens; whether storage moved.

        Raises:
            ValueError: Nothing was stored in this layer yet.
        """
        if self.state.forest is None or not self.segments:
            raise ValueError("this cache layer holds no nodes; prefill it first")
        keys, values = next(iter(self.segments.values()))
        return self._grow_suffix(self.state.forest.rows, tokens, keys, values)

    def _grow_suffix(self, rows: int, tokens: int, keys: Tensor, values: Tensor) -> bool:
        """Grow the suffix buffers when `tokens` do not fit: doubled, but not past the known bound.

        `keys` and `values` ``[kv_heads, ..., head_dim]`` say what they are made of.
        """
        capacity = 0 if self.suffix is None else self.suffix.keys.shape[2]
        if self.suffix is not None and tokens <= capacity:
            return False
        capacity = max(tokens, 2 * capacity, _FIRST_CAPACITY)
        if self.state.max_suffix is not None:
            capacity = max(tokens, min(capacity, self.state.max_suffix))
        grown = _storage(keys, values, (rows, keys.shape[0], capacity))
        if self.suffix is not None:
            grown.keys[:, :, : self.suffix_length] = self.suffix.keys[:, :, : self.suffix_length]
            grown.values[:, :, : self.suffix_length] = self.suffix.values[:, :, : self.suffix_length]
        self.suffix, self.nodes, self.own = grown, None, None
        return True

    def forest_kv(self) -> ForestKV:
        """Keys and values as PyTorch's operators take them; suffixes are copied where rows were reordered.

        Raises:
            ValueError: Nothing was stored in this layer yet.
        """
        if self.state.forest is None or self.suffix is None:
            raise ValueError("this cache layer holds no suffix yet; run a forward pass with the cache first")
        return ForestKV(self.state.forest, self.segments, self._suffix_in_order(), self.suffix_length)

    def _suffix_in_order(self) -> Segment:
        """The suffixes by row: the storage itself, or a copy where rows were reordered."""
        assert self.suffix is not None
        if self.state.origins is None:
            return self.suffix
        return Segment(*map(self.state.origins.gather, self.suffix))

    def copied(self, spans: Iterable[Span]) -> Segment:
        """Keys and values of stored spans, copied end to end: each ``[kv_heads, tokens, head_dim]``."""
        views = [self.segments[span.segment].view(span) for span in spans]
        with torch.inference_mode(False), torch.no_grad():  # as `_storage`
            return Segment(*(torch.cat(parts, dim=1) for parts in zip(*views, strict=True)))

    def suffixes_as_segment(self) -> Segment:
        """All rows' suffixes copied end to end: row ``i`` is tokens ``i * length`` up to ``(i + 1) * length``."""
        if self.suffix is None:
            raise ValueError("this cache layer holds no suffix yet")
        wanted = torch.is_grad_enabled()  # which leaving inference mode would turn on
        with torch.inference_mode(False), torch.set_grad_enabled(wanted):  # as `_storage`
            keys, values = (
                part[:, :, : self.suffix_length].transpose(0, 1).clone(memory_format=torch.contiguous_format)
                for part in self._suffix_in_order()
            )
        return Segment(keys.flatten(1, 2), values.flatten(1, 2))

    def select_rows(self, rows: Tensor) -> None:
        """Copy the suffixes of these rows, which may repeat, to storage of as many rows."""
        if self.suffix is not None:
            rows, before, capacity = rows.to(self.device), self._suffix_in_order(), self.suffix.keys.shape[2]
            self.suffix = _storage(*before, (len(rows), before.keys.shape[1], capacity))
            self.nodes = self.own = None
            for kept, part in zip(self.suffix, before, strict=True):
                kept[:, :, : part.shape[2]].copy_(part.index_select(0, rows))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in this layer; 0 before anything is stored."""
        stored = self.suffix or next(iter(self.segments.values()), None)
        if stored is None:
            return 0
        keys, values = stored
        heads = keys.shape[1] if keys.dim() == 4 else keys.shape[0]
        return heads * (keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size())

    @property
    def batch_size(self) -> int:
        return self.state.forest.rows if self.state.forest is not None else -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        context = 0 if self.state.forest is None else max(self.state.forest.context_lengths, default=0)
        return context + self.state.padding + self.suffix_length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.segments, self.suffix, self.suffix_length, self.is_initialized = {}, None, 0, False
        self.nodes = self.own = None

    def offload(self) -> None:
        raise NotImplementedError("a SharedContextCache cannot be offloaded; use transformers' DynamicCache for that")

    prefetch = offload


def _storage(keys: Tensor, values: Tensor, shape: Sequence[int]) -> Segment:
    """Room for keys and values of so many heads and tokens.

    Ordinary tensors within the caller's inference mode too: there, others could be written only within it.
    """
    with torch.inference_mode(False):
        return Segment(*(part.new_empty(*shape, part.shape[-1]) for part in (keys, values)))
