"""Index table for reordered suffixes, so that beam search moves no keys or values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..parallel.shards import WHOLE, Shard

_FIRST_CAPACITY = 256


class SuffixOrigins:
    """Maps each token of each row's suffix to the storage row that holds its keys and values.

    New tokens go to the row's own storage row. When beam search reorders rows at every step, only this table is
    permuted, once for all layers; keys and values stay in place.

    Where suffixes are divided between processes, the table is of those tokens that this one stores. Lengths are those
    of whole suffixes.

    Args:
        length: Tokens in each row, all in its own storage row.
        device: Device of the first layer's keys and values.
        shard: What this process stores of each suffix.
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
        """Keep the first `length` tokens only."""
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
