"""Token storage: the tensors of one layer's tokens, and what all layers share of suffixes (lengths, ids, order)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..attention.forest import Span
from ..attention.kv import Segment, SuffixLengths
from ..attention.overrides import autocast_dtype, cast
from ..parallel.shards import WHOLE, Shard

_FIRST_CAPACITY = 256
"""Initial suffix capacity in tokens, unless a smaller bound is known."""


class TokenStorage:
    """The keys and values of one layer's tokens.

    A token consists of *parts*, here keys and values, each in its own tensor. Node tokens are stored in *segments*;
    appended tokens in *suffixes*, preallocated and written in place. Subclasses define another token layout by
    overriding `keys_and_values`, `nodes_for_steps` and `for_steps`, or `as_nodes` and the examples if suffixes
    have one of their own.

    Attributes:
        segments: Segments by number; each part ``[heads, tokens, width]``.
        suffix: Each part ``[rows, heads, capacity, width]``; None before the first append.
        version: Replaced when storage moves, which invalidates earlier addresses.
        takes_padded: Whether captured prefill can store tokens.
        kernels_read_contexts: Whether its tokens can be stored contexts of captured prefill.
        captured_in_place: Whether a captured step reads suffixes where they lay at its capture, so that it serves this
            storage alone until it moves; else it finds them by `StepTables`.
    """

    captured_in_place: ClassVar[bool] = False
    takes_padded: ClassVar[bool] = True
    kernels_read_contexts: ClassVar[bool] = True

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.suffix: Segment | None = None
        self.version = object()

    def parts_of(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Segment:
        """Convert keys and values of a forward pass, ``[rows, kv_heads, tokens, head_dim]``, to parts of a token.

        Takes all arguments of ``cache.update``. Parts are ``[rows, heads, tokens, width]`` each.
        """
        if autocast_dtype(keys.device) is None:
            return Segment(keys, values)
        return Segment(cast(keys), cast(values))

    def describe(self, suffix: Segment) -> None:
        """Note the parts of suffixes, ``[rows, heads, tokens, width]`` each, where nodes have others."""

    def keys_and_values(self, parts: Segment) -> Segment:
        """Keys and values of stored parts, ``[heads, tokens, width]`` each, as passes of prefill attend to them."""
        return parts

    def read_by_kernels(self, parts: Segment) -> Segment:
        """Stored parts, ``[..., heads, tokens, width]`` each, as the decode kernels read them, in the same memory."""
        return parts

    def nodes_for_steps(self) -> Mapping[int, Segment]:
        """Keys and values of segments, ``[kv_heads, tokens, head_dim]`` each, for PyTorch's operators in steps."""
        return self.segments

    def for_steps(self, origins: SuffixOrigins | None) -> tuple[Mapping[int, Segment], Segment]:
        """`nodes_for_steps`, and suffixes in row order, ``[rows, kv_heads, capacity, head_dim]`` each."""
        return self.segments, self.suffix if origins is None and self.suffix else self.ordered_suffix(origins)

    def empty(self) -> TokenStorage:
        return type(self)()

    def as_nodes(self, parts: Segment, positions: Tensor, dtype: torch.dtype | None = None) -> Segment:
        """Suffix tokens ``[rows, heads, tokens, width]`` at positions ``[rows, tokens]`` in the layout of nodes.

        Nodes made from another layout are of this dtype; if None, of that of the nodes held, or else of the model.
        """
        return parts

    @property
    def node_example(self) -> Segment | None:
        """Any parts of the nodes' layout, for heads, widths and dtype; each ends in ``[heads, tokens, width]``."""
        return next(iter(self.segments.values()), None) or self.suffix

    @property
    def suffix_example(self) -> Segment | None:
        """Any parts of the suffixes' layout, as `node_example`."""
        return self.suffix or next(iter(self.segments.values()), None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per node token in this layer; 0 while it holds none."""
        return _bytes_per_token(self.node_example)

    @property
    def suffix_bytes_per_token(self) -> int:
        """Bytes per suffix token in this layer; 0 while it holds none."""
        return _bytes_per_token(self.suffix_example)

    @property
    def suffix_bytes(self) -> int:
        return sum(part.nbytes for part in self.suffix or ())

    @property
    def capacity(self) -> int:
        return 0 if self.suffix is None else self.suffix[0].shape[2]

    def tensors(self) -> list[Tensor]:
        stored = [*self.segments.values(), *([self.suffix] if self.suffix is not None else [])]
        return [part for parts in stored for part in parts]

    def segment(self, number: int, length: int, like: Segment) -> Segment:
        """Get a segment, or allocate it for `length` tokens with the shape of `like`, ``[heads, ..., width]``."""
        if number not in self.segments:
            self.segments[number] = _map(like, lambda part: _allocate(part, (part.shape[0], length)))
        return self.segments[number]

    def write_nodes(self, spans: Iterable[Span], new: Segment) -> None:
        """Write consecutive tokens, each part ``[heads, tokens, width]``, to spans of segments."""
        start = 0
        for span in spans:
            run = Span(0, start, span.length)
            for stored, part in zip(self.segments[span.segment].view(span), new.view(run), strict=True):
                stored.copy_(part)
            start += span.length

    def copied(self, spans: Iterable[Span]) -> Segment:
        """Copy spans into one contiguous segment: each part ``[heads, tokens, width]``."""
        views = [self.segments[span.segment].view(span) for span in spans]
        with torch.inference_mode(False), torch.no_grad():  # as `_allocate`
            return Segment._make(torch.cat(parts, dim=1) for parts in zip(*views, strict=True))

    def grown_capacity(self, tokens: int, most: int | None) -> int:
        """Tokens per suffix that `grow` makes room for."""
        if self.suffix is not None and tokens <= self.capacity:
            return self.capacity
        capacity = max(tokens, 2 * self.capacity, _FIRST_CAPACITY)
        return capacity if most is None else max(tokens, min(capacity, most))

    def grow(self, rows: int, tokens: int, used: int, like: Segment, most: int | None) -> None:
        """Allocate capacity for `tokens` suffix tokens per row, doubling when full.

        `like` are example parts, each ending in ``[heads, tokens, width]``; `most` is a bound for doubling, if known.
        """
        if self.suffix is not None and tokens <= self.capacity:
            return
        capacity = self.grown_capacity(tokens, most)
        grown = _map(like, lambda part: _allocate(part, (rows, part.shape[-3], capacity)))
        for new, old in zip(grown, self.suffix or (), strict=False):
            new[:, :, :used] = old[:, :, :used]
        self.replace_suffixes(grown)

    def begin_suffixes(self, rows: int, longest: int, like: Segment, most: int | None) -> None:
        """Allocate suffixes that begin with up to `longest` tokens of a prompt, unless there are some; see `grow`."""
        if self.suffix is None:
            room = longest + _FIRST_CAPACITY
            self.grow(rows, room if most is None else max(longest, min(room, most)), 0, like, most)

    def write_suffix(self, row: int, start: int, new: Segment) -> None:
        """Write tokens of one row, each part ``[heads, tokens, width]``, to its suffix from token `start` on."""
        assert self.suffix is not None
        for stored, part in zip(self.suffix, new, strict=True):
            stored[row, :, start : start + part.shape[1]] = part

    def suffix_as_node(self, row: int, span: Span, first: int, dtype: torch.dtype) -> Segment:
        """Tokens of one row's suffix as keys and values, ``[heads, tokens, head_dim]`` each.

        The span's number of a segment says nothing; `first` is the position of the suffix's first token.
        """
        assert self.suffix is not None
        stored = _map(self.suffix, lambda part: part[row : row + 1, :, span.start : span.stop])
        positions = first + torch.arange(span.start, span.stop, device=stored[0].device)
        nodes = self.as_nodes(stored, positions[None], dtype)
        return self.keys_and_values(_map(nodes, lambda part: part[0]))

    def append(self, new: Segment, before: SuffixLengths, shard: Shard = WHOLE) -> None:
        """Write tokens, each part ``[rows, heads, tokens, width]``, that the shard stores, after those `before`."""
        assert self.suffix is not None
        if shard is not WHOLE:
            self._append_stored(new, before, shard)
            return
        for stored, part in zip(self.suffix, new, strict=True):
            rows, _, tokens, _ = part.shape
            if before.per_row is None:
                stored[:, :, before.longest : before.longest + tokens] = part
            else:
                at = before.per_row.to(part.device)[:, None] + torch.arange(tokens, device=part.device)
                stored[torch.arange(rows, device=part.device)[:, None], :, at] = part.transpose(1, 2)

    def _append_stored(self, new: Segment, before: SuffixLengths, shard: Shard) -> None:
        """`append` of those tokens that this process stores; waits for the device if it alone knows the lengths."""
        assert self.suffix is not None
        rows, _, tokens, _ = new[0].shape
        lengths = torch.full((rows,), before.longest, device="cpu") if before.per_row is None else before.per_row.cpu()
        whole = lengths[:, None].long() + torch.arange(tokens, device="cpu")
        row, token = (index.to(new[0].device) for index in shard.stores(whole).nonzero(as_tuple=True))
        at = shard.counts(whole).to(row.device)[row, token]
        for stored, part in zip(self.suffix, new, strict=True):
            stored[row, :, at] = part[row, :, token]

    def ordered_suffix(self, origins: SuffixOrigins | None) -> Segment:
        """Suffixes in row order: the storage itself, or a copy if rows were reordered."""
        if self.suffix is None:
            raise ValueError("this cache layer holds no suffix yet; run a forward pass with the cache first")
        return self.suffix if origins is None else _map(self.suffix, origins.gather)

    def suffixes_as_segment(
        self, length: int, origins: SuffixOrigins | None, starts: Sequence[int], shard: Shard
    ) -> Segment:
        """Copy the first `length` tokens of all suffixes into one segment, row ``i``'s from ``i * length`` on.

        Suffixes begin at the positions `starts`; the segment is what the shard stores of the one with all tokens.
        """
        wanted = torch.is_grad_enabled()  # leaving inference mode would enable gradients
        with torch.inference_mode(False), torch.set_grad_enabled(wanted):  # as `_allocate`

            def side_by_side(part: Tensor) -> Tensor:
                return part.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1, 2)

            stored = shard.count(length)
            suffixes = _map(self.ordered_suffix(origins), lambda part: part[:, :, :stored])
            positions = torch.tensor(starts, dtype=torch.long, device="cpu")[:, None] + shard.positions(stored)
            return _map(self.as_nodes(suffixes, positions.to(suffixes[0].device)), side_by_side)

    def select_rows(self, rows: Tensor, origins: SuffixOrigins | None) -> None:
        """Keep the suffixes of these rows, which may repeat, in newly allocated storage."""
        if self.suffix is None:
            return
        capacity, before = self.capacity, self.ordered_suffix(origins)
        rows = rows.to(before[0].device)
        selected = _map(before, lambda part: _allocate(part, (len(rows), part.shape[1], capacity)))
        for new, part in zip(selected, before, strict=True):
            new[:, :, : part.shape[2]].copy_(part.index_select(0, rows))
        self.replace_suffixes(selected)

    def replace_segments(self, segments: dict[int, Segment]) -> None:
        self.segments = segments
        self.version = object()

    def replace_suffixes(self, suffix: Segment | None) -> None:
        self.suffix = suffix
        self.version = object()


class StorageOfLayer(TokenStorage):
    """A storage whose tokens the model's layer turns into keys and values: that of the latest pass, not kept alive."""

    def __init__(self, layer: ref[Any] | None):
        super().__init__()
        self.layer = layer

    def known_layer(self, stored: str) -> Any:
        """The layer; raises ValueError, which names what is stored, where the model is gone from this process."""
        layer = None if self.layer is None else self.layer()
        if layer is None:
            raise ValueError(
                f"this cache stores {stored}, and the model whose layers make them is gone; keep the model, or "
                "prefill the whole text again"
            )
        return layer

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"layer": None}  # weak references cannot be pickled

    def __deepcopy__(self, memo: dict[int, Any]) -> StorageOfLayer:
        twin = memo[id(self)] = copy.copy(self)
        vars(twin).update(copy.deepcopy(self.__getstate__(), memo) | {"layer": self.layer})
        return twin


