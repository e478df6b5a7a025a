"""Token ids of the suffixes, for prefix matching in later calls."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.kv import SuffixLengths

_MOST_PARTS = 256
"""Parts, usually of one step each, after which they are joined."""


class SuffixIds:
    """Ids of the tokens appended to each row's suffix, up to the first pass that gave none (``inputs_embeds``).

    Args:
        parts: ``[rows, tokens]`` int64 each, one after the other.
    """

    def __init__(self, parts: tuple[Tensor, ...] = ()):
        self._parts = parts

    @property
    def length(self) -> int:
        """Known tokens per row, up to the longest suffix."""
        return sum(part.shape[1] for part in self._parts)

    def whole(self, rows: int) -> Tensor:
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
            return SuffixIds((*(self._parts if few else (self.whole(len(ids)),)), ids))
        known = self.whole(len(ids)).to(ids.device)
        known = torch.cat([known, ids.new_zeros(ids.shape)], dim=1)
        lengths = before.per_row.to(ids.device, non_blocking=True).long()
        at = lengths[:, None] + torch.arange(ids.shape[1], device=ids.device)
        return SuffixIds((known.scatter_(1, at, ids),))

    def first(self, tokens: int) -> SuffixIds:
        """The first `tokens` of every row."""
        if tokens >= self.length or not self._parts:
            return self
        return SuffixIds((self.whole(len(self._parts[0]))[:, :tokens],))

    def select(self, rows: Tensor) -> SuffixIds:
        """The ids of these rows, ``[rows]`` int64 on any device."""
        if not self._parts:
            return self
        whole = self.whole(len(self._parts[0]))
        return SuffixIds((whole.index_select(0, rows.to(whole.device)),))
