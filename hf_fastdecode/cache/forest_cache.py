"""Nodes of a shared-context cache: the forest over its rows, their lengths, and passes that fill nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Cache

from ..attention.forest import Forest
from ..attention.kv import Segment
from .layers.attention import SharedContextLayer
from .layers.cross import EncodedInputs, begin_of
from .layers.of_model import CacheLayer
from .layers.state import End, StateLayer, end_of
from .state import PrefillItem, SharedState
from .storage import TokenStorage
from .suffixes import Suffixes


class ForestCache(Cache):
    """Base of `SharedContextCache` with what it holds, and the operations on nodes.

    Attributes:
        state: State shared by all layers.
        segment_tokens: Token ids of each segment, ``[length]`` int64, on the CPU.
        protected_segments: Leading segments shared with other caches, which `consolidate` leaves in place.
        inputs: Of an encoder-decoder, the encoder's inputs that rows read; else None.
    """

    state: SharedState
    layers: list[CacheLayer]
    segment_tokens: list[Tensor]
    protected_segments: int
    inputs: EncodedInputs | None

    @property
    def forest(self) -> Forest:
        """Nodes over this cache's rows."""
        return self.state.forest if self.state.forest is not None else Forest(0)

    @property
    def step_forest(self) -> Forest:
        """The part of the forest that steps read as this process stores it, see `SharedState.step_forest`."""
        stored = self.state.step_forest
        return stored if stored is not None else Forest(0)

    @property
    def rows(self) -> int:
        """Number of rows (sequences)."""
        return self.forest.rows

    @property
    def position_planes(self) -> int:
        """Planes of positions that the model takes, all equal; 0 for positions without planes."""
        return self.state.position_planes

    @property
    def attention_layers(self) -> list[SharedContextLayer]:
        """The layers with keys and values of every token, in order."""
        return [layer for layer in self.layers if isinstance(layer, SharedContextLayer)]

    @property
    def state_layers(self) -> list[StateLayer]:
        """The layers with a state per row, in order."""
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def forget_states(self, end: End | None) -> None:
        """Drop the states at the end of a path, at which no prompt ends."""
        for layer in self.state_layers:
            if end is not None:
                layer.ends.pop(end, None)

    @property
    def is_empty(self) -> bool:
        """Whether all rows are empty."""
        return not self.suffix_length and not any(self.forest.context_lengths)

    @property
    def suffix_length(self) -> int:
        """Tokens in each row's suffix, after its path of nodes; an upper bound after `drop_last`."""
        return self.state.suffixes.longest

    @property
    def suffix_lengths(self) -> Tensor:
        """Tokens in each row's suffix: ``[rows]`` int64, on the CPU."""
        return self.state.suffixes.per_row(self.rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row, including the padding of the caller's ``input_ids``."""
        appended = self.layers[layer_idx].appended if layer_idx < len(self.layers) else 0
        return self.state.padded_length + appended

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of a stock model's mask."""
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def _storages(self) -> list[TokenStorage]:
        return [layer.storage for layer in self.attention_layers]

    def add_segment(self, tokens: Tensor) -> int:
        """Register a segment of tokens ``[length]`` int64, on the CPU, to be filled by prefill; returns its number."""
        self.segment_tokens.append(tokens)
        self.state.segment_lengths.append(len(tokens))
        return len(self.segment_tokens) - 1

    @contextmanager
    def prefilling(
        self,
        items: Sequence[PrefillItem],
        rows: Tensor | None = None,
        *,
        divide: bool = False,
        tensors: bool = False,
    ) -> Iterator[None]:
        """Context in which a forward pass over the items' tokens fills their spans.

        Args:
            items: The runs of tokens, packed into one row.
            rows: ``[rows, width]`` bool: where the pass's rows have tokens, if each item is a row of its own. With
                states, it is, unless there is one item.
            divide: Whether processes may divide the pass, whose part here is then `SharedState.divided`.
            tensors: Whether the pass attends by transformers' own attention and masks: by rows, to nothing stored. To
                the model the cache is empty then.
        """
        length = self.state.padded_length
        self.state.padded_length = 0 if tensors else length
        self.state.pack(items, divide=divide)
        self.state.places_of_pass = None if rows is None else _places(rows, sum(item.span.length for item in items))
        self.state.tensors_of_pass = (rows.shape[0], rows.shape[1]) if tensors and rows is not None else None
        try:
            for layer in self.state_layers:
                layer.begin_rows([end_of(item.context) for item in items])
            yield
            for layer in self.state_layers:  # which the first pass makes
                layer.keep([(item.span.segment, item.span.stop) for item in items])
        finally:
            self.state.pack(())
            self.state.places_of_pass = self.state.tensors_of_pass = None
            if tensors:
                self.state.padded_length = length

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
        """Set the nodes that rows attend to, and drop the suffixes and what was expanded of nodes.

        Args:
            forest: The nodes; their spans must be filled.
            length: Padded length of the rows so far, as `get_seq_length` reports it; the longest row when None.
        """
        longest = max(forest.context_lengths, default=0)
        if length is not None and length < longest:
            raise ValueError(f"the padded length must be at least the longest row, {longest} tokens, got {length}")
        self.state.forest, self.state.suffixes, self.state.expanded = forest, Suffixes(), None
        self.state.padded_length = longest if length is None else length
        for layer in self.attention_layers:
            layer.storage.drop_suffixes()
        for states in self.state_layers:
            states.drop_rows()

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
        self.state.expanded = None
        for layer, segments in zip(self.attention_layers, storage, strict=True):
            layer.storage.replace_segments(segments)
        ends = {end_of(new): end_of(old) for new, old in zip(forest.paths, self.forest.paths, strict=True)}
        for states in self.state_layers:
            states.move_ends(ends)
        if self.inputs is not None:
            old, new = (map(begin_of, paths) for paths in (self.forest.paths, forest.paths))
            self.inputs = self.inputs.moved(dict(zip(new, old, strict=True)))
        self.segment_tokens, self.protected_segments = tokens, protected
        self.state.forest, self.state.segment_lengths = forest, [len(part) for part in tokens]


def _places(rows: Tensor, tokens: int) -> Tensor | None:
    """The places of so many tokens in rows ``[rows, width]``, counted row by row; None in one row without padding,
    which is as packed tokens are."""
    if tokens < rows.numel():
        return rows.flatten().nonzero().flatten()
    return None if len(rows) == 1 else torch.arange(tokens, device=rows.device)
