"""The shared-context cache, a transformers `Cache` that stores each shared run of tokens once, and checks of the
arguments of a user's own forward pass over it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from ..attention.forest import Forest, Path, Span, end_of
from ..attention.kv import NotATensorError
from ..attention.overrides import lengths_of_pass
from ..attention.torch_operators import BACKENDS, Backend
from ..errors import Unsupported
from ..instance_methods import STATE_ATTRIBUTE
from .accounting import CacheBytes, within
from .forest_cache import ForestCache
from .layers.attention import REMEDY, SharedContextLayer, no_tensor
from .layers.cross import EncodedInputs
from .layers.state import StateLayer
from .layout import ModelLayout, layers_of
from .state import Pass, SharedState
from .storage import Suffixes
from .stores import Store


class FirstPass(Protocol):
    """Replaces the first forward pass of a decoding loop: prefills an empty cache with its prompts.

    `stock` is the fallback cache for prompts that cannot share; None where the model makes its own.
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
        """The part of a model that has changed since; None if its keys and values would be the same."""
        ...


class SharedContextCache(ForestCache):
    """Cache of keys and values for rows that share context.

    Nodes (runs of tokens shared by a contiguous range of rows) are stored once. Each row's own tokens go to a suffix,
    preallocated and written in place. `hf_fastdecode.prefill` returns one; `generate` creates one per call.

    Args:
        max_suffix: Upper bound on tokens appended per row, if known; bounds allocation.
        backend: Attention operators to use; see `hf_fastdecode.enable`.

    Raises:
        ValueError: `max_suffix` is not a token count, or `backend` is unknown.

    Attributes:
        stores: What each layer of the model stores whose layout was checked; None before.
    """

    stores: tuple[tuple[Store, ...], ...] | None

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
                    own, self.state.suffixes.origins, self.forest.context_lengths, self.state.division.suffix_shard
                )
            segment = fork.add_segment(self.suffix_tokens().reshape(-1))
            if self.state.division.is_divided:
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
        twin.state.division = self.state.division
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
        return sum(self.state.segment_lengths)

    @property
    def stored_node_tokens(self) -> int:
        """The part of `node_tokens` that this process stores."""
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
        own = int(self.state.division.suffix_shard.counts(self.suffix_lengths).sum())
        return CacheBytes(
            stored=nodes + own * per_token,
            allocated=nodes + allocated,
            stock=self.rows * (states + inputs_per_row)
            + sum(
                self.rows * within(self.get_seq_length(), layer.window) * layer.stock_bytes_per_token
                for layer in self.attention_layers
            ),
        )

    def longest_row(self, queries: int) -> int:
        """Length of the longest row by the end of the call: after `queries` more tokens, or at the known bound.

        Padding of a decoder's prompts counts after an encoder, where positions count it.
        """
        room = max(0, (self.state.max_suffix or 0) - self.suffix_length)
        if self.state.current.items:
            return max(item.position + item.span.length for item in self.state.current.items) + room
        longest = self.state.longest_row_bound
        if self.inputs is not None:
            longest = max(longest, self.get_seq_length())
        return max(longest + max(queries, room), self.state.longest_to_come)

    def meet(self, layout: ModelLayout) -> None:
        """Make the layers of a model, or raise ValueError if the cache's are of a model with other layers."""
        if self.stores is not layout.layers:  # as it is in all but the first pass of a call
            held = self.layers if self.rows or self.segment_tokens else ()
            layers = layers_of(layout, self.state, held)
            if layout.cross and self.inputs is None:
                raise ValueError(
                    f"a SharedContextCache of a {layout.model_type} model is made by generate, for its inputs alone"
                )
            self.layers, self.stores = layers, layout.layers

    def has_room(self, tokens: int) -> bool:
        """Whether suffixes have capacity for `tokens` tokens per row; the same on all processes that divide them."""
        needed = self.state.division.room(tokens)
        return all(layer.storage.capacity >= needed for layer in self.attention_layers)

    def reserve(self, tokens: int) -> None:
        """Allocate `tokens` suffix tokens per row before a captured step."""
        for layer in self.attention_layers:
            layer.reserve(tokens)

    def record_captured_step(self, input_ids: Tensor) -> None:
        """Record that a captured step appended tokens ``[rows, queries]`` to the suffixes of every layer."""
        self.record_tokens(input_ids)
        self.state.suffixes.lengths = self.state.suffixes.lengths.plus(input_ids.shape[1])
        self.state.padded_length += input_ids.shape[1]

    def record_tokens(self, input_ids: Tensor) -> None:
        """Record the ids ``[rows, queries]`` of appended tokens, for prefix matching in later calls."""
        suffixes = self.state.suffixes
        suffixes.ids = suffixes.ids.plus(input_ids, suffixes.lengths)

    @contextmanager
    def all_or_nothing(self, rows: int = 0, queries: int = 0) -> Iterator[None]:
        """Context of a forward pass: tokens are appended to every layer, or on failure to none.

        Its `rows` and `queries`, tokens per row, nothing else tells of a cache without keys and values. Raises
        ValueError where the pass appended to some layers only, or rows have lost their states to a pass that failed.
        """
        state, suffixes = self.state, self.state.suffixes
        forest, layers, before, ids = state.forest, (list(self.layers), self.stores), suffixes.lengths, suffixes.ids
        is_step = not state.current.items
        if is_step:
            self._check_states(rows, queries)
        try:
            if is_step and not before.longest:
                self.fork_states(self.state_layers)
            yield
            appended = {layer.appended for layer in self.attention_layers}
            if not appended and is_step:
                appended = {queries}
                state.forest = state.forest or Forest(rows)
            if len(appended) > 1:
                shortest, longest = before.longest + min(appended), before.longest + max(appended)
                raise ValueError(
                    f"after this pass the suffixes of the cache's layers differ in length, {shortest} to {longest} "
                    f"tokens: the pass left out some of the layers that filled the cache; {REMEDY}"
                )
            if suffixes.ids is ids and any(appended):  # a pass without ids, after which no others are known
                suffixes.ids = ids.first(before.shortest)
            suffixes.lengths = before.plus(max(appended, default=0))
            state.padded_length += max(appended, default=0)
        except BaseException:
            state.forest, (self.layers, self.stores) = forest, layers
            state.met = None  # whose layers may be gone
            suffixes.restore(before, ids)
            for states in self.state_layers:  # of which some are those after the pass
                states.drop_rows()
            if forest is None:  # the next pass may have other rows, dtype or device
                for layer in self.attention_layers:
                    layer.storage.replace_suffixes(None)
                    layer.is_initialized = False
            raise
        finally:
            if is_step:
                state.current = Pass()
            for layer in self.attention_layers:
                layer.appended = 0

    def _check_states(self, rows: int, queries: int) -> None:
        if not (layers := self.state_layers) or self.state.forest is None:
            return
        if rows != self.rows:
            raise ValueError(f"the cache holds {self.rows} rows, got tokens for {rows}")
        if queries > 1 and not self.is_empty and not all(layer.state_store.continues for layer in layers):
            raise ValueError(
                f"a pass of {queries} tokens per row would not continue the states of this model's layers, whose "
                "scans begin anew; pass one token at a time, or the whole text to generate"
            )
        if self.suffix_length and any(layer.states is None for layer in layers):
            raise ValueError("a pass that failed has left rows of this cache without their states; make it again")

    def fork_states(self, layers: Sequence[StateLayer]) -> None:
        """Copy the states at the ends of paths to rows that have none of their own yet, in these layers."""
        if self.state.forest is not None and not self.suffix_length:
            ends = [end_of(path) for path in self.forest.paths]
            for layer in layers:
                if layer.states is None:
                    layer.begin_rows(ends)

    @property
    def computed_in(self) -> torch.dtype | None:
        """The widest dtype of any layer's keys and values, or convolutions' states; None before the first pass."""
        dtypes = [layer.dtype for layer in self.attention_layers if layer.is_initialized]
        dtypes += [layer.dtype for layer in self.state_layers if layer.dtype is not None]
        return max(dtypes, key=lambda dtype: dtype.itemsize, default=None)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """As `Cache.update`, but only within a forward pass of an enabled model.

        Raises:
            NotATensorError: The model is not enabled, or a submodule was called directly.
            Unsupported: By the model's layout the layer stores nothing.
        """
        if lengths_of_pass() is None and self.state.current.tensors is None:
            raise NotATensorError("update", "keys and values")  # before it appends tokens that nothing could read
        if layer_idx not in range(len(self.layers)) or not isinstance(self.layers[layer_idx], SharedContextLayer):
            raise Unsupported(f"layer {layer_idx} stores keys and values, and its config says that it stores none")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """As `Cache.get_conv_state`, which layers with states call first, but only within a pass as `update` is.

        Another pass would begin with no prompt's states, and leave its own to later ones.
        """
        self._require_active("get_conv_state")
        state: Tensor | None = super().get_conv_state(*args, **kwargs)
        return state

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """As `get_conv_state`, for earlier transformers, whose layers call this first."""
        if layer_idx is not None:
            self._require_active("has_previous_state")
        return bool(super().has_previous_state(layer_idx, *args, **kwargs))

    @property
    def is_compileable(self) -> bool:
        """False; transformers' `generate` asks it first, also of a model that is not enabled."""
        self._require_enabled()
        return bool(super().is_compileable)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """``(kv_length, kv_offset)`` of a stock model's mask, which passes ask before they compute anything."""
        self._require_enabled()
        return self.get_seq_length(layer_idx) + query_length, 0

    def _require_enabled(self) -> None:
        """Raise ValueError if the model that the last pass was of is known not to be enabled any longer."""
        met = self.state.met and self.state.met()
        if met is not None and STATE_ATTRIBUTE not in vars(met):
            raise ValueError(
                f"this SharedContextCache is for passes of an enabled model, and the {type(met).__name__} that filled "
                "it is no longer enabled; call hf_fastdecode.enable(model)"
            )

    def _require_active(self, what: str) -> None:
        if lengths_of_pass() is None and self.state.current.tensors is None:
            raise NotATensorError(what, "states")

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
        return self.state.current.tensors is None and bool(super().is_initialized)

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
    """The tensors of a layer of transformers' caches; None for one that it has not computed."""
    yield from (getattr(layer, name, None) for name in ("keys", "values"))
    for name in ("conv_states", "recurrent_states"):
        yield from getattr(layer, name, {}).values()


