"""Suffixes whose rows were reordered: which row's storage holds each token."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_CAPACITY = 256


class SuffixOrigins:
    """For each token of each row's suffix, the storage row that holds its keys and values.

    A row writes its tokens to its own storage row. Beam search replaces rows by continuations of others at every step:
    then only these indices are permuted, one table for all layers, and no keys or values move.

    Args:
        rows: Number of rows.
        length: Tokens that each row holds, all in its own storage row.
        device: Where the first layer stores its keys and values.
    """

    def __init__(self, rows: int, length: int, device: torch.device):
        with torch.inference_mode(False):  # what it made could not be written outside of it
            table = torch.empty(rows, max(_FIRST_CAPACITY, length), dtype=torch.int32, device=device)
        self._tables = {device: table}  # a model may lie on several devices
        self._length = 0
        self.append(length)

    def append(self, length: int) -> None:
        """Make every row hold `length` tokens; those that are new lie in its own storage row."""
        if length <= self._length:  # done for another layer of the same pass
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
        """Forget the tokens behind the first `length` ones."""
        self._length = min(self._length, length)

    def select(self, rows: Tensor) -> None:
        """Make row ``i`` what row ``rows[i]`` was: ``[rows]`` int64, as many as there are."""
        for table in self._tables.values():
            table.copy_(table.index_select(0, rows.to(table.device)))

    def table(self, device: torch.device) -> Tensor:
        """``[rows, capacity]`` int32 on a device; what lies behind a row's length is undefined."""
        if device not in self._tables:
            self._tables[device] = next(iter(self._tables.values())).to(device)
        return self._tables[device]

    def gather(self, stored: Tensor) -> Tensor:
        """The rows' tokens, copied from where they lie.

        Args:
            stored: ``[rows, ..., capacity, head_dim]`` by storage row, or ``[rows, capacity]`` for single numbers.

        Returns:
            The same shape, with as many tokens as each row holds.
        """
        table = self.table(stored.device)[:, : self._length].long()
        if stored.dim() == 2:
            return stored[:, : self._length].gather(0, table)
        tokens = torch.arange(self._length, device=stored.device)
        return stored.movedim(-2, 1)[table, tokens].movedim(1, -2)
