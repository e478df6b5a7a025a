"""The nodes and rows of a cache: filling and merging nodes, and shortening, selecting and restarting rows.

Every turn of a conversation appends nodes to each row's path; without merging, a step in turn ``t`` attends to
``O(t)`` nodes. `consolidate` merges chains by the logarithmic method (Bentley and Saxe, "Decomposable searching
problems I", 1980): every node stays more than twice as long as the next one, and over all turns a token is copied
``O(log length)`` times.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import Cache

from ..attention.forest import Forest, Node, Path, Span, begin_of, end_of
from ..attention.kv import Segment
from .layers.attention import SharedContextLayer
from .layers.cross import EncodedInputs
from .layers.state import StateLayer
from .layout import CacheLayer
from .state import Pass, PrefillItem, SharedState
from .storage import Suffixes, TokenStorage

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class ForestCache(Cache):
    """Base of `SharedContextCache` with what it holds, and operations on nodes and rows; none on rows copies nodes.

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
        return self.state.forest if self.state.forest is not None else Forest(0)

    @property
    def step_forest(self) -> Forest:
        """The part of the forest that steps read as this process stores it, see `SharedState.step_forest`."""
        stored = self.state.step_forest
        return stored if stored is not None else Forest(0)

    @property
    def rows(self) -> int:
        return self.forest.rows

    @property
    def position_planes(self) -> int:
        """Planes of positions that the model takes, all equal; 0 for positions without planes."""
        return self.state.position_planes

    @property
    def attention_layers(self) -> list[SharedContextLayer]:
        return [layer for layer in self.layers if isinstance(layer, SharedContextLayer)]

    @property
    def state_layers(self) -> list[StateLayer]:
        return [layer for layer in self.layers if isinstance(layer, StateLayer)]

    def forget_states(self, path: Path) -> None:
        """Drop the states at the end of a path, at which no prompt ends."""
        if (end := end_of(path)) is not None:
            for layer in self.state_layers:
                layer.ends.pop(end, None)

    @property
    def is_empty(self) -> bool:
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
        self, items: Sequence[PrefillItem], rows: Tensor | None = None, *, divide: bool = False, tensors: bool = False
    ) -> Iterator[None]:
        """Context in which a forward pass over the items' tokens, packed into one row, fills their spans.

        Args:
            rows: ``[rows, width]`` bool: where the pass's rows have tokens, if each item is a row of its own.
            divide: Whether processes may divide the pass, whose part here is then `Pass.divided`.
            tensors: Whether the pass attends by transformers' own attention and masks: by rows, to nothing stored. To
                the model the cache is empty then.
        """
        length = self.state.padded_length
        try:
            self.state.padded_length = 0 if tensors else length
            self.state.current = self.state.prefill(items, rows, divide=divide, tensors=tensors)
            for layer in self.state_layers if not self.state.current.segments else ():
                layer.begin_rows([end_of(item.context) for item in items])
            yield
            for layer in self.state_layers:  # which the first pass makes
                layer.keep([(item.span.segment, item.span.stop) for item in items])
        finally:
            self.state.current = Pass()
            if tensors:
                self.state.padded_length = length

    @contextmanager
    def prefilling_suffixes(self, prompts: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
        """Context in which `prefilling` writes to suffixes: prompt tokens that no other row shares.

        It takes for each row its tokens after its nodes, ``[length]`` int64 on the CPU, all or none of which are
        prefilled, and yields the number of a segment by which spans refer to the row's suffix, for this time only.
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
        """Set the nodes that rows attend to, which must be filled; drop the suffixes and what was expanded of nodes.

        `length` is the padded length of the rows so far, as `get_seq_length` reports it; the longest row when None.
        """
        longest = max(forest.context_lengths, default=0)
        if length is not None and length < longest:
            raise ValueError(f"the padded length must be at least the longest row, {longest} tokens, got {length}")
        self.state.forest, self.state.suffixes, self.state.expanded = forest, Suffixes(), None
        self.state.padded_length = longest if length is None else length
        for layer in self.attention_layers:
            layer.storage.replace_suffixes(None)
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
        self.state.suffixes.select(chosen, before, self._storages, self.state.division.suffix_shard)
        for layer in self.state_layers:
            layer.select_rows(chosen)

    def restart_rows(self, paths: Mapping[int, Path]) -> None:
        """Begin rows anew, each after its path of nodes and with an empty suffix, instead of the rows so far.

        Neither nodes nor other rows' suffixes are copied. Rows of one path should be neighbours, see `select_rows`.
        From then on, ids of suffixes' tokens are not known. Raises IndexError where there is no such row, ValueError
        where layers have states, and none at the end of a path.
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


def consolidate(cache: ForestCache, copying: AbstractContextManager[object] | None = None) -> None:
    """Merge chains of nodes with the same rows, and free stored tokens that no row attends to.

    A segment that is less than half used is replaced by a copy of the used part. Tokens used by several nodes are not
    merged into one of them, which would store them twice. Protected segments are never copied. Nothing is copied
    without a gain, or where nodes are divided between processes. The cache's suffixes are empty; it is unchanged if
    memory for copies, which are allocated in the context `copying`, runs out.
    """
    if cache.state.division.is_divided:  # other places would be on other processes
        return
    used = _UsedTokens(cache.forest)
    moved = [span for merge in _merges(cache, used) for span in merge]
    moved += _sparse(cache, used, set(moved))
    numbers = {old: new for new, old in enumerate(sorted({run.segment for run in set(used.runs) - set(moved)}))}
    if not moved and len(numbers) == len(cache.segment_tokens):
        return
    places: dict[Span, Span] = {}
    length = 0
    for run in moved:
        places[run] = Span(len(numbers), length, run.length)
        length += run.length

    def place(span: Span) -> Span:
        run = used.run_of(span)
        if run not in places:
            return Span(numbers[span.segment], span.start, span.length)
        return places[run][span.start - run.start : span.stop - run.start]

    forest = Forest.from_paths([tuple(map(place, path)) for path in cache.forest.paths])
    tokens = [cache.segment_tokens[old] for old in numbers]
    storage = [{new: layer.storage.segments[old] for old, new in numbers.items()} for layer in cache.attention_layers]
    if moved:
        tokens.append(cache.path_tokens(tuple(moved)))
        with copying or nullcontext():
            for segments, layer in zip(storage, cache.attention_layers, strict=True):
                segments[len(numbers)] = layer.storage.copied(moved)
    cache.replace_storage(forest, tokens, storage, protected=sum(old < cache.protected_segments for old in numbers))


class _UsedTokens:
    """The stored tokens that nodes use: disjoint `runs` in storage order, with the number of `nodes` in each."""

    def __init__(self, forest: Forest):
        self.runs = forest.stored_runs
        self._starts = [begin_of((run,)) for run in self.runs]
        self.nodes = Counter(self.run_of(node.span) for node in forest.nodes)

    def run_of(self, span: Span) -> Span:
        return self.runs[bisect_right(self._starts, begin_of((span,))) - 1]


def _merges(cache: ForestCache, used: _UsedTokens) -> Iterator[list[Span]]:
    """Groups of consecutive spans on a path to merge into one node."""
    for chain in _chains(cache.forest):
        groups: list[list[Span]] = []
        for node in chain:
            if node.span.segment < cache.protected_segments or used.nodes[used.run_of(node.span)] > 1:
                yield from (group for group in groups if len(group) > 1)
                groups = []
                continue
            groups.append([node.span])
            while len(groups) > 1 and _length(groups[-2]) <= 2 * _length(groups[-1]):
                groups[-2:] = [groups[-2] + groups[-1]]
        yield from (group for group in groups if len(group) > 1)


def _length(spans: list[Span]) -> int:
    return sum(span.length for span in spans)


def _chains(forest: Forest) -> list[list[Node]]:
    """The forest's maximal single-child chains; all nodes of a chain have the same rows."""
    chains: list[list[Node]] = []
    ends: dict[tuple[int, int], list[Node]] = {}
    for level in forest.levels:
        above, ends = ends, {}
        for node in level:
            rows = node.row_start, node.row_count
            if rows not in above:
                chains.append([])
            ends[rows] = above.get(rows, chains[-1])
            ends[rows].append(node)
    return chains


def _sparse(cache: ForestCache, used: _UsedTokens, merged: set[Span]) -> list[Span]:
    """Used spans of segments that are less than half used."""
    left = [run for run in used.runs if run not in merged and run.segment >= cache.protected_segments]
    tokens = Counter[int]()
    for run in left:
        tokens[run.segment] += run.length
    return [run for run in left if 2 * tokens[run.segment] < cache.state.segment_lengths[run.segment]]
