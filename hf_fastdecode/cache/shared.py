"""The shared-context cache: a transformers `Cache` over a forest."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..attention.forest import Forest, Path, Span
from ..attention.interface import require_active
from ..attention.kv import Segment
from ..attention.torch_operators.backends import ALL_BACKENDS
from .accounting import CacheBytes, within
from .fingerprint import Fingerprint
from .layer import SharedContextLayer
from .origins import SuffixOrigins
from .state import PrefillItem, SharedState


class FirstPass(Protocol):
    """What fills an empty cache with the prompts of a decoding loop's first pass, in the place of the model.

    Attributes:
        stock: The cache to go on with where the prompts cannot share.
    """

    stock: Cache

    def run(
        self,
        model: PreTrainedModel,
        cache: SharedContextCache,
        arguments: dict[str, Any],
        forward: Callable[..., Any],
    ) -> Any:
        """The model's output for the pass's `arguments`; `forward` is the model's own."""
        ...


class SharedContextCache(Cache):
    """Keys and values of a batch in which rows share context.

    Nodes (runs of tokens that a contiguous range of rows shares) are stored once; each row's own tokens go to a
    suffix, preallocated and written in place. `hf_fastdecode.prefill` makes one; `generate` makes one for each call.

    Args:
        max_suffix: Most tokens a row will append, if known: bounds what is allocated.
        backend: Which operators attend; see `hf_fastdecode.enable`.

    Raises:
        ValueError: `max_suffix` is no number of tokens, or there is no such backend.
    """

    layers: list[SharedContextLayer]

    def __init__(self, *, max_suffix: int | None = None, backend: str = "auto"):
        if max_suffix is not None and not _is_count(max_suffix):
            raise ValueError(f"max_suffix must be an integer of at least 0, or None, got {max_suffix!r}")
        if backend not in ALL_BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(ALL_BACKENDS)}, got {backend!r}")
        self.state = SharedState(max_suffix=max_suffix, backend=backend)
        super().__init__(layer_class_to_replicate=partial(SharedContextLayer, self.state))
        self.segment_tokens: list[Tensor] = []
        self.lent_segments = 0  # so many leading segments lie in a cache that `prefill` returned, shared by its forks
        self._suffix_tokens: list[Tensor] = []
        self.fingerprint: Fingerprint | None = None  # of what computed the keys and values, where that is known
        self.awaited: FirstPass | None = None  # what the next forward pass is run by
        self.checks_masks = True  # whether a pass may bring a mask that hides more than padding

    @property
    def forest(self) -> Forest:
        """The nodes over this cache's rows."""
        return self.state.forest if self.state.forest is not None else Forest(0)

    @property
    def rows(self) -> int:
        """Number of rows (sequences)."""
        return self.forest.rows

    @property
    def is_empty(self) -> bool:
        """Whether no row holds a token."""
        return not self.suffix_length and not any(self.forest.context_lengths)

    @property
    def suffix_length(self) -> int:
        """Tokens that each row holds behind its path of nodes."""
        return self.state.suffix_length

    def longest_row(self, queries: int) -> int:
        """Tokens of the longest row by the end of the call: after `queries` more, or at the known bound."""
        if self.state.packed:
            return max(item.position + item.span.length for item in self.state.packed) + (self.state.max_suffix or 0)
        own = max(self.suffix_length + queries, self.state.max_suffix or 0)
        return max(self.forest.context_lengths, default=0) + own

    # --- filling -----------------------------------------------------------------------------------------------

    def add_segment(self, tokens: Tensor) -> int:
        """Reserve storage for a run of tokens, to be filled by prefill.

        Args:
            tokens: ``[length]`` int64 token ids, on the CPU.

        Returns:
            The segment's number, for `Span.segment`.
        """
        self.segment_tokens.append(tokens)
        self.state.segment_lengths.append(len(tokens))
        return len(self.segment_tokens) - 1

    @contextmanager
    def prefilling(self, items: Sequence[PrefillItem]) -> Iterator[None]:
        """Within, a forward pass over the items' tokens, end to end in one row, fills their spans."""
        self.state.packed = items
        try:
            yield
        finally:
            self.state.packed = ()

    def plant(self, forest: Forest, length: int | None = None) -> None:
        """Set which rows attend to which spans, with empty suffixes.

        Args:
            forest: The nodes; their spans must be filled.
            length: What `get_seq_length` reports: the padded length of the rows so far. The longest row when None.
        """
        longest = max(forest.context_lengths, default=0)
        if length is not None and length < longest:
            raise ValueError(f"the padded length must be at least the longest row, {longest} tokens, got {length}")
        self.state.forest, self.state.origins, self.state.suffix_length = forest, None, 0
        self.state.padding = 0 if length is None else length - longest
        self._suffix_tokens = []
        for layer in self.layers:
            layer.storage.drop_suffixes()

    def replace_storage(
        self, forest: Forest, tokens: list[Tensor], storage: Sequence[dict[int, Segment]], lent: int
    ) -> None:
        """Show the same tokens from other segments.

        Args:
            forest: The same rows over the new segments.
            tokens: By segment, ``[length]`` int64 token ids, on the CPU.
            storage: By layer, keys and values by segment.
            lent: How many leading segments lie in a cache that `prefill` returned.
        """
        for layer, segments in zip(self.layers, storage, strict=True):
            layer.storage.replace_segments(segments)
        self.segment_tokens, self.lent_segments = tokens, lent
        self.state.forest, self.state.segment_lengths = forest, [len(part) for part in tokens]

    def reserve(self, tokens: int) -> bool:
        """Make every row's suffix hold `tokens` tokens, before a captured step writes them; whether storage moved."""
        moved = [layer.reserve(tokens) for layer in self.layers]
        return any(moved)

    def wrote(self, input_ids: Tensor) -> None:
        """Note that a captured step appended tokens ``[rows, queries]`` to the suffixes, in every layer."""
        self.state.suffix_length += input_ids.shape[1]
        self.record_tokens(input_ids)

    def record_tokens(self, input_ids: Tensor) -> None:
        """Note the ids ``[rows, queries]`` of tokens being appended, so that a later call can match them."""
        self._suffix_tokens.append(input_ids.clone())  # the caller may change what these are a view of

    def fork(self, *, max_suffix: int | None = None, backend: str | None = None) -> SharedContextCache:
        """A cache that shows the same tokens and can grow without touching this one.

        Nodes are shared, not copied. Suffixes become nodes of the fork: they are copied, so that this cache may go on
        appending.
        """
        fork = self.nodes_only(self.state.forest, max_suffix=max_suffix, backend=backend)
        if own := self.suffix_length:
            for layer, twin in zip(self.layers, fork.layers, strict=True):
                suffixes = layer.storage.suffixes_as_segment(own, self.state.origins)
                twin.storage.segments[len(self.segment_tokens)] = suffixes
            segment = fork.add_segment(self.suffix_tokens().reshape(-1))
            fork.state.forest = Forest.from_paths(
                [(*path, Span(segment, row * own, own)) for row, path in enumerate(self.forest.paths)]
            )
        fork.state.padding = self.state.padding
        return fork

    def nodes_only(
        self, forest: Forest | None, *, max_suffix: int | None = None, backend: str | None = None
    ) -> SharedContextCache:
        """A cache over another forest of this one's segments, which are shared, with empty suffixes."""
        twin = SharedContextCache(max_suffix=max_suffix, backend=backend or self.state.backend)
        twin.segment_tokens = list(self.segment_tokens)
        twin.state.segment_lengths = list(self.state.segment_lengths)
        twin.lent_segments = self.lent_segments
        twin.state.forest, twin.fingerprint = forest, self.fingerprint
        for layer in self.layers:
            fresh = SharedContextLayer(twin.state)
            fresh.storage.segments = dict(layer.storage.segments)
            if layer.is_initialized:
                fresh.dtype, fresh.device, fresh.is_initialized = layer.dtype, layer.device, True
            twin.layers.append(fresh)
        return twin

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Within, a forward pass appends tokens to every layer; when it fails, no layer keeps any.

        Raises:
            ValueError: The pass appended to some layers only.
        """
        state = self.state
        forest, before, tokens, layers = (
            state.forest,
            state.suffix_length,
            list(self._suffix_tokens),
            list(self.layers),
        )
        try:
            yield
            appended = {layer.appended for layer in self.layers}
            if len(appended) > 1:
                raise ValueError(
                    f"after this pass the cache's layers hold unequal suffixes, of {before + min(appended)} to "
                    f"{before + max(appended)} tokens: the model has other layers than the cache; make it with "
                    "hf_fastdecode.prefill(model, ...) of this model"
                )
            state.suffix_length += max(appended, default=0)
        except BaseException:
            state.forest, self._suffix_tokens, self.layers = forest, tokens, layers
            if state.origins is not None:
                state.origins.truncate(before)
            if forest is None:  # the next pass may be of another number of rows, dtype or device
                for layer in layers:
                    layer.storage.drop_suffixes()
                    layer.is_initialized = False
            raise
        finally:
            for layer in self.layers:
                layer.appended = 0

    def take_over(self, other: SharedContextCache) -> None:
        """Become another cache, which must not be used any more."""
        self.__dict__.update(vars(other))

    # --- what was stored ---------------------------------------------------------------------------------------

    def suffix_tokens(self) -> Tensor:
        """Ids of the tokens in the suffixes: ``[rows, suffix_length]`` int64, on the CPU.

        Raises:
            ValueError: Tokens were appended by a model that `enable` was not called on, so their ids are unknown.
        """
        tokens = self._tokens_in_order().cpu()
        if tokens.shape != (self.rows, self.suffix_length):
            raise ValueError(
                f"the cache holds {self.suffix_length} suffix tokens but knows the ids of {tokens.shape[1]}; append "
                "with input_ids through the enabled model"
            )
        return tokens

    def _tokens_in_order(self) -> Tensor:
        """Ids of the suffixes' tokens, as far as they are known: ``[rows, tokens]`` int64."""
        if not self._suffix_tokens:
            return torch.empty(self.rows, 0, dtype=torch.long, device="cpu")
        device = self._suffix_tokens[-1].device
        tokens = torch.cat([part.to(device) for part in self._suffix_tokens], dim=1)
        whole = self.state.origins is not None and tokens.shape[1] == self.suffix_length
        return self.state.origins.gather(tokens) if whole and self.state.origins is not None else tokens

    def path_tokens(self, path: Path) -> Tensor:
        """Ids of the tokens on a path: ``[length]`` int64, on the CPU."""
        parts = [self.segment_tokens[span.segment][span.start : span.stop] for span in path]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device="cpu")

    @property
    def node_tokens(self) -> int:
        """Tokens held in the nodes' storage, each counted once."""
        return sum(self.state.segment_lengths)

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes stored, allocated, and what a stock cache would hold for the same rows."""
        per_token = sum(layer.storage.bytes_per_token for layer in self.layers)
        nodes = self.node_tokens * per_token
        allocated = sum(layer.storage.suffix_bytes for layer in self.layers)
        return CacheBytes(
            stored=nodes + self.rows * self.suffix_length * per_token,
            allocated=nodes + allocated,
            stock=sum(
                self.rows * within(self.get_seq_length(), layer.window) * layer.storage.bytes_per_token
                for layer in self.layers
            ),
        )

    # --- transformers' Cache -----------------------------------------------------------------------------------

    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """As every `Cache`, but only within a forward pass of an enabled model.

        Raises:
            NotATensorError: A model that is not enabled, or a submodule called directly, would append.
        """
        require_active()  # before anything is appended that attention could not read
        return super().update(*args, **kwargs)

    def activate_past_recording(self) -> None:
        """Nothing to do here, where nothing is forgotten before `crop`."""
        if self.awaited is not None:
            self.awaited.stock.activate_past_recording()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the longest row, with the padding that its caller's ``input_ids`` has."""
        appended = self.layers[layer_idx].appended if layer_idx < len(self.layers) else 0
        return self.state.padded_length + appended

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of the mask that a stock model would build."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row: of its suffix first, then of its nodes.

        Nodes lose nothing that another cache shows: this cache just stops looking at it.

        Raises:
            ValueError: `tokens_to_remove` is positive (transformers' old meaning, a target length).
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass a value <= 0"
            )
        count = -int(tokens_to_remove)  # transformers 5.17 passes a tensor
        own = min(count, self.suffix_length)
        if own and self._suffix_tokens:
            self._suffix_tokens = [torch.cat(self._suffix_tokens, dim=1)[:, :-own]]
        self.state.suffix_length -= own
        if self.state.origins is not None:
            self.state.origins.truncate(self.suffix_length)
        if count > own and self.state.forest is not None:
            length = self.get_seq_length()
            forest = self.forest.drop_last([min(count - own, context) for context in self.forest.context_lengths])
            self.state.forest = forest
            self.state.padding = max(0, length - (count - own)) - max(forest.context_lengths, default=0)

    def reset(self) -> None:
        """Forget all tokens and rows."""
        super().reset()
        self.lent_segments = 0
        self.state.forest, self.state.origins, self.state.segment_lengths = None, None, []
        self.state.suffix_length = 0
        self.segment_tokens, self._suffix_tokens, self.state.padding, self.fingerprint = [], [], 0, None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row ``i`` what row ``rows[i]`` was; rows may repeat, move, or be left out. Nodes are not copied.

        While the number of rows stays, suffixes are not copied either, see `SuffixOrigins`.
        """
        out_of_range = [row for row in rows if not 0 <= row < self.rows]
        if out_of_range:
            raise IndexError(f"row {out_of_range[0]} is not among the cache's rows 0..{self.rows - 1}")
        if self.state.forest is None:
            return
        if list(rows) == list(range(self.rows)):
            return
        length = self.get_seq_length()
        index = torch.tensor(list(rows), dtype=torch.long, device="cpu")
        paths, reordered = self.forest.paths, len(rows) == self.rows
        tokens = None if reordered else self._tokens_in_order()
        # The same object for the same nodes: then what was planned for them stays valid.
        if not reordered or any(paths[row] != path for row, path in zip(rows, paths, strict=True)):
            self.state.forest = self.forest.select_rows(list(rows))
        if tokens is None:
            self._reorder_suffixes(index)
        else:
            self._suffix_tokens = [tokens.index_select(0, index.to(tokens.device))]
            for layer in self.layers:
                layer.storage.select_rows(index, self.state.origins)
            self.state.origins = None
        self.state.padding = length - self.suffix_length - max(self.forest.context_lengths, default=0)

    def _reorder_suffixes(self, rows: Tensor) -> None:
        if not self.suffix_length:
            return
        if self.state.origins is None:
            self.state.origins = SuffixOrigins(self.rows, self.suffix_length, self.layers[0].device)
        self.state.origins.select(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes row ``beam_idx[i]``."""
        self.select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows in ``indices`` (numbers, or a boolean for each row)."""
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

    def __repr__(self) -> str:
        return f"SharedContextCache({self.forest!r}, suffix_length={self.suffix_length}, layers={len(self.layers)})"


def _is_count(number: Any) -> bool:
    """Whether it is an integer of any library, and not negative."""
    try:
        return not isinstance(number, bool) and operator.index(number) >= 0
    except TypeError:
        return False


def cache_bytes(cache: Any) -> int:
    """Bytes allocated for the keys and values of a transformers cache, or of a shared-context one."""
    if isinstance(cache, SharedContextCache):
        return cache.nbytes.allocated
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
