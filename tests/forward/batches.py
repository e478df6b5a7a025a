"""Random batches of a forward pass: rows that share context in every way that callers give them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..tiny_models import VOCABULARY

Tokens = tuple[int, ...]
MOST_ROWS = 12
_FIRST_PLAIN = 3  # ids below are those of padding, beginning and end, which rows hold as real tokens too


@dataclass(frozen=True)
class Batch:
    """Rows, how they are padded, and what a call asks for.

    Attributes:
        rows: Real tokens of each row; none for a row of padding alone.
        left: Columns of padding before each row.
        width: Columns.
        mask: Whether the call has an attention mask; without one, padding counts as real tokens, and is among `rows`.
        positions: ``""`` where the call has none, ``counted`` from the mask, ``columns`` for each row, ``column`` for
            all rows at once.
        embeds: Whether the call has embeddings in place of ids.
        labels: Whether the call has labels: all real tokens but each row's first.
        keep: `logits_to_keep`; a tuple stands for a tensor of columns.
        hidden: Whether it returns the hidden states of all layers.
        use_cache: As given.
        gradient: Whether gradients are computed.
    """

    rows: tuple[Tokens, ...]
    left: tuple[int, ...] = ()
    width: int = 0
    mask: bool = True
    positions: str = ""
    embeds: bool = False
    labels: bool = False
    keep: int | tuple[int, ...] = 0
    hidden: bool = False
    use_cache: bool | None = None
    gradient: bool = True
    other: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.width:
            object.__setattr__(self, "width", max(map(len, self.rows)))
        if not self.left:
            object.__setattr__(self, "left", (0,) * len(self.rows))

    @property
    def real(self) -> Tensor:
        """``[rows, width]``, bool: which columns hold real tokens."""
        columns = torch.arange(self.width)
        starts, lengths = torch.tensor(self.left)[:, None], torch.tensor([len(row) for row in self.rows])[:, None]
        return (columns >= starts) & (columns < starts + lengths)

    @property
    def ids(self) -> Tensor:
        """``[rows, width]``, int64; 0 in padding."""
        ids = torch.zeros(len(self.rows), self.width, dtype=torch.long)
        ids[self.real] = torch.tensor([token for row in self.rows for token in row], dtype=torch.long)
        return ids

    @property
    def kept(self) -> Tensor:
        """Columns whose logits are returned."""
        if isinstance(self.keep, tuple):
            return torch.tensor(self.keep)
        return torch.arange(self.width)[-self.keep :]

    def arguments(self, embed: torch.nn.Module) -> dict[str, Any]:
        """Arguments of the model's forward."""
        ids, real = self.ids, self.real
        found: dict[str, Any] = dict(self.other)
        if self.embeds:
            found["inputs_embeds"] = embed(ids).detach()
        else:
            found["input_ids"] = ids
        if self.mask:
            found["attention_mask"] = real.long()
        columns = torch.arange(self.width)
        if self.positions == "counted":
            found["position_ids"] = (real.long().cumsum(-1) - 1).masked_fill(~real, 1)
        elif self.positions:
            found["position_ids"] = columns.expand(len(self.rows) if self.positions == "columns" else 1, -1)
        if self.labels:
            # Not the first of a row: the logits before it are those of padding, where there is some on the left.
            follows = torch.cat([torch.zeros(len(self.rows), 1, dtype=torch.bool), real[:, 1:] & real[:, :-1]], 1)
            found["labels"] = ids.masked_fill(~follows, -100)
        if self.keep:
            found["logits_to_keep"] = self.keep if isinstance(self.keep, int) else torch.tensor(self.keep)
        if self.hidden:
            found["output_hidden_states"] = True
        if self.use_cache is not None:
            found["use_cache"] = self.use_cache
        return found

    def distinct(self, *, offsets: bool) -> int:
        """How many tokens a pass computes where each is computed once: paths from a row's beginning, at a position.

        Args:
            offsets: Whether the columns of padding before a row count, where no positions are given. They do not where
                the model counts positions from the mask, or looks at distances between tokens alone.
        """
        counts = self.positions == "counted" or (not self.positions and not offsets)
        return len(
            {
                (0 if counts else start, row[: length + 1])
                for start, row in zip(self.left, self.rows, strict=True)
                for length in range(len(row))
            }
        )


