"""What all layers of one cache share of its suffixes: their lengths, ids of tokens and order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..attention.kv import SuffixLengths
from ..parallel.shards import Shard
from .storage import SuffixOrigins, TokenStorage

_MOST_PARTS = 256
"""Parts, usually of one step each, after which they are joined."""


class SuffixIds:
    """Ids of the tokens appended to each row's suffix, up to the first pass that gave none (``inputs_embeds``).

    They are parts ``[rows, tokens]`` int64, one after the other.
    """

    def __init__(self, parts: tuple[Tensor, ...] = ()):
        self._parts = parts

    @property
    def length(self) -> int:
        """Known tokens per row, up to the longest suffix."""
        return sum(part.shape[1] for part in self._parts)

    def known(self, rows: int) -> Tensor:
        """All known ids ``[rows, length]``; undefined beyond a row's own length."""
        if not self._parts:
            return torch.empty(rows, 0, dtype=torch.long, device="cpu")
        device = self._parts[-1].device
        return torch.cat([part.to(device) for part in self._parts], dim=1)

    def plus(self, ids: Tensor, before: SuffixLengths) -> SuffixIds:
        """These followed by ids ``[rows, tokens]``, each row's after its own tokens `before`.

        Ids behind a gap are not kept.
        """
        if self.length != before.longest:
            return self
        ids = ids.to(torch.long, copy=True)  # may be a view of a tensor that the caller changes
        if before.per_row is None:
            few = len(self._parts) < _MOST_PARTS
            return SuffixIds((*(self._parts if few else (self.known(len(ids)),)), ids))
        known = self.known(len(ids)).to(ids.device)
        known = torch.cat([known, ids.new_zeros(ids.shape)], dim=1)
        lengths = before.per_row.to(ids.device, non_blocking=True).long()
        at = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        return SuffixIds((known.scatter_(1, at, ids),))

    def first(self, tokens: int) -> SuffixIds:
        """The first `tokens` of every row."""
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
        """Replace row ``i`` by row ``rows[i]``.

        If the number of rows is unchanged, keys and values are not copied, see `SuffixOrigins`.

        Args:
            rows: ``[rows]`` int64, on the CPU.
            shard: What this process stores of each suffix.
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