def named_arguments(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward pass by name; raises TypeError if one is given twice, or too many are given."""
    if len(args) > len(names):
        raise TypeError(f"forward() takes {len(names)} positional arguments but {len(args)} were given")
    given = dict(zip(names, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"forward() got multiple values for argument {min(twice)!r}")
    return given | kwargs


def next_positions(cache: SharedContextCache, queries: int) -> Tensor:
    """Position ids of each row's next tokens: ``[rows, queries]`` int64, on the device that knows suffix lengths.

    Raises ValueError after images whose tokens have positions in planes.
    """
    if not cache.state.counts_tokens:
        raise ValueError(
            "positions behind the images of this cache are not those of counted tokens; pass position_ids, or the "
            "whole prompt with its images to generate"
        )
    lengths = cache.state.suffixes.lengths
    own = torch.tensor(lengths.longest, device="cpu") if lengths.per_row is None else lengths.per_row
    width = cache.state.padded_width
    before = cache.forest.context_lengths if width is None else [width] * cache.rows
    contexts = torch.tensor(before, dtype=torch.long, device="cpu").to(own.device)
    return (contexts + own)[:, None] + torch.arange(queries, device=own.device)


def require_next(cache: SharedContextCache, position_ids: Tensor) -> None:
    """Raise ValueError for positions ``[rows or 1, queries]`` other than `next_positions`, by which layers rotate."""
    rows, queries = position_ids.shape
    if cache.rows not in (0, 1, rows) and rows != 1:
        return  # whose number of rows the cache refuses
    expected = next_positions(cache, queries) if cache.rows else torch.arange(queries, device="cpu")
    if bool((position_ids != expected.to(position_ids.device)).any()):
        raise ValueError(
            "this model counts the positions of cached tokens, so position_ids must follow each row's tokens and "
            "rise by 1, and these do not; omit them, or run the ordinary model"
        )