def _tokens(least: int, most: int) -> st.SearchStrategy[Tokens]:
    """Runs of random tokens, a tenth of them special ones."""

    def drawn(length: int, seed: int) -> Tokens:
        generator = torch.Generator().manual_seed(seed)
        plain = torch.randint(_FIRST_PLAIN, VOCABULARY, (length,), generator=generator)
        special = torch.randint(0, _FIRST_PLAIN, (length,), generator=generator)
        return tuple(torch.where(torch.rand(length, generator=generator) < 0.1, special, plain).tolist())

    return st.builds(drawn, st.integers(least, most), st.integers(0, 2**16))


@st.composite
def batches(draw: st.DrawFn, *, embeds: bool = True, counted: bool = True) -> Batch:
    """Batches of up to 12 rows.

    Args:
        draw: Of hypothesis.
        embeds: Whether the model takes embeddings in place of ids.
        counted: Whether it takes positions.
    """
    system = draw(_tokens(0, 12))
    prompts = [system + prompt for prompt in draw(st.lists(_tokens(0, 30), min_size=1, max_size=3))]
    rows: list[Tokens] = []
    for _ in range(draw(st.sampled_from([*range(1, MOST_ROWS + 1), 4, 6, 8]))):
        kind = draw(st.sampled_from(["sample", "sample", "sample", "equal", "prefix", "longer", "empty", "apart"]))
        if kind == "sample" or not rows:
            row = draw(st.sampled_from(prompts)) + draw(_tokens(1, 16))
        elif kind == "apart":
            row = draw(_tokens(1, 30))
        elif kind == "empty":
            row = draw(st.sampled_from(prompts))
        else:
            row = draw(st.sampled_from(rows))
            if kind == "prefix":
                row = row[: draw(st.integers(1, max(len(row), 1)))]
            elif kind == "longer":
                row = row + draw(_tokens(1, 8))
        rows.append(row)
    if not any(rows):
        rows.append((5,))
    rows = draw(st.permutations(rows))
    side = draw(st.sampled_from(["left", "right", "both", "none"]))
    if side == "none":
        length = min(len(row) for row in rows if row)
        rows = [row[:length] for row in rows if row]
    width = max(map(len, rows)) + (side != "none") * draw(st.sampled_from([0, 0, 1, 5]))
    room = [width - len(row) for row in rows]
    left = {"left": room, "right": [0 for _ in room], "none": room}.get(side) or [
        draw(st.integers(0, columns)) for columns in room
    ]
    mask = draw(st.booleans()) if side == "none" else draw(st.sampled_from([True, True, True, False]))
    if not mask:  # what stands in the padding counts
        padded = zip(rows, left, strict=True)
        rows = [(0,) * start + row + (0,) * (width - start - len(row)) for row, start in padded]
        left = [0 for _ in rows]
    some_columns = st.lists(st.integers(0, width - 1), min_size=1, max_size=6).map(tuple)
    return Batch(
        rows=tuple(rows),
        left=tuple(left),
        width=width,
        mask=mask,
        positions=draw(st.sampled_from(["", "", "counted", "columns", "column"])) if counted else "",
        embeds=embeds and draw(st.sampled_from([False, False, False, True])),
        labels=(labels := max(map(len, rows)) > 1 and draw(st.booleans())),  # the mean over none is NaN
        keep=0 if labels else draw(st.one_of(st.just(0), st.integers(0, width), some_columns)),
        hidden=draw(st.booleans()),
        use_cache=draw(st.sampled_from([None, True, False])),
        gradient=draw(st.sampled_from([True, True, False])),
    )
