"""Nodes of a shared-context cache: segments, the passes that fill them, and the forest over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..attention.forest import Forest
from ..attention.kv import Segment
from .rows import CacheRows
from .state import PrefillItem
from .suffixes import Suffixes


class CacheNodes(CacheRows):
    """Base of `SharedContextCache` with the operations on nodes.

    Attributes:
        segment_tokens: Token ids of each segment, ``[length]`` int64, on the CPU.
        protected_segments: Leading segments shared with other caches, which `consolidate` leaves in place.
    """

    segment_tokens: list[Tensor]
    protected_segments: int

    def add_segment(self, tokens: Tensor) -> int:
        """Register a segment, to be filled by prefill.

        Args:
            tokens: ``[length]`` int64 token ids, on the CPU.

        Returns:
            The segment's number, for `Span.segment`.
        """
        self.segment_tokens.append(tokens)
        self.state.segment_lengths.append(len(tokens))
        return len(self.segment_tokens) - 1

    @contextmanager
    def prefilling(self, items: Sequence[PrefillItem], rows: Tensor | None = None) -> Iterator[None]:
        """Context in which a forward pass over the items' tokens fills their spans.

        Args:
            items: The runs of tokens, packed into one row.
            rows: ``[rows, width]`` bool: where the pass's rows have tokens, if each item is a row of its own.
        """
        self.state.packed = items
        self.state.rows_of_pass = None if rows is None else rows.flatten().nonzero().flatten()
        try:
            yield
        finally:
            self.state.packed, self.state.rows_of_pass = (), None

    @contextmanager
    def prefilling_suffixes(self, prompts: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
        """Context in which `prefilling` writes to suffixes: prompt tokens that no other row shares.

        Args:
            prompts: For each row its tokens after its nodes, ``[length]`` int64 on the CPU; all or none are prefilled.

        Yields:
            For each row the number of a segment, by which spans refer to the row's suffix, for this time only.
        """
        numbers = tuple(range(len(self.segment_tokens), len(self.segment_tokens) + len(prompts)))
        state, suffixes = self.state, Suffixes.of(prompts)
        state.suffixes, state.suffix_rows = suffixes, {number: row for row, number in enumerate(numbers)}
        try:
            yield numbers
            state.padded_length = max(state.padded_length, state.longest_row)
        except BaseException:
            self.set_forest(self.forest)
            raise
        finally:
            state.suffix_rows = {}

    def set_forest(self, forest: Forest, length: int | None = None) -> None:
        """Set the nodes that rows attend to, and drop the suffixes.

        Args:
            forest: The nodes; their spans must be filled.
            length: Padded length of the rows so far, as `get_seq_length` reports it; the longest row when None.
        """
        longest = max(forest.context_lengths, default=0)
        if length is not None and length < longest:
            raise ValueError(f"the padded length must be at least the longest row, {longest} tokens, got {length}")
        self.state.forest, self.state.suffixes = forest, Suffixes()
        self.state.padded_length = longest if length is None else length
        for layer in self.attention_layers:
            layer.storage.drop_suffixes()

    def replace_storage(
        self, forest: Forest, tokens: list[Tensor], storage: Sequence[dict[int, Segment]], protected: int
    ) -> None:
        """Replace all segments by others that hold the same tokens.

        Args:
            forest: The rows' paths over the new segments.
            tokens: Token ids of each segment, ``[length]`` int64, on the CPU.
            storage: Segments of each of `attention_layers`, by number.
            protected: Number of leading segments shared with other caches.
        """
        for layer, segments in zip(self.attention_layers, storage, strict=True):
            layer.storage.replace_segments(segments)
        self.segment_tokens, self.protected_segments = tokens, protected
        self.state.forest, self.state.segment_lengths = forest, [len(part) for part in tokens]
