"""What one layer of a cache stores of its tokens: the one place that knows which tensors a token has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..attention.autocast import cast
from ..attention.forest import Span
from ..attention.kv import Segment
from .origins import SuffixOrigins

_FIRST_CAPACITY = 256
"""Suffix tokens allocated at first when no bound is known or the bound is larger."""


class TokenStorage:
    """The keys and values of one layer's tokens.

    A token consists of *parts*, here its keys and its values, each in a tensor of its own. Tokens of nodes lie in
    *segments*, tokens that rows append in *suffixes*, preallocated and written in place. Another layout of a token is
    a subclass with another `parts_of` and `keys_and_values`.

    Attributes:
        segments: By number; each part ``[heads, tokens, width]``.
        suffix: Each part ``[rows, heads, capacity, width]``; None before anything is appended.
        moves: How often tensors were replaced, so that addresses of earlier ones mean nothing any more.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.suffix: Segment | None = None
        self.moves = 0

    # --- the layout of a token ---------------------------------------------------------------------------------

    def parts_of(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Segment:
        """What to store of a forward pass.

        Args:
            keys: ``[rows, kv_heads, tokens, head_dim]``, as an attention class gives them to ``cache.update``.
            values: The same shape.
            args: What else it gives.
            kwargs: Likewise.

        Returns:
            Each part ``[rows, heads, tokens, width]``.
        """
        return Segment(cast(keys), cast(values))

    @staticmethod
    def keys_and_values(parts: Segment) -> Segment:
        """Keys and values of stored tokens, as the attention operators take them."""
        return parts

    # --- what is stored ----------------------------------------------------------------------------------------

    @property
    def example(self) -> Segment | None:
        """Anything stored, which says of heads, widths and dtype; each part ends in ``[heads, tokens, width]``."""
        return next(iter(self.segments.values()), None) or self.suffix

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in this layer; 0 before anything is stored."""
        parts = self.example or ()
        return sum(part.shape[-3] * part.shape[-1] * part.element_size() for part in parts)

    @property
    def suffix_bytes(self) -> int:
        """Bytes allocated for suffixes."""
        return sum(part.nbytes for part in self.suffix or ())

    @property
    def capacity(self) -> int:
        """Tokens that a row's suffix has room for."""
        return 0 if self.suffix is None else self.suffix[0].shape[2]

    def tensors(self) -> list[Tensor]:
        """All tensors, of segments and suffixes."""
        stored = [*self.segments.values(), *([self.suffix] if self.suffix is not None else [])]
        return [part for parts in stored for part in parts]

    # --- nodes -------------------------------------------------------------------------------------------------

    def segment(self, number: int, length: int, like: Segment) -> Segment:
        """A segment; where it is new, made of so many tokens like these ``[heads, ..., width]``."""
        if number not in self.segments:
            self.segments[number] = _map(like, lambda part: _room(part, (part.shape[0], length)))
        return self.segments[number]

    def write_nodes(self, spans: Iterable[Span], new: Segment) -> None:
        """Store the tokens of a pass, each part ``[heads, tokens, width]``, end to end in spans of segments."""
        start = 0
        for span in spans:
            for stored, part in zip(self.segments[span.segment].view(span), new, strict=True):
                stored.copy_(part[:, start : start + span.length])
            start += span.length

    def copied(self, spans: Iterable[Span]) -> Segment:
        """Stored spans copied end to end: each part ``[heads, tokens, width]``."""
        views = [self.segments[span.segment].view(span) for span in spans]
        with torch.inference_mode(False), torch.no_grad():  # as `_room`
            return Segment._make(torch.cat(parts, dim=1) for parts in zip(*views, strict=True))

    # --- suffixes ----------------------------------------------------------------------------------------------

    def grow(self, rows: int, tokens: int, used: int, like: Segment, most: int | None) -> bool:
        """Have room for `tokens` tokens in every row's suffix: doubled when they do not fit.

        Args:
            rows: Number of rows.
            tokens: Tokens that a suffix must hold.
            used: Tokens that it holds.
            like: What it is made of, each part ``[heads, ..., width]``.
            most: Bound that doubling does not pass, if one is known.

        Returns:
            Whether storage moved.
        """
        if self.suffix is not None and tokens <= self.capacity:
            return False
        capacity = max(tokens, 2 * self.capacity, _FIRST_CAPACITY)
        if most is not None:
            capacity = max(tokens, min(capacity, most))
        grown = _map(like, lambda part: _room(part, (rows, part.shape[0], capacity)))
        for new, old in zip(grown, self.suffix or (), strict=False):
            new[:, :, :used] = old[:, :, :used]
        self._replace(grown)
        return True

    def append(self, new: Segment, before: int) -> None:
        """Write tokens, each part ``[rows, heads, tokens, width]``, behind the first `before` ones of the suffixes."""
        assert self.suffix is not None
        for stored, part in zip(self.suffix, new, strict=True):
            stored[:, :, before : before + part.shape[2]] = part

    def ordered_suffix(self, origins: SuffixOrigins | None) -> Segment:
        """Suffixes by row: the storage itself, or a copy where rows were reordered.

        Raises:
            ValueError: Nothing was appended in this layer yet.
        """
        if self.suffix is None:
            raise ValueError("this cache layer holds no suffix yet; run a forward pass with the cache first")
        return self.suffix if origins is None else _map(self.suffix, origins.gather)

    def suffixes_as_segment(self, length: int, origins: SuffixOrigins | None) -> Segment:
        """All rows' suffixes copied end to end: row ``i`` is tokens ``i * length`` up to ``(i + 1) * length``."""
        wanted = torch.is_grad_enabled()  # which leaving inference mode would turn on
        with torch.inference_mode(False), torch.set_grad_enabled(wanted):  # as `_room`

            def side_by_side(part: Tensor) -> Tensor:
                rows_inside = part[:, :, :length].transpose(0, 1)
                return rows_inside.clone(memory_format=torch.contiguous_format).flatten(1, 2)

            return _map(self.ordered_suffix(origins), side_by_side)

    def select_rows(self, rows: Tensor, origins: SuffixOrigins | None) -> None:
        """Copy the suffixes of these rows, which may repeat, to storage of as many rows."""
        if self.suffix is None:
            return
        capacity, before = self.capacity, self.ordered_suffix(origins)
        rows = rows.to(before[0].device)
        selected = _map(before, lambda part: _room(part, (len(rows), part.shape[1], capacity)))
        for new, part in zip(selected, before, strict=True):
            new[:, :, : part.shape[2]].copy_(part.index_select(0, rows))
        self._replace(selected)

    def replace_segments(self, segments: dict[int, Segment]) -> None:
        """Keep other segments in the place of these."""
        self.segments = segments
        self.moves += 1

    def drop_suffixes(self) -> None:
        """Forget what was appended."""
        self._replace(None)

    def _replace(self, suffix: Segment | None) -> None:
        self.suffix = suffix
        self.moves += 1


def _map(parts: Segment, change: Callable[[Tensor], Tensor]) -> Segment:
    """The same parts, each changed."""
    return Segment._make(map(change, parts))


def _room(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Room for numbers of the part's width and dtype.

    An ordinary tensor within the caller's inference mode too: there, others could be written only within it.
    """
    with torch.inference_mode(False):
        return part.new_empty(*shape, part.shape[-1])
