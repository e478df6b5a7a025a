"""Rows of a shared-context cache: shortening, selecting, repeating and restarting them, without copies of nodes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..attention.forest import Forest, Path
from .forest_cache import ForestCache
from .layers.state import end_of

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class RowCache(ForestCache):
    """Base of `SharedContextCache` with the operations on rows, none of which copies nodes."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row, first from its suffix, then from its nodes.

        Node storage is not modified, since other caches may use it; this cache's paths are shortened.

        Raises:
            ValueError: `tokens_to_remove` is positive (transformers' old meaning, a target length), or layers have
                states, which cannot go back.
            TypeError: It is not an integer.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass a value <= 0"
            )
        try:
            count = -operator.index(tokens_to_remove)
        except TypeError as error:
            raise TypeError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove!r}") from error
        own = self.suffix_lengths.clamp(max=count)
        if count:
            self._require_no_states()
        if self.state.forest is not None and bool((own < count).any()):
            contexts = self.forest.context_lengths
            rest = [min(count - gone, context) for gone, context in zip(own.tolist(), contexts, strict=True)]
            self.state.forest = self.forest.drop_last(rest)
        self.state.suffixes.drop(own, self._storages)
        self.state.padded_length = max(0, self.state.padded_length - count)

    def drop_last(self, tokens: Tensor | Sequence[int]) -> None:
        """Remove the last ``tokens[i]`` tokens of row ``i``'s suffix, such as draft tokens that were not accepted.

        Suffixes may then differ in length; new tokens follow each row's own. Storage stays.

        Args:
            tokens: A whole number per row. Counts on a GPU are not read by the host: they are clamped to 0 and the
                suffix's length, and `suffix_length`, by which storage grows, keeps its value as an upper bound until
                `crop` or counts on the CPU tighten it.

        Raises:
            ValueError: There is not a whole number for each row, or a row has fewer tokens in its suffix; or layers
                have states, which cannot go back.
        """
        self._require_no_states()
        try:
            counts = torch.as_tensor(tokens, dtype=None if len(tokens) else torch.long)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"drop_last takes a whole number for each of {self.rows} rows, got {tokens!r}") from error
        if counts.shape != (self.rows,) or counts.dtype not in _INTEGERS:
            raise ValueError(
                f"drop_last takes a whole number for each of {self.rows} rows, got {str(counts.dtype)[6:]} numbers of "
                f"shape {list(counts.shape)}"
            )
        counts = counts.long()
        if counts.is_cuda:
            self.state.suffixes.drop(counts, self._storages)
            return
        own = self.suffix_lengths
        if len(wrong := ((counts < 0) | (counts > own)).nonzero()):
            row = int(wrong[0])
            raise ValueError(f"row {row} cannot lose {int(counts[row])} tokens: its suffix has {int(own[row])}")
        longest = self.state.longest_row
        self.state.suffixes.drop(counts, self._storages)
        self.state.padded_length -= longest - self.state.longest_row

    def select_rows(self, rows: Sequence[int] | Tensor) -> None:
        """Replace row ``i`` by row ``rows[i]``; rows may repeat, move, or be dropped. Nodes are not copied.

        If the number of rows is unchanged, suffixes are not copied either, see `SuffixOrigins`.

        Raises:
            IndexError: There is no such row.
            TypeError: Not a sequence of whole numbers.
        """
        try:
            rows = [operator.index(row) for row in rows]
        except TypeError as error:
            raise TypeError(f"select_rows takes row numbers 0..{self.rows - 1}, got {rows!r}") from error
        out_of_range = [row for row in rows if not 0 <= row < self.rows]
        if out_of_range:
            raise IndexError(f"row {out_of_range[0]} is not among the cache's rows 0..{self.rows - 1}")
        if self.state.forest is None:
            return
        if rows == list(range(self.rows)):
            return
        paths, before = self.forest.paths, self.rows
        # Keep the same forest object for the same nodes, so that plans made for it stay valid.
        if len(rows) != before or any(paths[row] != path for row, path in zip(rows, paths, strict=True)):
            self.state.forest = self.forest.select_rows(rows)
        chosen = torch.tensor(rows, dtype=torch.long, device="cpu")
        self.state.suffixes.select(chosen, before, self._storages, self.state.suffix_shard)
        for layer in self.state_layers:
            layer.select_rows(chosen)

    def restart_rows(self, paths: Mapping[int, Path]) -> None:
        """Begin rows anew, each behind its path of nodes and with an empty suffix, in the places of the rows so far.

        Neither nodes nor other rows' suffixes are copied. Rows of one path should be neighbours, see `select_rows`.
        From then on, ids of suffixes' tokens are not known.

        Args:
            paths: The paths, by row.

        Raises:
            IndexError: There is no such row.
            ValueError: Layers have states, and none at the end of a path.
        """
        if out_of_range := [row for row in paths if not 0 <= row < self.rows]:
            raise IndexError(f"row {out_of_range[0]} is not among the cache's rows 0..{self.rows - 1}")
        rows = torch.tensor(list(paths), dtype=torch.long, device="cpu")
        for states in self.state_layers:
            states.restart_rows(rows, [end_of(path) for path in paths.values()])
        padding = self.state.padded_length - self.state.longest_row
        before = self.forest.paths
        if any(before[row] != path for row, path in paths.items()):
            self.state.forest = Forest.from_paths([paths.get(row, path) for row, path in enumerate(before)])
        self.state.suffixes.restart(rows, self.rows, self._storages)
        self.state.padded_length = self.state.longest_row + padding

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row ``i`` by row ``beam_idx[i]``."""
        self.select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices`` (row numbers, or a boolean mask)."""
        if indices.dtype == torch.bool:
            if len(indices) != self.rows:
                raise IndexError(f"a boolean for each of the cache's {self.rows} rows is needed, got {len(indices)}")
            indices = indices.nonzero().flatten()
        self.select_rows([row + self.rows if -self.rows <= row < 0 else row for row in indices.tolist()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times; nodes are not copied."""
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self.select_rows([row for row in range(self.rows) for _ in range(repeats)])

    def _require_no_states(self) -> None:
        if self.state_layers:
            raise ValueError("tokens cannot be removed from a cache with states, which every token overwrites")
