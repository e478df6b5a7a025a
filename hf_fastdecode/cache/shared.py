"""The shared-context cache: a transformers `Cache` that stores each shared run of tokens once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from ..attention.forest import Forest, Path, Span
from ..attention.torch_operators import BACKENDS, Backend
from .accounting import CacheBytes, within
from .layers.attention import no_tensor
from .layers.cross import EncodedInputs
from .pass_cache import PassCache
from .state import SharedState
from .suffixes import Suffixes


class FirstPass(Protocol):
    """Replaces the first forward pass of a decoding loop: prefills an empty cache with its prompts.

    Attributes:
        stock: Fallback cache for prompts that cannot share; None where the model makes its own.
    """

    stock: Cache | None

    def run(self, cache: SharedContextCache, arguments: dict[str, Any], forward: Callable[..., Any]) -> Any:
        """Return the model's output for the pass's `arguments`; `forward` is the model's own method."""
        ...


class LaterPasses(Protocol):
    """May replace later forward passes of a decoding loop, such as by captured ones."""

    def run(self, cache: SharedContextCache, arguments: dict[str, Any]) -> Any:
        """Return the model's output for the pass's `arguments`, or None for a pass that the model itself must run."""
        ...


class FilledBy(Protocol):
    """Snapshot of the model that filled a cache."""

    def difference(self, model: nn.Module) -> str | None:
        """What of a model is other than it was then; None if its keys and values would be the same."""
        ...


