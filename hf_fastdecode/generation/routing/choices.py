"""`RouterChoices`: the experts that the rows of a `generate` call chose, once for each distinct token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64]


class RecordedRow(NamedTuple):
    """A row of prompt and completion.

    Attributes:
        ids: ``[length]``: its tokens, without padding.
        tokens: ``[length - 1]``: where the choices for its tokens are stored, but for the last one, which no layer has
            computed.
    """

    ids: Numbers
    tokens: Numbers


@dataclass(frozen=True, eq=False)
class RouterChoices:
    """The experts that rows chose in each layer of experts, see ``output_router_choices``.

    A token that rows share, as of a prompt, is stored once, and so are equal choices. With 48 layers that choose 8 of
    128 experts, a token takes 384 bytes. ``choices[rows]`` are those of some rows, by number, slice, list, or a tensor
    of indices or booleans; they have the same `stored`.

    Attributes:
        stored: ``[stored, layers, experts_per_token]``, in the smallest of uint8 (up to 256 experts), int16 and int32,
            on the model's first device with experts.
        rows: The rows, in the order of `generate`'s output.
        experts: How many each layer of experts has.
    """

    stored: Tensor
    rows: tuple[RecordedRow, ...]
    experts: tuple[int, ...]

    @classmethod
    def of(cls, computed: Tensor, rows: Sequence[RecordedRow], experts: tuple[int, ...]) -> RouterChoices:
        """Keep the choices that rows refer to, equal ones once.

        Args:
            computed: ``[tokens, layers, experts_per_token]`` of all passes.
            rows: Rows whose `tokens` are indices of `computed`.
        """
        used, at = np.unique(np.concatenate([row.tokens for row in rows]), return_inverse=True)
        kept = computed[torch.from_numpy(used).to(computed.device)]
        _, first, number = np.unique(_hashes(kept), return_index=True, return_inverse=True)
        stored = kept[torch.from_numpy(first).to(kept.device)]
        if torch.equal(stored[torch.from_numpy(number).to(kept.device)], kept):
            at = number[at]
        else:  # different choices have the same hash
            stored = kept
        ends = np.cumsum([len(row.tokens) for row in rows])[:-1]
        tokens = np.split(at, ends)
        numbered = [row._replace(tokens=part) for row, part in zip(rows, tokens, strict=True)]
        return cls(stored, tuple(numbered), experts)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> RouterChoices:
        index = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
        numbers = np.atleast_1d(np.arange(len(self))[index])
        return replace(self, rows=tuple(self.rows[number] for number in numbers))

    def __repr__(self) -> str:
        stored, layers, chosen = self.stored.shape
        return (
            f"RouterChoices({len(self)} rows, {stored} stored: {chosen} experts in each of {layers} layers, "
            f"{self.nbytes:,} bytes)"
        )

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def of_row(self, row: int) -> Tensor:
        """A row's choices ``[length - 1, layers, experts_per_token]``, a copy: for its tokens but the last one."""
        return self.stored[torch.from_numpy(self.rows[row].tokens).to(self.stored.device)]

    def find(self, ids: Numbers, number: int) -> Numbers | None:
        """Where choices for a row's tokens are stored, -1 for a last token without; None if no row begins with them.

        Of several rows, that of the given `number` counts, or else the shortest.
        """
        length = len(ids)
        fits = (
            (at != number, len(row.ids), at)
            for at, row in enumerate(self.rows)
            if len(row.ids) >= length and np.array_equal(row.ids[:length], ids)
        )
        if (best := min(fits, default=None)) is None:
            return None
        found: Numbers = np.full(length, -1, dtype=np.int64)
        tokens = self.rows[best[2]].tokens[:length]
        found[: len(tokens)] = tokens
        return found


def _hashes(chosen: Tensor) -> Numbers:
    """A number ``[tokens]`` for each token's choices, equal for equal ones."""
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, chosen.shape[1:], generator=generator, device="cpu").to(chosen.device)
    sums = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
    for layer, of_layer in enumerate(factors):  # one at a time: products take eight bytes each
        sums += (chosen[:, layer] * of_layer).sum(-1)
    numbers: Numbers = sums.cpu().numpy()
    return numbers