def _bytes_per_token(parts: Segment | None) -> int:
    return sum(part.shape[-3] * part.shape[-1] * part.element_size() for part in parts or ())


def _map(parts: Segment, change: Callable[[Tensor], Tensor]) -> Segment:
    return Segment._make(map(change, parts))


def _allocate(part: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor with the part's width and dtype; never an inference tensor, which only inference mode may write."""
    with torch.inference_mode(False):
        return part.new_empty(*shape, part.shape[-1])


class SuffixOrigins:
    """Maps each token of each row's suffix to the storage row that holds its keys and values.

    New tokens go to the row's own storage row. When beam search reorders rows at every step, only this table is
    permuted, once for all layers; keys and values stay in place. Where suffixes are divided between processes, the
    table is of those tokens that this one stores (`shard`). Lengths are those of whole suffixes.
    """

    def __init__(self, rows: int, length: int, device: torch.device, shard: Shard = WHOLE):
        self._shard = shard
        with torch.inference_mode(False):  # inference tensors are read-only outside inference mode
            table = torch.empty(rows, max(_FIRST_CAPACITY, shard.count(length)), dtype=torch.int32, device=device)
        self._tables = {device: table}  # a model may span several devices
        self._length = 0
        self.append(length)

    def append(self, length: int) -> None:
        """Extend every row to `length` tokens; new ones map to the row's own storage row."""
        length = self._shard.count(length)
        if length <= self._length:  # already done by another layer of this pass
            return
        for device, table in self._tables.items():
            own = torch.arange(len(table), dtype=torch.int32, device=device)[:, None]
            if length > table.shape[1]:
                with torch.inference_mode(False):
                    grown = table.new_empty(len(table), max(length, 2 * table.shape[1]))
                grown[:, : self._length] = table[:, : self._length]
                self._tables[device] = table = grown
            table[:, self._length : length] = own
        self._length = length

    def truncate(self, length: int) -> None:
        self._length = min(self._length, self._shard.count(length))

    def select(self, rows: Tensor) -> None:
        """Replace row ``i`` by row ``rows[i]``, for `rows` ``[rows]`` int64 of unchanged length."""
        for table in self._tables.values():
            table.copy_(table.index_select(0, rows.to(table.device)))

    def table(self, device: torch.device) -> Tensor:
        """The table on a device, ``[rows, capacity]`` int32; entries beyond the length are undefined."""
        if device not in self._tables:
            self._tables[device] = next(iter(self._tables.values())).to(device)
        return self._tables[device]

    def copy_to(self, other: Tensor) -> None:
        """Write the known part of the table to the first rows of another, ``[>= rows, >= length]`` int32."""
        table = self.table(other.device)[:, : self._length]
        other[: len(table), : self._length].copy_(table)

    def gather(self, stored: Tensor) -> Tensor:
        """Copy each row's tokens, in order, from their storage rows.

        It takes ``[rows, ..., capacity, head_dim]`` by storage row, or ``[rows, capacity]`` for scalars.
        """
        table = self.table(stored.device)[:, : self._length].long()
        if stored.dim() == 2:
            return stored[:, : self._length].gather(0, table)
        tokens = torch.arange(self._length, device=stored.device)
        return stored.movedim(-2, 1)[table, tokens].movedim(1, -2)


_MOST_PARTS = 256
"""Parts, usually of one step each, after which they are joined."""


class SuffixIds:
    """Ids of the tokens appended to each row's suffix, up to the first pass that gave none (``inputs_embeds``).

    They are parts ``[rows, tokens]`` int64, one after the other, of `length` tokens in all, as in the longest suffix.
    """

    def __init__(self, parts: tuple[Tensor, ...] = (), length: int | None = None):
        self._parts = parts
        self.length = sum(part.shape[1] for part in parts) if length is None else length

    def known(self, rows: int) -> Tensor:
        """All known ids ``[rows, length]``; undefined beyond a row's own length."""
        if not self._parts:
            return torch.empty(rows, 0, dtype=torch.long, device="cpu")
        device = self._parts[-1].device
        return torch.cat([part.to(device) for part in self._parts], dim=1)

    def plus(self, ids: Tensor, before: SuffixLengths) -> SuffixIds:
        """These followed by ids ``[rows, tokens]``, each row's after its own tokens `before`.

        Ids after a gap are not kept.
        """
        if self.length != before.longest:
            return self
        ids = ids.to(torch.long, copy=True)  # may be a view of a tensor that the caller changes
        if before.per_row is None:
            few = len(self._parts) < _MOST_PARTS
            parts = self._parts if few else (self.known(len(ids)),)
            return SuffixIds((*parts, ids), self.length + ids.shape[1])
        known = self.known(len(ids)).to(ids.device)
        known = torch.cat([known, ids.new_zeros(ids.shape)], dim=1)
        lengths = before.per_row.to(ids.device, non_blocking=True).long()
        at = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        return SuffixIds((known.scatter_(1, at, ids),))

    def first(self, tokens: int) -> SuffixIds:
        if tokens >= self.length or not self._parts:
            return self
        return SuffixIds((self.known(len(self._parts[0]))[:, :tokens],))

    def select(self, rows: Tensor) -> SuffixIds:
        """The ids of these rows, ``[rows]`` int64 on any device."""
        if not self._parts:
            return self
        known = self.known(len(self._parts[0]))
        return SuffixIds((known.index_select(0, rows.to(known.device)),))


class Suffixes:
    """State of the suffixes that all layers share; keys and values are in each layer's `TokenStorage`.

    Attributes:
        lengths: Tokens in each row's suffix, not counting those of a forward pass in progress.
        ids: Their ids, as far as they are known.
        origins: Index table of reordered suffixes; None while every row's tokens are in its own storage row.
        longest_prompt: Tokens of prompts that the longest suffix begins with.
    """

    def __init__(self) -> None:
        self.lengths = SuffixLengths()
        self.ids = SuffixIds()
        self.origins: SuffixOrigins | None = None
        self.longest_prompt = 0

    @classmethod
    def of(cls, tokens: Sequence[Tensor]) -> Suffixes:
        """Suffixes that begin with these tokens of prompts, ``[length]`` int64 for each row, on the CPU."""
        suffixes, lengths = cls(), [len(own) for own in tokens]
        suffixes.ids = SuffixIds((pad_sequence(list(tokens), batch_first=True),))
        suffixes.lengths = SuffixLengths.known(torch.tensor(lengths, dtype=torch.int32, device="cpu"))
        suffixes.longest_prompt = suffixes.longest
        return suffixes

    @property
    def longest(self) -> int:
        """Tokens in the longest suffix, or an upper bound; see `SuffixLengths`."""
        return self.lengths.longest

    @property
    def in_order(self) -> bool:
        """Whether each suffix is in its own storage row, as own nodes need."""
        return self.origins is None

    def per_row(self, rows: int) -> Tensor:
        """Tokens in each row's suffix: ``[rows]`` int64, on the CPU."""
        if self.lengths.per_row is not None:
            return self.lengths.per_row.long().cpu()
        return torch.full((rows,), self.longest, device="cpu")

    def restore(self, lengths: SuffixLengths, ids: SuffixIds) -> None:
        """Return to an earlier state, after a forward pass that failed."""
        self.lengths, self.ids = lengths, ids
        if self.origins is not None:
            self.origins.truncate(self.longest)

    def drop(self, counts: Tensor, storages: Sequence[TokenStorage]) -> None:
        """Remove the last ``counts[i]`` tokens of row ``i``, of all where it has fewer.

        Counts on a GPU are not read by the host: `longest` stays as it was.
        """
        bound = self.longest
        before = self.lengths.per_row
        counts = counts.clamp_min(0)
        left = (bound - counts if before is None else before.to(counts.device) - counts).clamp_min(0).int()
        if counts.is_cuda:
            self.lengths = SuffixLengths(bound, left)
        else:
            self.lengths = SuffixLengths.known(left)
            bound = self.longest
        self.ids = self.ids.first(bound)
        if self.origins is None:
            return
        if self.lengths.per_row is None:
            self.origins.truncate(bound)
        else:  # new tokens go to places that the index table gives to other rows
            self._copy_rows(torch.arange(len(counts), device="cpu"), storages)

    def select(self, rows: Tensor, before: int, storages: Sequence[TokenStorage], shard: Shard) -> None:
        """Replace row ``i`` by row ``rows[i]``, for `rows` ``[rows]`` int64 on the CPU.

        If the number of rows is unchanged, keys and values are not copied, see `SuffixOrigins`.
        """
        per_row = self.lengths.per_row
        if per_row is not None:
            kept = per_row[rows.to(per_row.device)]
            bounds = self.longest, kept, self.lengths.shortest
            self.lengths = SuffixLengths(*bounds) if kept.is_cuda else SuffixLengths.known(kept)
        self.ids = self.ids.select(rows).first(self.longest)  # the longest row may not be among them
        if per_row is not None or len(rows) != before:
            self._copy_rows(rows, storages)
        elif self.longest and storages:  # a model with states alone has none
            if self.origins is None:
                self.origins = SuffixOrigins(before, self.longest, storages[0].tensors()[0].device, shard)
            self.origins.select(rows)

    def restart(self, rows: Tensor, before: int, storages: Sequence[TokenStorage]) -> None:
        """Empty the suffixes of these rows, ``[rows]`` int64 on the CPU, of `before` in all.

        Ids of tokens are not known from then on.
        """
        counts = torch.zeros(before, dtype=torch.int64, device="cpu")
        counts[rows] = self.per_row(before)[rows]
        self.drop(counts, storages)
        self.ids = SuffixIds()

    def _copy_rows(self, rows: Tensor, storages: Sequence[TokenStorage]) -> None:
        for storage in storages:
            storage.select_rows(rows, self.origins)
        self.origins = None