class SharedContextCache(PassCache):
    """Cache of keys and values for rows that share context.

    Nodes (runs of tokens shared by a contiguous range of rows) are stored once. Each row's own tokens go to a suffix,
    preallocated and written in place. `hf_fastdecode.prefill` returns one; `generate` creates one per call.

    Args:
        max_suffix: Upper bound on tokens appended per row, if known; bounds allocation.
        backend: Attention operators to use; see `hf_fastdecode.enable`.

    Raises:
        ValueError: `max_suffix` is not a token count, or `backend` is unknown.
    """

    def __init__(self, *, max_suffix: int | None = None, backend: Backend = "auto"):
        if max_suffix is not None and not _is_count(max_suffix):
            raise ValueError(f"max_suffix must be an integer of at least 0, or None, got {max_suffix!r}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.state = SharedState(max_suffix=max_suffix, backend=backend)
        super().__init__(layers=[])  # made by `meet`
        self.stores = None
        self.segment_tokens, self.protected_segments = [], 0
        self.fingerprint: FilledBy | None = None  # of the model that filled the cache, once one has
        self.kept = True  # whether it may outlive its call, so that it needs a fingerprint
        self.first_pass: FirstPass | None = None  # runs the next forward pass in place of the model
        self.later_passes: LaterPasses | None = None  # until the end of the call
        self.checks_masks = True  # whether masks of direct passes need checking
        self.inputs: EncodedInputs | None = None  # of an encoder-decoder
        self.gaps = False  # whether masks hid places between tokens of its prompts, which states depend on

    def fork(self, *, max_suffix: int | None = None, backend: Backend | None = None) -> SharedContextCache:
        """Return a cache with the same tokens that can grow independently.

        Node storage is shared. Suffixes are copied and become nodes of the fork, so this cache can keep appending.
        """
        fork = self.nodes_only(self.state.forest, max_suffix=max_suffix, backend=backend)
        if own := self.suffix_length:
            for layer, twin in zip(self.attention_layers, fork.attention_layers, strict=True):
                twin.storage.segments[len(self.segment_tokens)] = layer.storage.suffixes_as_segment(
                    own, self.state.suffixes.origins, self.forest.context_lengths, self.state.suffix_shard
                )
            segment = fork.add_segment(self.suffix_tokens().reshape(-1))
            if self.state.parallel is not None:
                fork.state.segment_runs[segment] = own
            lengths = self.suffix_lengths.tolist()
            for states, other in zip(self.state_layers, fork.state_layers, strict=True):
                states.copy_rows_to(other, [(segment, row * own + length) for row, length in enumerate(lengths)])
            fork.state.forest = Forest.from_paths(
                [(*path, Span(segment, row * own, lengths[row])) for row, path in enumerate(self.forest.paths)]
            )
        fork.state.padded_length = self.get_seq_length()
        return fork

    def nodes_only(
        self, forest: Forest | None, *, max_suffix: int | None = None, backend: Backend | None = None
    ) -> SharedContextCache:
        """Return a cache over another forest of the same segments, which are shared, with empty suffixes."""
        twin = SharedContextCache(max_suffix=max_suffix, backend=backend or self.state.backend)
        twin.state.parallel = self.state.parallel
        twin.segment_tokens = list(self.segment_tokens)
        twin.state.segment_lengths = list(self.state.segment_lengths)
        twin.state.segment_runs = dict(self.state.segment_runs)
        twin.protected_segments = self.protected_segments
        twin.state.forest, twin.fingerprint, twin.stores = forest, self.fingerprint, self.stores
        twin.state.padded_length = twin.state.longest_row
        twin.kept = self.kept
        twin.state.position_planes, twin.gaps = self.state.position_planes, self.gaps
        twin.state.counts_tokens = self.state.counts_tokens
        twin.inputs = self.inputs
        twin.layers, twin.state.met = [layer.for_nodes_of(twin.state) for layer in self.layers], self.state.met
        if layers := twin.state_layers:
            paths = dict.fromkeys(forest.paths if forest is not None else ())
            reached = {(span.segment, span.stop) for path in paths for span in path}
            for one in layers:
                one.move_ends({end: end for end in reached})
        return twin

    def adopt_state(self, other: SharedContextCache) -> None:
        """Take on the state of another cache, which must not be used afterwards."""
        self.__dict__.update(vars(other))

    def become(self, other: Cache) -> None:
        """Turn this object into another kind of cache, which whoever holds it goes on with; `other` is given up."""
        self.__dict__ = dict(vars(other))
        self.__class__ = type(other)

    def suffix_tokens(self) -> Tensor:
        """Token ids of the suffixes: ``[rows, suffix_length]`` int64, on the CPU; undefined beyond a row's own length.

        Raises:
            ValueError: The ids are unknown, because a model that is not enabled appended the tokens.
        """
        ids = self.state.suffixes.ids
        if ids.length != self.suffix_length:
            raise ValueError(
                f"the cache holds {self.suffix_length} suffix tokens but knows the ids of {ids.length}; append with "
                "input_ids through the enabled model"
            )
        return ids.known(self.rows).cpu()

    def length_with_states(self, path: Path, most: int) -> int:
        """Tokens of the longest part of a path, of at most so many, at whose end all layers with states have one."""
        lengths, length = [0], 0
        for span in path:
            length += span.length
            if length <= most and all((span.segment, span.stop) in layer.ends for layer in self.state_layers):
                lengths.append(length)
        return lengths[-1]

    def path_tokens(self, path: Path) -> Tensor:
        """Token ids of a path: ``[length]`` int64, on the CPU."""
        parts = [self.segment_tokens[span.segment][span.start : span.stop] for span in path]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device="cpu")

    @property
    def node_tokens(self) -> int:
        """Tokens in node storage, each counted once."""
        return sum(self.state.segment_lengths)

    @property
    def stored_node_tokens(self) -> int:
        """Of `node_tokens`, those that this process stores."""
        return sum(map(self.state.stored_length, range(len(self.state.segment_lengths))))

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes stored, allocated, and held by a stock cache for the same rows; those of this process."""
        storages, states, kept = self._storages, 0, 0
        for layer in self.state_layers:
            states += layer.row_bytes
            kept += layer.row_bytes * (len(layer.ends) + (0 if layer.states is None else layer.states.rows))
        nodes = self.stored_node_tokens * sum(storage.bytes_per_token for storage in storages) + kept
        inputs, inputs_per_row = (0, 0) if self.inputs is None else (self.inputs.nbytes, self.inputs.stock_row_bytes)
        nodes += inputs
        per_token = sum(storage.suffix_bytes_per_token for storage in storages)
        allocated = sum(storage.suffix_bytes for storage in storages)
        own = int(self.state.suffix_shard.counts(self.suffix_lengths).sum())
        return CacheBytes(
            stored=nodes + own * per_token,
            allocated=nodes + allocated,
            stock=self.rows * (states + inputs_per_row)
            + sum(
                self.rows
                * within(self.get_seq_length(), layer.window)
                * layer.store.stock_bytes(layer.storage.suffix_bytes_per_token)
                for layer in self.attention_layers
            ),
        )

    def activate_past_recording(self) -> None:
        """No-op: no token is dropped before `crop`."""
        if self.first_pass is not None and self.first_pass.stock is not None:
            self.first_pass.stock.activate_past_recording()

    def reset(self) -> None:
        """Remove all tokens and rows."""
        super().reset()
        self.protected_segments = 0
        self.state.forest, self.state.suffixes, self.state.segment_lengths = None, Suffixes(), []
        self.state.segment_runs = {}
        self.segment_tokens, self.state.padded_length, self.fingerprint, self.gaps = [], 0, None, False
        self.inputs = None

    @property
    def is_initialized(self) -> bool:
        """False in passes over whole prompts by transformers' own attention, each of which is a model's first one."""
        return self.state.tensors_of_pass is None and bool(super().is_initialized)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Most tokens of a row: -1, no bound. transformers' own asks the layers, of which an empty cache has none."""
        return -1

    @property
    def max_cache_len(self) -> int:
        """The name that PEFT knows it by, which transformers has removed."""
        return self.get_max_length()

    def __iter__(self) -> Iterator[Any]:
        """Refuse what transformers' caches give: each layer's keys and values."""
        raise TypeError(no_tensor("keys"))

    def __repr__(self) -> str:
        return f"SharedContextCache({self.forest!r}, suffix_length={self.suffix_length}, layers={len(self.layers)})"


def _is_count(number: Any) -> bool:
    """Whether it is a nonnegative integer of any library."""
    try:
        return not isinstance(number, bool) and operator.index(number) >= 0
    except TypeError:
        return False


def cache_bytes(cache: Any) -> int:
    """Bytes allocated for keys, values and states by any transformers cache, an encoder's tokens included."""
    if isinstance(cache, SharedContextCache):
        return cache.nbytes.allocated
    if isinstance(cache, EncoderDecoderCache):
        return cache_bytes(cache.self_attention_cache) + cache_bytes(cache.cross_attention_cache)
    parts = (part for layer in cache.layers for part in _parts(layer))
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def _parts(layer: Any) -> Iterator[Any]:
    """What a layer of transformers' caches holds: None for what it has not computed."""
    yield from (getattr(layer, name, None) for name in ("keys", "values"))
    for name in ("conv_states", "recurrent_states"):
        yield from getattr(layer, name, {}).values()
